"""The machine's size as control groups limit it, and targets for predictions."""

import os
from pathlib import Path

import pytest

from batchrun import hardware
from batchrun.errors import Refused

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert hardware.total_memory(tmp_path) == physical
    root = write(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": "max"})
    assert hardware.total_memory(root) == physical


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "1073741824"},
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "1073741824"},
        # Within a container: the path is the host's, the tree's top is the container's own group.
        {"proc/self/cgroup": "0::/docker/0f3", "sys/fs/cgroup/memory.max": "1073741824"},
        {"proc/self/cgroup": "4:memory:/a\n0::/", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824"},
        {
            "proc/self/cgroup": "5:cpu,memory:/a\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712",
        },
    ],
)
def test_memory_is_what_the_control_group_allows(tmp_path: Path, files: dict[str, str]) -> None:
    assert hardware.total_memory(write(tmp_path, files)) == GIB


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "10000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_processors_are_what_the_control_group_grants(tmp_path: Path, files: dict[str, str], wanted: int | None) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert hardware.usable_cpus(write(tmp_path, files)) == (affinity if wanted is None else wanted)


def test_a_target_is_a_name_or_a_file(tmp_path: Path) -> None:
    assert hardware.load_target("h200").memory_bytes == 141 * 10**9
    path = tmp_path / "mine.toml"
    path.write_text("flop_per_s = 1e12\nbytes_per_s = 5e10\nmemory_bytes = 8589934592\n")
    assert hardware.load_target(str(path)) == hardware.Target("mine", 1e12, 5e10, 8 * GIB)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("flop_per_s = 1e12\nbytes_per_s = 5e10\n", "memory_bytes is None: it must be a number above 0"),
        ("flop_per_s = -1\nbytes_per_s = 5e10\nmemory_bytes = 1\n", "flop_per_s is -1"),
        ("flop_per_s = true\nbytes_per_s = 5e10\nmemory_bytes = 1\n", "flop_per_s is True"),
        ("flops = 1\n", "unknown key 'flops': there are name, flop_per_s, bytes_per_s, memory_bytes"),
        ("flops", "which is not TOML"),
    ],
)
def test_a_bad_target_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(Refused) as refusal:
        hardware.load_target(str(path))
    assert message in str(refusal.value)


def test_an_unknown_target_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"it must be this, cpu, h200, a100 or a \.toml file"):
        hardware.load_target("tpu")
    with pytest.raises(Refused, match="which cannot be read"):
        hardware.load_target(str(tmp_path / "none.toml"))


def test_the_default_pool_on_a_cpu_is_an_eighth_of_all_memory() -> None:
    assert hardware.pool_memory("cpu") == hardware.total_memory() // 8


def test_this_machine_is_measured_within_bounds_of_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "MEASURE_SECONDS", 0.02)
    measured = hardware.measure("cpu", "float32")
    assert 1e9 < measured.flop_per_s < 1e15
    assert 1e8 < measured.bytes_per_s < 1e13
    assert measured.memory_bytes == hardware.total_memory()
