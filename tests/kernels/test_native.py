"""The compiled kernel by itself: its build, its pool, its cuts of keys and queries, any number of threads."""

import itertools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchrun.kernels import native, native_plan, native_pool, ops, reference, targets
from batchrun.kernels.ops import AttentionItem, KVConfig
from batchrun.kernels.targets import TARGETS, Processor, Target, processor, runnable

PAGE = ops.page_size("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernel = pytest.mark.usefixtures("compiled_kernel")
RUNNABLE = runnable(processor())
each_target = pytest.mark.parametrize("target", RUNNABLE, ids=lambda target: target.name, indirect=True)


@pytest.fixture
def without_library() -> Iterator[None]:
    """`native.load` forgets what it loaded, before and after the test."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_pool(heads: tuple[int, int] = (6, 2), dim: int = 64, pages: int = 4, layers: int = 3) -> native_pool.NativeKVCache:
    kv = ops.allocate_kv(KVConfig(layers, *heads, dim, torch.bfloat16), pages)
    assert isinstance(kv, native_pool.NativeKVCache)
    kv.data.copy_(draw(*kv.data.shape, seed=1))
    return kv


def read_value(kv: ops.KVCache, layer: int, slot: int) -> torch.Tensor:
    """A token's value through the public door: attention to one key gives its value."""
    plan = ops.build_plan(kv, [AttentionItem(0, 1, [(slot, 1)], 1, True)], 1)
    return ops.attend(kv, layer, torch.zeros(1, 6, 64, dtype=torch.bfloat16), plan)[0, ::3]


def changed(kv: native_pool.NativeKVCache, before: torch.Tensor) -> dict[tuple[int, int], int]:
    """Elements that differ, by (layer, page)."""
    counts = (kv.data.view(torch.int16) != before.view(torch.int16)).sum(-1).sum(1)
    return {(layer, page): int(counts[layer, page]) for layer, page in counts.nonzero().tolist()}


@each_target
@pytest.mark.parametrize("threads", [1, 2])
def test_write_changes_its_slots_of_its_layer_and_nothing_else(threads: int) -> None:
    torch.set_num_threads(threads)
    kv = make_pool(pages=8)
    slots = torch.cat((torch.tensor([5, 127]), torch.arange(17, 49).flip(0)))
    wide = draw(len(slots), 8, 64)
    k, v = wide[:, 1:3], wide[:, 4:6]  # strided, as slices of one product are
    kv.data.copy_(kv.data.abs().clamp_min(100.0))  # nothing drawn is as large: every element written differs
    before = kv.data.clone()
    others = {slot: read_value(kv, 1, slot) for slot in (4, 6, 16, 49, 126)}
    ops.write_kv(kv, 1, k, v, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(read_value(kv, 1, slot), v[i])
    for slot, value in others.items():
        assert torch.equal(read_value(kv, 1, slot), value)
    token = 2 * 2 * 64
    assert changed(kv, before) == {(1, 0): token, (1, 1): 15 * token, (1, 2): 16 * token, (1, 3): token, (1, 7): token}


@each_target
def test_copy_moves_all_layers_and_reads_before_it_writes() -> None:
    kv = make_pool()
    before = kv.data.clone()
    values = [[read_value(kv, layer, slot) for slot in (3, 4, 5)] for layer in range(3)]
    ops.copy_kv(kv, torch.tensor([3, 4, 5]), torch.tensor([4, 5, 40]))
    for layer in range(3):
        assert all(torch.equal(read_value(kv, layer, slot), values[layer][i]) for i, slot in enumerate((4, 5, 40)))
    assert set(changed(kv, before)) == {(layer, page) for layer in range(3) for page in (0, 2)}
    assert max(changed(kv, before).values()) <= 2 * 2 * 2 * 64
    q = draw(1, 6, 64, seed=3)
    several = [AttentionItem(0, 1, [(4, 2), (40, 1)], 3, True)]
    moved = ops.attend(kv, 2, q, ops.build_plan(kv, several, 1))
    kv.data.copy_(before)
    origin = ops.attend(kv, 2, q, ops.build_plan(kv, [AttentionItem(0, 1, [(3, 3)], 3, True)], 1))
    torch.testing.assert_close(moved, origin, rtol=0.01, atol=0.01)  # keys moved along with values


@each_target
@pytest.mark.parametrize("slot", [-1, 4 * PAGE])
def test_slots_outside_the_pool_are_refused_and_nothing_is_written(slot: int) -> None:
    kv = make_pool()
    before = kv.data.clone()
    slots, rows = torch.tensor([3, slot]), draw(2, 2, 64)
    message = f"slot {slot} at position 1: the pool has 64 slots"
    with pytest.raises(IndexError, match=message):
        ops.write_kv(kv, 0, rows, rows, slots)
    for source, target in ((slots, slots.abs() % 8), (slots.abs() % 8, slots)):
        with pytest.raises(IndexError, match=message):
            ops.copy_kv(kv, source, target)
    assert torch.equal(kv.data, before)


def long_step() -> tuple[list[AttentionItem], int, int]:
    """Few rows and many rows on keys of several tasks each, causal and not, from the middle of a page: items, tokens, slots."""
    few, many = native_plan.FEW_ROWS_PAGES * PAGE, native_plan.MANY_ROWS_PAGES * PAGE
    counts = [
        (1, 2 * few + 7, True),
        (1, few, True),
        (1, few + 1, True),
        (2, 3 * few - 5, True),
        (130, many + 60, True),
    ]  # the last: some queries end before the second interval
    items, token, slot = [], 0, 3
    for queries, keys, causal in counts:
        items.append(AttentionItem(token, queries, [(slot, keys)], keys, causal))
        token, slot = token + queries, slot + keys
    items.append(AttentionItem(0, 4, [(slot, 2 * few)], 2 * few, False))
    slot += 2 * few
    items.append(AttentionItem(3, token - 3, [(slot, many + 33)], many + 33, False))
    return items, token, slot + many + 33


@each_target
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((4, 4), 48), ((14, 2), 80), ((24, 1), 16)])
def test_keys_of_many_tasks_match_the_reference_on_any_number_of_threads(heads: tuple[int, int], dim: int) -> None:
    items, tokens, slots = long_step()
    pages = -(-slots // PAGE)
    kv = make_pool(heads, dim, pages, layers=1)
    kv.data.fill_(torch.nan)
    k, v, q = draw(slots, heads[1], dim), draw(slots, heads[1], dim, seed=1), draw(tokens, heads[0], dim, seed=2)
    ops.write_kv(kv, 0, k[3:], v[3:], torch.arange(3, slots))
    plan = ops.build_plan(kv, items, tokens)
    assert isinstance(plan, native_plan.NativePlan)
    assert len({tuple(task[[4, 5]].tolist()) for task in plan.tasks}) > len(items)  # pages are cut indeed
    out = ops.attend(kv, 0, q, plan)
    chosen = [0, 1, 2, 3, 4, 5, 6, *range(68, 88), tokens - 1]
    _check_tokens(out, q, k, v, items, chosen)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for _ in range(3):
            assert torch.equal(ops.attend(kv, 0, q, plan), out)


def _check_tokens(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, items: list[AttentionItem], chosen: list[int]
) -> None:
    """Some tokens against the reference, each as a step of its own."""
    for token in chosen:
        seen = []
        for item in items:
            if item.query_start <= token < item.query_start + item.query_count:
                hidden = item.query_count - 1 - (token - item.query_start) if item.causal else 0
                seen.append(AttentionItem(0, 1, item.runs, item.num_keys - hidden, False))
        expected = reference.attend(q[token : token + 1], k, v, seen)
        torch.testing.assert_close(out[token : token + 1].float(), expected, atol=8e-3, rtol=1.6e-2)


@each_target
def test_a_partial_result_alone_gives_the_same_bits_as_the_direct_way() -> None:
    kv = make_pool((9, 3), 64, 40, layers=1)
    slots = torch.arange(40 * PAGE)
    ops.write_kv(kv, 0, draw(len(slots), 3, 64), draw(len(slots), 3, 64, seed=1), slots)
    q = draw(30, 9, 64, seed=2)
    items = [AttentionItem(0, 30, [(5, 300)], 300, True)]
    direct, merged = (ops.build_plan(kv, found, 30) for found in (items, [*items, AttentionItem(0, 30, [(400, 40)], 0, False)]))
    assert isinstance(direct, native_plan.NativePlan)
    assert isinstance(merged, native_plan.NativePlan)
    assert (direct.num_partials, merged.num_partials) == (0, 60)
    assert torch.equal(ops.attend(kv, 0, q, direct), ops.attend(kv, 0, q, merged))


@each_target
def test_values_that_are_all_equal_come_out_exactly() -> None:
    """The weights add up to the same total that they are divided by."""
    kv = make_pool((9, 3), 64, 40, layers=1)
    slots = torch.arange(40 * PAGE)
    ops.write_kv(kv, 0, draw(len(slots), 3, 64), torch.full((len(slots), 3, 64), 1.7109375).bfloat16(), slots)
    items = [AttentionItem(0, 3, [(0, 333)], 333, True), AttentionItem(1, 2, [(400, 40)], 40, False)]
    out = ops.attend(kv, 0, 3 * draw(3, 9, 64, seed=2), ops.build_plan(kv, items, 3))
    assert bool((out == 1.7109375).all())


@needs_kernel
def test_one_openmp_runtime_is_in_the_process() -> None:
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line or "libomp" in line
    }
    assert len(mapped) == 1, mapped


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float32, 64), (torch.float16, 64), (torch.bfloat16, 72), (torch.bfloat16, 272), (torch.bfloat16, 8)]
)
def test_other_dtypes_and_head_sizes_are_left_to_torch(dtype: torch.dtype, dim: int) -> None:
    assert not isinstance(ops.allocate_kv(KVConfig(1, 4, 1, dim, dtype), 1), native_pool.NativeKVCache)


@each_target
def test_a_target_that_is_asked_for_is_what_gets_built(target: Target) -> None:
    loaded = native.load(target.name)
    assert isinstance(loaded, native.Native), str(loaded)
    assert loaded.target is target
    assert loaded.path.name.startswith(f"{target.name}-")


COMPILERS = {
    "cc": (platform.machine(), "cc"),
    "clang": (platform.machine(), "clang"),
    "aarch64": ("aarch64", "aarch64-linux-gnu-gcc"),
}
"""By name: (machine it compiles for, command)."""
BUILDS = [
    pytest.param(command, target, id=f"{name}-{target.name}")
    for name, (machine, command) in COMPILERS.items()
    for target in TARGETS
    if machine in target.machines or not target.machines
]


@pytest.mark.parametrize(("command", "found"), BUILDS)
@pytest.mark.parametrize("source", sorted(native.SOURCES.glob("*.c")), ids=lambda path: path.name)
def test_a_source_compiles_without_a_warning_whatever_the_processor(
    source: Path, command: str, found: Target, tmp_path: Path
) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"no compiler named {command}")
    line = [command, *native.FLAGS, *found.flags, "-Wall", "-Wextra", "-c", str(source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


X86_BF16 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx2", "fma", "sse2"}


@pytest.mark.parametrize(
    ("machine", "features", "names"),
    [
        ("x86_64", X86_BF16, ["avx512_bf16", "avx512", "avx2", "portable"]),
        ("x86_64", X86_BF16 - {"avx512_bf16"}, ["avx512", "avx2", "portable"]),
        ("AMD64", X86_BF16 - {"avx512vl"}, ["avx2", "portable"]),
        ("x86_64", {"avx2", "sse2"}, ["portable"]),
        ("x86_64", set(), ["portable"]),
        ("aarch64", {"asimd", "bf16"}, ["neon", "portable"]),
        ("arm64", set(), ["neon", "portable"]),
        ("riscv64", set(), ["portable"]),
    ],
)
def test_targets_are_chosen_by_machine_and_features(machine: str, features: set[str], names: list[str]) -> None:
    assert [target.name for target in runnable(Processor(machine, "", frozenset(features)))] == names


def test_a_processor_of_which_nothing_can_be_read_runs_what_any_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(targets, "CPU_INFO", tmp_path / "absent")
    found = processor.__wrapped__()
    assert found == Processor(platform.machine(), "?", frozenset())
    assert runnable(found)[-1].name == "portable"


@pytest.mark.usefixtures("without_library")
class TestBuild:
    """What `load` does on machines unlike this one."""

    def suited(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def status_without_kernel(self) -> str:
        kv = ops.allocate_kv(KVConfig(1, 4, 1, 64, torch.bfloat16), 1)
        assert not isinstance(kv, native_pool.NativeKVCache)
        return ops.native_status()

    def test_a_target_that_the_processor_does_not_run_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "processor", lambda: Processor("x86_64", "", frozenset({"avx2", "fma"})))
        assert str(native.load("avx512")) == "this processor does not run what is compiled for avx512"

    @needs_kernel
    def test_the_status_names_the_best_target_of_the_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for target in RUNNABLE:
            monkeypatch.setattr(native, "runnable", lambda _, target=target: [target, RUNNABLE[-1]])
            native.load.cache_clear()
            loaded = native.load()
            assert isinstance(loaded, native.Native)
            assert ops.native_status() == f"compiled for {target.title}: {loaded.path}"

    def test_missing_compiler_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.suited(monkeypatch, tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert self.status_without_kernel() == "torch operations: no C compiler found: install gcc or clang"

    def test_failing_compiler_is_quoted_and_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.suited(monkeypatch, tmp_path)
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cc: fatal error: out of luck" >&2\nexit 1\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        assert self.status_without_kernel() == f"torch operations: {compiler} failed: cc: fatal error: out of luck"
        assert list((tmp_path / "batchrun" / "kernels").iterdir()) == []

    @needs_kernel
    def test_a_compiler_older_than_the_processor_builds_the_next_target(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.suited(monkeypatch, tmp_path)
        compiler = tmp_path / "cc"
        flag = next((flag for flag in RUNNABLE[0].flags if len(RUNNABLE) > 1 and flag not in RUNNABLE[1].flags), None)
        if flag is None:
            pytest.skip("one target alone, or two of the same flags")
        compiler.write_text(
            f'#!/bin/sh\ncase "$*" in *{flag}*) echo "cc: error: {flag}?" >&2; exit 1;; esac\nexec {native._compiler()} "$@"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        loaded = native.load()
        assert isinstance(loaded, native.Native)
        assert loaded.target is RUNNABLE[1]
        assert ops.native_status().endswith(f", no better: {compiler} failed: cc: error: {flag}?")

    def test_unwritable_cache_folder_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "batchrun").write_text("a file where the folder should be")
        self.suited(monkeypatch, tmp_path)
        monkeypatch.setattr(native, "_compiler", lambda: "true")
        assert "torch operations: the build failed:" in self.status_without_kernel()

    @needs_kernel
    @pytest.mark.parametrize("size", [0, 9000])
    def test_a_damaged_library_is_built_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
        self.suited(monkeypatch, tmp_path)
        whole = native._built(native._compiler(), processor(), RUNNABLE[0])
        content = whole.read_bytes()
        os.truncate(whole, size)
        loaded = native.load()
        assert isinstance(loaded, native.Native)
        assert loaded.target is RUNNABLE[0]
        assert len(loaded.path.read_bytes()) == len(content)
        assert list(whole.parent.iterdir()) == [loaded.path]

    @needs_kernel
    def test_library_is_built_once_and_found_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.suited(monkeypatch, tmp_path)
        ran: list[list[str]] = []
        run = native._run
        monkeypatch.setattr(native, "_run", lambda command: (ran.append(command), run(command))[1])
        first = native.load()
        assert isinstance(first, native.Native)
        commands = 2 + len(list(native.SOURCES.glob("*.c")))  # version, each source, link
        assert len(ran) == commands
        native.load.cache_clear()
        second = native.load()
        assert isinstance(second, native.Native)
        assert second.path == first.path
        assert len(ran) == commands + 1
        assert list(first.path.parent.iterdir()) == [first.path]
        needed = subprocess.run(["ldd", str(first.path)], capture_output=True, text=True, check=True).stdout
        assert not any(name in needed for name in ("libgomp", "libomp", "libiomp"))


@needs_kernel
def test_page_entries_cut_runs_at_page_bounds() -> None:
    items = [AttentionItem(0, 1, [(14, 3), (64, 0), (32, 17)], 20, True), AttentionItem(0, 1, [], 0, False)]
    entries, counts, reserved = native_plan._page_entries([*items, AttentionItem(0, 1, [(5, 2)], 1, False)])
    assert entries.tolist() == [[0, 0, 14, 16], [1, 2, 0, 1], [2, 3, 0, 16], [3, 19, 0, 1], [0, 0, 5, 7]]
    assert counts.tolist() == [4, 0, 1]
    assert reserved.tolist() == [20, 0, 2]
    assert [end - low for _, _, low, end in itertools.islice(entries.tolist(), 4)] == [2, 1, 16, 1]
