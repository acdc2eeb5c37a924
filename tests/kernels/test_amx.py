"""Attention in matrix tiles, by plain C in the tiles' place; and who is to use them."""

import ctypes
import dataclasses
import itertools
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from batchrun.kernels import cpu, native, native_amx, native_linear, native_plan, native_pool, ops, reference
from batchrun.kernels.ops import AttentionItem, KVConfig
from batchrun.kernels.targets import TARGETS, processor

PAGE = ops.page_size("cpu")
EMULATE = ("-DBATCHRUN_EMULATE_AMX",)
pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernel = pytest.mark.skipif(
    not processor().runs(TARGETS[0]) or shutil.which("cc") is None,
    reason="the tiles' emulation needs a C compiler named cc and a processor with AVX-512's bfloat16 instructions",
)


def knows_tiles() -> bool:
    """Whether the compiler has the instructions: gcc and clang from version 11 on."""
    command = ["cc", *native.AMX_FLAGS, "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build(folder: Path, amx_flags: tuple[str, ...] = EMULATE) -> native.Native:
    """The library as a CPU with tiles would have it, kept in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return native._open(native._built(native._compiler(), processor(), TARGETS[0], amx_flags), TARGETS[0], amx=True)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> native.Native:
    return build(tmp_path_factory.mktemp("emulated"))


def products(library: native.Native) -> int:
    """Products of tiles since the library was loaded."""
    return ctypes.c_int64.in_dll(library.library, "batchrun_emulated_products").value


class Step(NamedTuple):
    """Items, and queries, keys and values in plain tensors."""

    items: list[AttentionItem]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_dtype: torch.dtype | None = None

    def attend(self, library: native.Native, least_rows: int, poison: float = float("nan")) -> torch.Tensor:
        """In a pool full of poison but for the items' keys; in tiles from `least_rows` query rows on, 0: none."""
        slots, kv_heads, dim = self.k.shape
        pages = -(-slots // PAGE)
        config = KVConfig(1, self.q.shape[1], kv_heads, dim, torch.bfloat16, kv_dtype=self.kv_dtype)
        kv = native_pool.NativeKVCache(config, pages, library, least_rows)
        used = torch.cat([torch.tensor(reference.item_slots(item), dtype=torch.int64) for item in self.items]).unique()
        kv.data.fill_(-1 if self.kv_dtype else poison)  # four bytes of -1 are a scale of NaN
        native_pool.write_kv(kv, 0, self.k[used], self.v[used], used)
        return native_plan.attend(kv, 0, self.q, native_plan.build_plan(kv, self.items, len(self.q)))

    def check(self, library: native.Native, least_rows: int = 1, poison: float = float("nan")) -> torch.Tensor:
        """Against the float32 reference, and more closely against the dot products."""
        out = self.attend(library, least_rows, poison)
        k, v = (reference.through_int8(x) if self.kv_dtype else x for x in (self.k, self.v))
        torch.testing.assert_close(out.float(), reference.attend(self.q, k, v, self.items), atol=8e-3, rtol=1.6e-2)
        torch.testing.assert_close(out, self.attend(library, 0, poison), atol=2e-3, rtol=1e-2)
        return out


Counts = tuple[int, int, bool]
"""Queries, keys, causal."""


def make_step(counts: list[Counts], heads: tuple[int, int], dim: int, overlay: tuple[int, int] | None = None) -> Step:
    """Items from the middle of a page each; `overlay`: queries and keys of one for the first tokens besides."""
    items, token, slot = [], 0, 3
    for queries, keys, causal in counts:
        items.append(AttentionItem(token, queries, [(slot, keys + 5)], keys, causal))
        token, slot = token + queries, slot + keys + 6
    if overlay:
        items.append(AttentionItem(0, overlay[0], [(slot + 9, overlay[1])], overlay[1], False))
        slot += 9 + overlay[1]
    generator = torch.Generator().manual_seed(0)
    shapes = ((token, heads[0], dim), (slot + 1, heads[1], dim), (slot + 1, heads[1], dim))
    return Step(items, *(torch.randn(shape, generator=generator).bfloat16() for shape in shapes))


COUNTS = [
    *((1, 1, True), (1, 130, True), (3, 16, True), (5, 37, False)),
    *((16, 16, True), (17, 300, True), (40, 259, True), (9, 128, False)),
]


@needs_kernel
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_tiles_match_the_reference_and_the_dot_products(emulated: native.Native, dim: int, group: int) -> None:
    step = make_step(COUNTS, (2 * group, 2), dim, overlay=(70, 45))
    before = products(emulated)
    step.check(emulated)
    assert products(emulated) > before
    assert ctypes.c_int32.in_dll(emulated.library, "batchrun_emulated_threads").value == 0


@needs_kernel
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_tiles_on_keys_in_int8_match_the_reference_and_the_dot_products(emulated: native.Native, dim: int) -> None:
    step = make_step(COUNTS, (6, 2), dim, overlay=(70, 45))._replace(kv_dtype=torch.int8)
    before = products(emulated)
    step.check(emulated)
    assert products(emulated) > before


@needs_kernel
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_rows(emulated: native.Native, causal: bool) -> None:
    make_step([(rows, 200 + rows % 48, causal) for rows in range(1, 201)], (1, 1), 32).check(emulated)


@needs_kernel
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dim", [64, 80])
def test_nothing_behind_a_threads_scratch_is_written(
    emulated: native.Native, dim: int, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[torch.Tensor, int]] = []

    def scratch(kv: native_pool.NativeKVCache, name: str, size: int) -> int:
        held.append((torch.full((size + 4096,), 7.0), size))
        return held[-1][0].data_ptr()

    monkeypatch.setattr(native_pool.NativeKVCache, "scratch", scratch)
    for queries in (*range(150, 194), 300):
        make_step([(queries, 400, False)], (1, 1), dim)._replace(kv_dtype=kv_dtype).attend(emulated, 1)
    assert all(bool((memory[size:] == 7.0).all()) for memory, size in held)


@needs_kernel
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("dim", [64, 80])
def test_memory_outside_the_keys_reaches_nothing(emulated: native.Native, poison: float, dim: int) -> None:
    counts = [(20, keys, causal) for keys, causal in itertools.product((20, 21, 31, 113, 129, 143), (True, False))]
    step = make_step(counts, (3, 1), dim)
    expected = step.attend(emulated, 1, 0.0)
    assert torch.equal(step.check(emulated, poison=poison), expected)


@needs_kernel
def test_a_nan_query_spoils_its_own_row_only(emulated: native.Native) -> None:
    step = make_step(COUNTS, (6, 2), 64)
    expected = step.attend(emulated, 1)
    for token in (0, 25, len(step.q) - 1):
        spoilt = step._replace(q=step.q.clone())
        spoilt.q[token, 1] = torch.nan
        out = spoilt.attend(emulated, 1)
        assert bool(out[token, 1].isnan().all())
        out[token, 1] = expected[token, 1]
        assert torch.equal(out, expected)


@needs_kernel
def test_items_without_keys_are_absent(emulated: native.Native) -> None:
    step = make_step([(20, 40, True), (20, 0, True)], (3, 1), 64, overlay=(10, 0))
    out = step.check(emulated)
    assert bool((out[20:] == 0).all())
    assert torch.equal(out[:20], step._replace(items=step.items[:1], q=step.q[:20]).attend(emulated, 1))


@needs_kernel
@pytest.mark.parametrize("heads", [(9, 3), (24, 1)])
def test_partial_results_merge_and_threads_change_nothing(emulated: native.Native, heads: tuple[int, int]) -> None:
    few, many = native_plan.FEW_ROWS_PAGES * PAGE, native_plan.MANY_ROWS_PAGES * PAGE
    step = make_step([(1, 20, True), (3, few + 5, True), (30, many + 60, True)], heads, 64, overlay=(12, few + 40))
    kv = native_pool.NativeKVCache(KVConfig(1, *heads, 64, torch.bfloat16), len(step.k) // PAGE + 1, emulated)
    assert native_plan.build_plan(kv, step.items, len(step.q)).num_partials
    out = step.check(emulated, native_amx.LEAST_ROWS)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(step.attend(emulated, native_amx.LEAST_ROWS), out)


@needs_kernel
def test_values_that_are_all_equal_come_out_exactly(emulated: native.Native) -> None:
    step = make_step([(12, 333, True)], (9, 3), 64, overlay=(5, 40))
    step = step._replace(v=torch.full_like(step.v, 1.7109375), q=3 * step.q)
    assert bool((step.attend(emulated, 1) == 1.7109375).all())


@needs_kernel
def test_tasks_of_fewer_rows_keep_to_dot_products(emulated: native.Native) -> None:
    for queries, used in ((7, False), (8, True)):
        before = products(emulated)
        make_step([(queries, 100, True)], (2, 2), 64).attend(emulated, 8)
        assert (products(emulated) > before) == used


class TestChoice:
    """`native_amx.choose`, and what follows from it."""

    @needs_kernel
    def test_tiles_that_are_right_are_used(self, emulated: native.Native, monkeypatch: pytest.MonkeyPatch) -> None:
        assert native_amx.choose(emulated) == (native_amx.LEAST_ROWS, "with AMX", True)
        monkeypatch.setattr(native, "load", lambda _: emulated)
        assert ops.native_status() == f"compiled for AVX-512 with bfloat16: {emulated.path}, with AMX"
        kv = ops.allocate_kv(KVConfig(1, 6, 2, 64, torch.bfloat16), 4)
        assert isinstance(kv, native_pool.NativeKVCache)
        plan = ops.build_plan(kv, [AttentionItem(0, 1, [(0, 16)], 1, True)], 1)
        assert isinstance(plan, native_plan.NativePlan)
        assert plan.arguments.amx_rows == native_amx.LEAST_ROWS

    @needs_kernel
    @pytest.mark.parametrize(
        ("file", "right", "wrong"),
        [
            ("amx.h", "for (int m = 0; m < c->rows; m++) {", "for (int m = 0; m < c->rows - 1; m++) {"),
            ("amx_tiles.c", "keys[first + c] + at", "keys[first] + at"),
            ("amx_tiles.c", "values[first + j] + 2 * d, 64", "(values[first + j] + 2 * d), 60"),
        ],
    )
    def test_tiles_that_are_wrong_are_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str
    ) -> None:
        sources = tmp_path / "csrc"
        shutil.copytree(native.SOURCES, sources)
        text = (sources / file).read_text()
        assert text.count(right) == 1
        (sources / file).write_text(text.replace(right, wrong))
        monkeypatch.setattr(native, "SOURCES", sources)
        monkeypatch.setattr(native, "FLAGS", ("-O1", *(flag for flag in native.FLAGS if flag != "-O3")))  # to build faster
        broken = build(tmp_path)
        monkeypatch.setattr(native, "load", lambda _: broken)
        assert (
            ops.native_status()
            == f"compiled for AVX-512 with bfloat16: {broken.path}, without AMX: it failed a comparison with AVX-512"
        )
        kv = ops.allocate_kv(KVConfig(1, 6, 2, 64, torch.bfloat16), 4)
        assert isinstance(kv, native_pool.NativeKVCache)
        assert kv.amx_rows == 0
        assert native_amx.choose(broken).allowed, "a fault of ours says nothing of oneDNN"

    @needs_kernel
    def test_the_instructions_themselves_are_built_and_used_where_the_system_allows_it(self, tmp_path: Path) -> None:
        if not knows_tiles():
            pytest.skip("this compiler does not know the tiles' instructions: gcc and clang do from version 11 on")
        real = build(tmp_path, native.AMX_FLAGS)
        choice = native_amx.choose(real)
        if choice.rows:
            assert choice.remark == "with AMX"
        else:
            assert choice.remark.startswith("without AMX: the system refused it (error ")
            assert not native.has_amx(processor().features)

    @needs_kernel
    def test_a_cpu_without_tiles_gets_no_remark(self, emulated: native.Native) -> None:
        assert native_amx.choose(dataclasses.replace(emulated, amx=False)) == (0, "", False)

    @needs_kernel
    def test_tiles_that_the_system_refuses_are_named(self, emulated: native.Native) -> None:
        library: Any = SimpleNamespace(batchrun_allow_amx=lambda: 22)
        other = dataclasses.replace(emulated, library=library)
        assert native_amx.choose.__wrapped__(other) == (0, "without AMX: the system refused it (error 22)", False)

    @needs_kernel
    def test_a_compiler_that_does_not_know_the_instructions_builds_the_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(native, "AMX_FLAGS", ("-mno-such-instructions",))
        built = native._build_and_open(native._compiler(), processor(), TARGETS[0], amx=True)
        assert built.amx
        assert built.library.batchrun_allow_amx() == -1
        assert native_amx.choose(built) == (0, "without AMX: the compiler does not know it", True)


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("cc") is None, reason="only x86-64 compilers know the tiles")
@pytest.mark.parametrize("source", native.AMX_SOURCES)
@pytest.mark.parametrize("flags", [native.AMX_FLAGS, EMULATE], ids=["instructions", "emulated"])
def test_the_sources_compile_without_a_warning(source: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    command = [
        "cc",
        *native.FLAGS,
        *TARGETS[0].flags,
        *flags,
        "-Wall",
        "-Wextra",
        "-c",
        str(native.SOURCES / source),
        "-o",
        str(tmp_path / "out.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"amx_tile", "amx_bf16", "avx512f"}, True), ({"amx_tile", "amx_int8"}, False), ({"amx_bf16"}, False), (set(), False)],
)
def test_a_cpu_has_tiles_if_it_has_both_features(flags: set[str], expected: bool) -> None:
    assert native.has_amx(frozenset(flags)) == expected


@pytest.mark.parametrize(
    ("allowed", "can_pack", "expected"), [(True, True, True), (True, False, False), (False, True, False), (False, False, False)]
)
def test_linear_layers_go_to_onednn_where_it_has_tiles(allowed: bool, can_pack: bool, expected: bool) -> None:
    assert ops._onednn_is_faster(native_amx.Choice(0, "", allowed), can_pack) == expected


@needs_kernel
@pytest.mark.parametrize(("amx", "kind"), [(True, cpu.PackedLinear), (False, native_linear.NativeLinear)])
def test_weights_are_packed_for_whoever_computes(
    emulated: native.Native, amx: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu.can_pack():
        pytest.skip("this torch has no packing operations")
    library = dataclasses.replace(emulated, amx=amx)
    monkeypatch.setattr(native, "load", lambda _: library)
    generator = torch.Generator().manual_seed(0)
    weight, gate_up, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (96, 160, 30))
    plain, gated = ops.pack_linear(weight), ops.pack_gated_linear(gate_up)
    assert isinstance(plain, kind)
    assert isinstance(gated, kind)
    torch.testing.assert_close(ops.linear(x, plain).float(), x.float() @ weight.float().T, atol=2e-2, rtol=1e-2)
    monkeypatch.setattr(cpu, "silu_mul", None)  # the gate is the compiled kernel's in both ways
    assert torch.equal(ops.gated_linear(x, gated), ops.silu_mul(ops.linear(x, ops.pack_linear(gate_up))))
    monkeypatch.setattr(ops, "_choice", "native")
    assert isinstance(ops.pack_linear(weight), native_linear.NativeLinear)
