"""`batchrun doctor`: what this machine and installation have, what is missing, and what follows from it."""

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from batchrun import __version__, hardware
from batchrun.engine.conversion import cache_folder
from batchrun.engine.device import attention_status, page_size
from batchrun.engine.loader import EMBEDDED_COMMAND, EMBEDDED_PACKAGE, pick_device, pick_dtype
from batchrun.errors import Refused
from batchrun.links import LINKED, check_links

# Distribution -> what does not work without it; "" when nothing does.
LIBRARIES = {
    "torch": "",
    "numpy": "",
    "pyarrow": "",
    "tokenizers": "",
    "jinja2": "",
    "safetensors": "",
    "xxhash": "",
    "click": "",
    "transformers": "the tests that compare with it cannot run",
    "gguf": "GGUF models, the embedded one among them, cannot be converted",
    "duckdb": "`batchrun sql` cannot run",
    "rich": "no progress bar on a terminal",
    "triton": "no GPU kernels; the CPU needs none",
}
_NEEDED = "batchrun cannot run: install it again with its dependencies"


class Fact(NamedTuple):
    """One line of the report."""

    section: str
    name: str
    value: str
    problem: str | None = None
    """What follows from what is missing, and what to do; None when it is fine."""
    broken: bool = False
    """Nothing can run before this is put right."""


def diagnose() -> list[Fact]:
    """Look at everything; imports torch when it is there; builds the attention kernel as the first run would."""
    return [*_installation(), *_libraries(), *_machine(), *_devices(), *_model()]


def report_lines(facts: list[Fact]) -> list[str]:
    """The facts as text for a person, sections in order, what is missing at the end."""
    lines: list[str] = []
    section = ""
    for fact in facts:
        if fact.section != section:
            section = fact.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {fact.name:<16} {fact.value}")
    problems = [f"  {fact.name}: {fact.problem}" for fact in facts if fact.problem]
    return [*lines, "", *(["missing", *problems] if problems else ["nothing is missing"])]


def _installation() -> Iterator[Fact]:
    yield Fact("installation", "batchrun", __version__)
    yield Fact("installation", "python", f"{platform.python_version()} at {sys.executable}")
    yield Fact("installation", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    try:
        check_links()
        yield Fact("installation", "folders", f"{', '.join(LINKED)} are there")
    except Refused as error:
        yield Fact("installation", "folders", "not whole", str(error), broken=True)
    found = importlib.util.find_spec("kernels")
    ours = Path(__file__).resolve().parents[1] / "kernels"
    if found is not None and found.origin is not None and Path(found.origin).resolve().is_relative_to(ours):
        problem = "this folder hides Hugging Face's package of that name from transformers: remove its __init__.py"
        yield Fact("installation", "kernels", found.origin, problem)


def _libraries() -> Iterator[Fact]:
    for name, without in LIBRARIES.items():
        try:
            yield Fact("libraries", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Fact("libraries", name, "not installed", without or _NEEDED, broken=not without)


def _machine() -> Iterator[Fact]:
    flags = hardware.cpu_flags()
    yield Fact("machine", "processor", hardware.cpu_model())
    yield Fact("machine", "instructions", ", ".join(flags) or "none of those looked for")
    yield Fact("machine", "processors", f"{hardware.usable_cpus()} usable")
    memory = hardware.total_memory()
    yield Fact(
        "machine",
        "memory",
        f"{memory / 2**30:.1f} GiB usable, {hardware.pool_memory('cpu') / 2**30:.1f} GiB of it for KV by default",
    )


def _devices() -> Iterator[Fact]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Fact("compute", "torch", f"cannot be imported: {error}", _NEEDED, broken=True)
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Fact("compute", f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB")
    if not count:
        build = "this torch is a CPU build" if torch.version.cuda is None else f"torch is built for CUDA {torch.version.cuda}"
        yield Fact("compute", "GPU", f"none found ({build})", "jobs run on the CPU")
    device = pick_device("auto")
    yield Fact("compute", "device", f"{device} (what --device auto takes)")
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    slow = (
        "the processor multiplies no bfloat16, so that float32 is used, which needs twice the memory; where the kernels below are"
        " compiled, --dtype bfloat16 is faster as well"
        if device == "cpu"
        else None
    )
    yield Fact("compute", "dtype", f"{dtype} (what --dtype auto takes)", slow if dtype == "float32" else None)
    yield Fact("compute", "threads", str(torch.get_num_threads()))
    try:
        yield Fact("compute", "kernels", f"{device}, pages of {page_size(device)} tokens")
        yield Fact("compute", "attention", f"in bfloat16: {attention_status()}")
    except ValueError as error:
        yield Fact("compute", "kernels", f"none for {device}", f"{error}: give --device cpu", broken=device == "cpu")


def _model() -> Iterator[Fact]:
    installed = importlib.util.find_spec(EMBEDDED_PACKAGE) is not None
    if installed:
        yield Fact("model", "embedded", f"{EMBEDDED_PACKAGE} is installed")
    else:
        yield Fact("model", "embedded", "not installed", f"run needs --model, or: {EMBEDDED_COMMAND}")
    folder = cache_folder()
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    yield Fact("model", "cache", f"{folder}, {size / 2**20:.0f} MiB in {len(files)} files" if files else f"{folder}, empty")
