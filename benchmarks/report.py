"""What a comparison says: the check that all did the same work, the medians, the ratio to the best peer, the floor."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from results import RunFailed, markdown

Runs = Sequence[Mapping[str, Any]]


class Median(NamedTuple):
    """The runs of one engine with the rows in one order."""

    engine: str
    order: str
    runs: Runs

    @property
    def wall_s(self) -> float:
        return self.of("wall_s")

    def of(self, column: str) -> float:
        return float(statistics.median(run[column] for run in self.runs))


def is_ours(engine: str) -> bool:
    return engine.split("-", maxsplit=1)[0] == "batchrun"


def medians(runs: Runs) -> list[Median]:
    """One for each engine and order, in the order of their first runs."""
    keys = dict.fromkeys((run["engine"], run["order"]) for run in runs)
    return [Median(*key, [run for run in runs if (run["engine"], run["order"]) == key]) for key in keys]


def best(found: Iterable[Median]) -> Median | None:
    """The fastest, an engine's better order being what it is judged by; None of none."""
    return min(found, key=lambda median: median.wall_s, default=None)


def check_same_work(run: Mapping[str, Any], prompt_tokens: int, output_tokens: int) -> None:
    """Raise RunFailed unless a run read and wrote as many tokens as its workload has."""
    found = (run["prompt_tokens"], run["output_tokens"])
    if found != (prompt_tokens, output_tokens):
        raise RunFailed(
            f"{run['engine']} did other work than the file asks for: it counted {found[0]} prompt and {found[1]} output tokens, "
            f"the file has {prompt_tokens} and {output_tokens}"
        )


DISTURBED = 0.05
"""Share of the processors that others may take before a report says so."""
HEADER = (
    "engine",
    "rows are",
    "runs",
    "median s",
    "range s",
    "rows/s",
    "load s",
    "peak RSS GiB",
    "prompt tokens reused",
    "floor / measured",
)


def table(runs: Runs) -> str:
    """The Markdown table of one workload's runs."""
    lines = []
    for median in medians(runs):
        walls = [run["wall_s"] for run in median.runs]
        known = [run["cached_tokens"] for run in median.runs if run["cached_tokens"] is not None]
        lines.append(
            [
                median.engine,
                median.order,
                len(median.runs),
                median.wall_s,
                f"{min(walls):.1f}-{max(walls):.1f}",
                median.runs[0]["rows"] / median.wall_s,
                median.of("load_s"),
                median.of("peak_rss_bytes") / 2**30,
                round(statistics.median(known)) if known else "not told",
                median.of("floor_s") / median.wall_s,
            ]
        )
    return markdown(HEADER, lines)


def ratios(runs: Runs) -> list[str]:
    """Sentences: each of our engines against the fastest peer, and what sharing brings."""
    found = medians(runs)
    peer = best(median for median in found if not is_ours(median.engine))
    ours = [median for median in found if is_ours(median.engine)]
    sentences = []
    for median in ours:
        if peer:
            ratio = peer.wall_s / median.wall_s
            sentences.append(f"{median.engine} / {peer.engine} ({peer.order}): {ratio:.2f} times the rows per second")
    by_name = {median.engine: median for median in ours}
    if "batchrun" in by_name and "batchrun-unshared" in by_name:
        ratio = by_name["batchrun-unshared"].wall_s / by_name["batchrun"].wall_s
        sentences.append(f"batchrun / batchrun-unshared: {ratio:.2f} times the rows per second")
    return sentences


def disturbances(runs: Runs) -> list[str]:
    """A sentence when other programs took part of the processors, since then the figures say little."""
    worst = max(run["others_cpu_share"] for run in runs)
    return [f"**disturbed**: other programs took up to {worst:.0%} of the processors during a run"] if worst > DISTURBED else []


def report(runs: Runs) -> str:
    """Everything about one workload, as Markdown; all runs have its columns."""
    first = runs[0]
    how = "greedy" if first["temperature"] == 0 else f"sampled at {first['temperature']}"
    title = f"**{first['file']}**, first {first['rows']} rows, {how}: {first['prompt_tokens']:,} prompt tokens of which "
    title += f"{first['distinct_tokens']:,} distinct, {first['output_tokens']:,} output tokens"
    roof = (
        f"floor {first['floor_s']:.3g} s: prefill {first['floor_prefill_s']:.3g}, decode {first['floor_decode_s']:.3g} "
        f"(bound by {first['decode_bound']}) at {first['gemm_flop_per_s'] / 1e9:,.0f} GFLOP/s and "
        f"{first['read_bytes_per_s'] / 1e9:.3g} GB/s; {first['overlapped_s']:.3g} s if the phases overlapped in full"
    )
    return "\n".join([title, "", table(runs), "", *(f"- {sentence}" for sentence in [*ratios(runs), roof, *disturbances(runs)])])
