"""The compiled CPU kernel: its build at first use for what this machine's processor can do, and its functions.

The source is built by the system's C compiler in about two seconds and kept in `batchrun/kernels` of the user's cache folder,
keyed by source, flags, compiler and CPU.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from batchrun.kernels.arena import Arena
from batchrun.kernels.spec import KVConfig
from batchrun.kernels.targets import TARGETS, Processor, Target, processor, runnable

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-pthread", "-fno-math-errno")
"""For any target; each adds its own."""
AMX_SOURCES = ("amx_permission.c", "amx_tiles.c")
"""The sources compiled with AMX_FLAGS, and only for CPUs that have the instructions: no other may ever meet them."""
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16")
MAX_HEAD_DIM = 256
BUILD_SECONDS = 120


class NotAvailable(Exception):
    """Why this machine does without the compiled kernel, in one line."""


@dataclass(frozen=True)
class Native:
    """The loaded library."""

    library: ctypes.CDLL
    path: Path
    target: Target
    amx: bool = False
    """Whether the CPU has matrix tiles; whether they may be used is for `native_amx.choose` to say."""
    passed_over: str = ""
    """Why it is not for a better target of this processor; empty if it is for the best."""
    arena: Arena = field(default_factory=Arena, compare=False)
    """Where weights are packed."""


@functools.cache
def load(name: str | None = None) -> Native | NotAvailable:
    """The library, built if needed; or the reason why there is none.

    `name`: of a target. By itself the best one that the processor runs and the compiler knows: one that is older than the
    processor may not know its instructions.
    """
    cpu = processor()
    reasons: list[NotAvailable] = []
    for target in runnable(cpu):
        if name not in (None, target.name):
            continue
        try:
            built = _build_and_open(_compiler(), cpu, target, target is TARGETS[0] and has_amx(cpu.features))
            return replace(built, passed_over=str(reasons[0])) if reasons else built
        except NotAvailable as reason:
            reasons.append(reason)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(NotAvailable(f"the build failed: {' '.join(str(error).split())}"))
    return reasons[0] if reasons else NotAvailable(f"this processor does not run what is compiled for {name}")


def _build_and_open(compiler: str, cpu: Processor, target: Target, amx: bool) -> Native:
    if amx:
        with contextlib.suppress(NotAvailable):  # compilers before gcc 11 and clang 11 do not know the instructions
            return _open(_built(compiler, cpu, target, AMX_FLAGS), target, amx=True)
    return _open(_built(compiler, cpu, target), target, amx)


def has_amx(flags: frozenset[str]) -> bool:
    """Whether a CPU with these features multiplies bfloat16 matrix tiles (Intel AMX)."""
    return {"amx_tile", "amx_bf16"} <= flags


def suits(config: KVConfig) -> bool:
    """Whether the kernel computes this dtype and head size."""
    return config.dtype == torch.bfloat16 and config.head_dim % 16 == 0 and config.head_dim <= MAX_HEAD_DIM


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise NotAvailable("no C compiler found: install gcc or clang")
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotAvailable(f"{command[0]} failed: {lines[0].strip() if lines else f'exit code {done.returncode}'}")
    return done.stdout


def _cache_folder() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path("~/.cache").expanduser()
    return base / "batchrun" / "kernels"


def _built(compiler: str, cpu: Processor, target: Target, amx_flags: tuple[str, ...] = ()) -> Path:
    """The library's file, AMX_SOURCES compiled with `amx_flags`; its name ends with a hash of its content.

    Two processes that build at once each rename a complete file into place.
    """
    flags = (*FLAGS, *target.flags)
    sources = [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    version = _run([compiler, "--version"])
    settings = (*flags, *amx_flags, version, cpu.machine, cpu.name)
    key = hashlib.sha256(b"\0".join([*sources, *(part.encode() for part in settings)])).hexdigest()[:20]
    cache = _cache_folder()
    for path in cache.glob(f"{target.name}-{key}-*.so"):
        if path.stem.endswith(f"-{_digest(path)}"):
            return path
        path.unlink(missing_ok=True)  # damaged: to load it could end the process
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
        library, objects = Path(folder) / "kernels.so", []
        for source in sorted(SOURCES.glob("*.c")):
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            _run([compiler, *flags, *(amx_flags if source.name in AMX_SOURCES else ()), "-c", str(source), "-o", objects[-1]])
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(library), "-lm"])
        path = cache / f"{target.name}-{key}-{_digest(library)}.so"
        os.replace(library, path)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _open(path: Path, target: Target, amx: bool = False) -> Native:
    library = ctypes.CDLL(str(path))
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.batchrun_attend.argtypes = [pointer, pointer, pointer, pointer, int32]
    library.batchrun_write_kv.argtypes = [
        *(pointer, int64, int32, int32, int32),
        *(pointer, int64, int64),
        *(pointer, int64, int64),
        *(pointer, int64, int32),
    ]
    library.batchrun_move_kv.argtypes = [pointer, int64, int64, int32, int32, pointer, int64, pointer, int32]
    library.batchrun_rotate_and_write.argtypes = [
        *(pointer, int64, int32, int32, int32, int32),
        *(pointer, int64),
        *(pointer, pointer, pointer, int64),
        *(pointer, int32),
    ]
    library.batchrun_rms_norm.argtypes = [
        *(pointer, int64),
        *(pointer, int64),
        *(pointer, ctypes.c_float),
        *(pointer, pointer, int64, int64, int32),
    ]
    library.batchrun_silu_mul.argtypes = [pointer, int64, pointer, int64, int64, int32]
    library.batchrun_gather.argtypes = [pointer, int64, int64, pointer, int64, pointer, int32]
    library.batchrun_best.argtypes = [pointer, int64, int64, int64, pointer, pointer, int32]
    library.batchrun_draw.argtypes = [
        *(pointer, int64, int64),
        *(pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_float, int64, pointer, int32),
    ]
    library.batchrun_linear.argtypes = [pointer]
    library.batchrun_allow_amx.argtypes, library.batchrun_allow_amx.restype = [], int32
    library.batchrun_sleep_soon.argtypes = []
    for name in ("attend", "linear", "rms_norm", "silu_mul", "best", "draw", "sleep_soon"):
        getattr(library, f"batchrun_{name}").restype = None
    for name in ("gather", "write_kv", "rotate_and_write", "move_kv"):
        getattr(library, f"batchrun_{name}").restype = int64
    return Native(library, path, target, amx)
