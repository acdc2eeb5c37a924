"""What the compiled kernel can be compiled for, and which of it this machine can run."""

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "AMD64")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
_CONTRACT = "-ffp-contract=fast"
"""One instruction of a product and the sum that it goes into, which csrc/simd_vectors.h asks for in no other way."""


@dataclass(frozen=True)
class Target:
    """A kind of processor."""

    name: str
    """Part of the library's file name."""
    title: str
    machines: tuple[str, ...]
    """What `platform.machine` calls it; any if empty."""
    features: tuple[str, ...]
    """What it must have, as /proc/cpuinfo calls it."""
    flags: tuple[str, ...]
    """The compiler's."""


TARGETS = (
    Target(
        "avx512_bf16",
        "AVX-512 with bfloat16",
        _X86,
        ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"),
        (*_AVX512, "-mavx512bf16"),
    ),
    Target("avx512", "AVX-512", _X86, ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"), (*_AVX512, _CONTRACT)),
    Target("avx2", "AVX2", _X86, ("avx2", "fma"), ("-mavx2", "-mfma", _CONTRACT)),
    Target("neon", "NEON", ("aarch64", "arm64"), (), (_CONTRACT,)),
    Target("portable", "any processor", (), (), (_CONTRACT,)),
)
"""The best first. All but the first are one source."""


@dataclass(frozen=True)
class Processor:
    """This machine's."""

    machine: str
    name: str
    features: frozenset[str]

    def runs(self, target: Target) -> bool:
        return (not target.machines or self.machine in target.machines) and self.features.issuperset(target.features)


@functools.cache
def processor() -> Processor:
    """The machine's processor; where /proc/cpuinfo cannot be read, no more than its family is known of it."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Processor(platform.machine(), "?", frozenset())
    lines = (line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines}
    name = " ".join(fields.get(field, "?") for field in ("vendor_id", "cpu family", "model", "model name"))
    return Processor(platform.machine(), name, frozenset(fields.get("flags", "").split()))


def runnable(cpu: Processor) -> list[Target]:
    """What this processor runs, the best first; the last is for any processor."""
    return [target for target in TARGETS if cpu.runs(target)]
