"""batchrun: run a large file of LLM prompts, computing every shared prefix once.

Names are loaded on first use (PEP 562): importing `batchrun.engine` must not pull in the whole program.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun.api import PlanReport, RunResult, plan, run

__version__ = "0.1.0"
__all__ = ["PlanReport", "RunResult", "plan", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from batchrun.links import check_links

        check_links()
        from batchrun import api

        return getattr(api, name)
    raise AttributeError(f"module 'batchrun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
