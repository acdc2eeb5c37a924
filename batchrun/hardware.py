"""What the machine is: memory, processors, and how fast it multiplies and reads.

Sizes are the machine's totals, cut down to what its control group allows, and never what happens to be free: batches are
formed from them, and two runs on one machine must form the same ones.
"""

import math
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from batchrun.errors import Refused

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "avx512_fp16", "asimd", "bf16", "i8mm", "sve")
MEASURE_SECONDS = 0.3
"""For each of the two measurements of `measure`."""


@dataclass(frozen=True)
class Target:
    """A machine to predict for."""

    name: str
    flop_per_s: float
    """Multiplications and additions of a large matrix product in the compute type, per second."""
    bytes_per_s: float
    """Memory read."""
    memory_bytes: int


# What large products and copies were measured to reach, not the data sheets' peaks, in bfloat16. `cpu` is two cores of a
# server with AMX; the A100's are 80 % of its peaks.
TARGETS = {
    "cpu": Target("cpu", 2.1e12, 24e9, 16 << 30),
    "h200": Target("h200", 780e12, 4.3e12, 141 * 10**9),
    "a100": Target("a100", 250e12, 1.6e12, 80 * 10**9),
}


def load_target(name: str) -> Target:
    """A target by its name in TARGETS, or from a TOML file with `flop_per_s`, `bytes_per_s` and `memory_bytes`.

    Raises:
        Refused: neither, or a file with a missing, unknown or non-positive value.
    """
    if name in TARGETS:
        return TARGETS[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise Refused(f"--target is {name!r}: it must be this, {', '.join(TARGETS)} or a .toml file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"--target is {name!r}, which cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Refused(f"--target is {name!r}, which is not TOML: {error}") from error
    wanted = [field.name for field in fields(Target) if field.name != "name"]
    for key in values:
        if key not in (*wanted, "name"):
            raise Refused(f"{name}: unknown key {key!r}: there are name, {', '.join(wanted)}")
    for key in wanted:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise Refused(f"{name}: {key} is {value!r}: it must be a number above 0")
    return Target(
        str(values.get("name", path.stem)), float(values["flop_per_s"]), float(values["bytes_per_s"]), int(values["memory_bytes"])
    )


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less where a control group (v1 or v2) says so.

    `root` is where proc and sys lie.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [*_group_values(root, "memory", "memory.limit_in_bytes"), *_group_values(root, "", "memory.max")]
    # "max", and in v1 a number beyond any machine's memory, say that there is no limit.
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def usable_cpus(root: Path = Path("/")) -> int:
    """Processors that this process may use at once: its affinity, or less where a control group grants less time."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [limit.split() for limit in _group_values(root, "", "cpu.max")]
    shares += [
        [quota, period]
        for quota, period in zip(
            _group_values(root, "cpu", "cpu.cfs_quota_us"), _group_values(root, "cpu", "cpu.cfs_period_us"), strict=False
        )
    ]
    for share in shares:
        if len(share) == 2 and share[0].isdigit() and share[1].isdigit() and int(share[1]) > 0:
            cpus = min(cpus, max(1, math.ceil(int(share[0]) / int(share[1]))))
    return cpus


def _group_values(root: Path, controller: str, name: str) -> Iterator[str]:
    """The content of a file of this process's control group and of those above it; controller "" is v2.

    Within a container the group's own path is often not visible, and the top of the mounted tree is the group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if (controller not in controllers.split(",")) if controller else controllers:
            continue
        top = root / "sys/fs/cgroup" / controller
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            if (folder / name).is_file():
                yield (folder / name).read_text().strip()
            if folder == top:
                break


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    return _cpuinfo("model name") or os.uname().machine


def cpu_flags() -> tuple[str, ...]:
    """Of the instruction sets that matter here, those that the processor has."""
    present = set((_cpuinfo("flags") or _cpuinfo("Features") or "").split())
    return tuple(flag for flag in _FLAGS if flag in present)


def _cpuinfo(key: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), None)


def pool_memory(device: str, weight_bytes: int = 0) -> int:
    """Bytes that the KV pool may take by default.

    On the CPU an eighth of the memory: the rest is the weights', the system's and other programs'. On a GPU, which is
    ours alone, nine tenths of what the weights leave.
    """
    if device == "cpu":
        return total_memory() // 8
    import torch

    total = int(torch.cuda.get_device_properties(device).total_memory)
    return max(0, total - weight_bytes) * 9 // 10


def measure(device: str, dtype: str, threads: int | None = None) -> Target:
    """This machine, by a product of two matrices and a sum over memory: about a second.

    dtype is `float32`, `bfloat16` or `float16`; threads become torch's for the whole process, None leaves its own. The best
    of several tries counts: another program's share of the machine should not become part of the figure.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    with torch.inference_mode():
        left, right = (torch.ones(1024, 1024, dtype=kind, device=device) for _ in range(2))
        product_s = _best_time(lambda: left @ right, device)
        memory = total_memory() if device == "cpu" else int(torch.cuda.get_device_properties(device).total_memory)
        # Larger than the caches, and written once: untouched zeros are all one page of memory.
        count = min(1 << 28, memory // 16) // 4
        block = torch.ones(count, dtype=torch.float32, device=device)
        read_s = _best_time(block.sum, device)
    name = "this machine" if device == "cpu" else torch.cuda.get_device_name(device)
    return Target(name, 2 * 1024**3 / product_s, 4 * count / read_s, memory)


def _best_time(work: Callable[[], object], device: str) -> float:
    import torch

    best, began = math.inf, time.perf_counter()
    while time.perf_counter() - began < MEASURE_SECONDS:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
