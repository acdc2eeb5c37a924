"""Attention against the float32 reference: head shapes, dtypes, lengths, trees, poisoned memory."""

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from batchrun.kernels import cpu_plan, ops, reference
from batchrun.kernels.ops import AttentionItem, KVConfig
from batchrun.kernels.targets import processor, runnable

HEADS = ((9, 3), (4, 1), (6, 1), (8, 8), (14, 2), (24, 1), (32, 8))
HEAD_DIMS = (64, 80, 96, 128, 256)
POISONS = (float("nan"), float("inf"), 3e38)
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (8e-3, 1.6e-2), torch.float16: (1e-3, 2e-3)}
PAGE = ops.page_size("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


class Way(NamedTuple):
    """A dtype, the implementation that computes it, and what keys and values are kept in if in something else."""

    dtype: torch.dtype
    choice: str
    kv_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.choice}{'-int8' if self.kv_dtype else ''}"


FLOAT32 = Way(torch.float32, "torch")
WAYS = [Way(dtype, "torch") for dtype in TOLERANCE]
WAYS += [Way(torch.bfloat16, target.name, kept) for target in runnable(processor()) for kept in (None, torch.int8)]


@pytest.fixture
def way(request: pytest.FixtureRequest, compute_with: Callable[[str], None]) -> Way:
    """The test's way, whose implementation `ops` is made to take."""
    found: Way = request.param
    compute_with(found.choice)
    return found


in_each_way = pytest.mark.parametrize("way", WAYS, ids=str, indirect=True)


@dataclass
class Step:
    """The items of a step and the next free slot and token."""

    items: list[AttentionItem] = field(default_factory=list)
    slot: int = 3 * PAGE
    tokens: int = 0

    def run(self, num_keys: int, spare: int = 0) -> tuple[int, int]:
        """A run for num_keys keys with a page more behind it, in pages that no other item uses."""
        count = (num_keys + spare + PAGE - 1) // PAGE * PAGE + PAGE
        first, self.slot = self.slot, self.slot + count + PAGE
        return first, count

    def own(self, queries: int, num_keys: int, runs: list[tuple[int, int]] | None = None) -> None:
        """A causal item of new tokens."""
        self.items.append(AttentionItem(self.tokens, queries, runs or [self.run(num_keys)], num_keys, True))
        self.tokens += queries

    def shared(self, start: int, queries: int, num_keys: int, runs: list[tuple[int, int]] | None = None) -> None:
        self.items.append(AttentionItem(start, queries, runs or [self.run(num_keys)], num_keys, False))


def decode_step() -> Step:
    """Rows of all lengths below a tree of three levels, one level of it absent for some."""
    step = Step()
    for num_keys in (1, 2, 15, 16, 17, 111, 255):
        step.own(1, num_keys)
    step.shared(0, 7, 37)
    step.shared(1, 3, 15)
    step.shared(1, 2, 1)
    step.shared(4, 2, 111)
    step.shared(4, 3, 0)
    return step


def prefill_step() -> Step:
    """Chunks behind cached keys of their own and of a shared node, beside a decoding row."""
    step = Step()
    for queries, num_keys in ((5, 16), (17, 17), (2, 255), (40, 255), (130, 201)):
        step.own(queries, num_keys)
    step.own(1, 111)
    step.shared(0, step.tokens, 17)
    step.shared(0, 24, 1)
    return step


def scattered_step() -> Step:
    """Runs in several pieces, out of order, not at a page's beginning, and one that ends at the pool's end."""
    step = Step()
    step.own(1, 111, [(step.slot + 200, 48), (step.slot, 64), (step.slot + 100, 16)])
    step.slot += 256
    step.own(40, 90, [(step.slot + 5, 21), (step.slot + 64, 70), (step.slot + 134, 7)])
    step.slot += 160
    step.own(1, 17, [step.run(17)])
    step.shared(0, step.tokens, 255, [(step.slot + 130, 128), (step.slot, 128)])
    step.slot += 272
    step.shared(0, 41, 16, [(-PAGE, PAGE)])  # the pool's last page, known when the pool is made
    return step


STEPS: dict[str, Callable[[], Step]] = {"decode": decode_step, "prefill": prefill_step, "scattered": scattered_step}


@dataclass
class Case:
    """A pool full of poison but for the items' keys, and the same keys and values in plain tensors."""

    kv: ops.KVCache
    items: list[AttentionItem]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def attend(self, layer: int = 1) -> torch.Tensor:
        return ops.attend(self.kv, layer, self.q, ops.build_plan(self.kv, self.items, len(self.q)))

    def reference(self) -> torch.Tensor:
        kept = reference.through_int8 if self.kv.config.is_int8 else torch.Tensor.float
        return reference.attend(self.q, kept(self.k), kept(self.v), self.items)


def make_case(step: Step, heads: tuple[int, int], dim: int, way: Way, poison: float = float("nan"), seed: int = 0) -> Case:
    num_pages = step.slot // PAGE + 4
    slots = num_pages * PAGE
    items = [
        item._replace(runs=[(first % slots if first < 0 else first, count) for first, count in item.runs]) for item in step.items
    ]
    dtype = way.dtype
    kv = ops.allocate_kv(KVConfig(2, heads[0], heads[1], dim, dtype, kv_dtype=way.kv_dtype), num_pages)
    generator = torch.Generator().manual_seed(0)
    k = torch.full((slots, heads[1], dim), poison).to(dtype)
    v = k.clone()
    for item in items:
        used = reference.item_slots(item)
        k[used] = torch.randn(len(used), heads[1], dim, generator=generator).to(dtype)
        v[used] = torch.randn(len(used), heads[1], dim, generator=generator).to(dtype)
    ops.write_kv(kv, 1, k, v, torch.arange(slots))
    ops.write_kv(kv, 0, k.flip(0), v.flip(0), torch.arange(slots))
    return Case(kv, items, torch.randn(step.tokens, heads[0], dim, generator=generator).to(dtype), k, v)


def assert_close(out: torch.Tensor, expected: torch.Tensor, way: Way) -> None:
    atol, rtol = TOLERANCE[way.dtype]
    torch.testing.assert_close(out.float(), expected, atol=atol, rtol=rtol)


FULL_GRID = list(itertools.product(HEADS, HEAD_DIMS, WAYS, POISONS, STEPS))


def pairwise(grid: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """A subset in which every two values of two parameters meet (greedy)."""

    def pairs(case: tuple[object, ...]) -> set[object]:
        return set(itertools.combinations(((i, str(value)) for i, value in enumerate(case)), 2))

    covered = [(case, pairs(case)) for case in grid]
    missing = set().union(*(found for _, found in covered))
    chosen = []
    while missing:
        case, found = max(covered, key=lambda entry: len(entry[1] & missing))
        chosen.append(case)
        missing -= found
    return chosen


def check_grid_case(heads: tuple[int, int], dim: int, way: Way, poison: float, step: str) -> None:
    case = make_case(STEPS[step](), heads, dim, way, poison)
    out = case.attend()
    assert out.dtype == way.dtype
    assert_close(out, case.reference(), way)


@pytest.mark.parametrize(("heads", "dim", "way", "poison", "step"), pairwise(FULL_GRID), indirect=["way"], ids=str)
def test_matches_reference(heads: tuple[int, int], dim: int, way: Way, poison: float, step: str) -> None:
    check_grid_case(heads, dim, way, poison, step)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim", "way", "poison", "step"), FULL_GRID, indirect=["way"], ids=str)
def test_matches_reference_on_the_full_grid(heads: tuple[int, int], dim: int, way: Way, poison: float, step: str) -> None:
    check_grid_case(heads, dim, way, poison, step)


@in_each_way
def test_matches_reference_on_keys_too_long_to_gather(way: Way) -> None:
    step = Step()
    step.own(1, 2049)
    step.own(1, 2100, [(step.slot + 1200, 1000), (step.slot, 1104)])
    step.slot += 2208
    step.own(3, 2051)
    step.own(40, 2300)
    step.shared(0, 5, 2200)
    case = make_case(step, (9, 3), 64, way)
    assert_close(case.attend(), case.reference(), way)


@pytest.mark.parametrize("way", [way for way in WAYS if way.dtype != torch.float32], ids=str, indirect=True)
def test_scores_far_from_zero_stay_exact(way: Way) -> None:
    """Keys with a large common part, as trained models have: every score is near 60 and only their differences count."""
    case = make_case(prefill_step(), (9, 3), 64, way)
    common = 2 * torch.ones(64)
    case.q = (case.q.float() * 0.25 + 4).to(way.dtype)
    used = ~case.k.isnan()
    case.k = torch.where(used, (case.k.float() + common).to(way.dtype), case.k)
    ops.write_kv(case.kv, 1, case.k, case.v, torch.arange(len(case.k)))
    assert_close(case.attend(), case.reference(), way)


@in_each_way
@pytest.mark.parametrize("step", STEPS)
def test_nan_query_spoils_its_own_row_only(way: Way, step: str) -> None:
    case = make_case(STEPS[step](), (9, 3), 64, way)
    expected, clean = case.reference(), case.q[3].clone()
    case.q[3] = torch.nan
    out = case.attend()
    assert bool(out[3].isnan().all())
    others = torch.arange(len(out)) != 3
    assert_close(out[others], expected[others], way)
    case.q[3] = clean  # nothing of it stays in memory that is used again
    assert_close(case.attend(), expected, way)


@in_each_way
def test_item_without_keys_merges_as_absent(way: Way) -> None:
    step = Step()
    step.own(1, 17)
    step.own(1, 0)
    step.own(40, 0)
    step.shared(0, 1, 111)
    case = make_case(step, (9, 3), 64, way)
    out = case.attend()
    assert bool((out[1:] == 0).all())
    assert_close(out, case.reference(), way)
    own, _, _, shared = case.items
    alone = Case(case.kv, [own, shared], case.q[:1], case.k, case.v).attend()
    case.items.append(AttentionItem(0, 42, case.items[1].runs, 0, False))
    case.items.append(AttentionItem(0, 1, case.items[1].runs, 0, False))
    merged = case.attend()
    assert torch.equal(merged[:1], alone)
    assert bool((merged[1:] == 0).all())


@in_each_way
def test_advanced_plan_equals_a_new_one(way: Way) -> None:
    """Over lengths at which an item appears, pads differently, or is gathered no longer."""
    step = Step()
    for num_keys in (0, 1, 15, 31, 200, cpu_plan.GATHER_MAX_KEYS - 2):
        step.own(1, num_keys, [step.run(num_keys, spare=8)])
    step.own(1, 20, [(step.slot, 22), (step.slot + 64, 16)])
    step.slot += 96
    step.shared(0, 7, 40)
    step.shared(1, 5, 9)
    long = Step(step.items, step.slot, step.tokens)
    grown = [item._replace(num_keys=item.num_keys + 6) if item.causal else item for item in step.items]
    long.items = grown
    case = make_case(long, (9, 3), 64, way)
    plan = ops.build_plan(case.kv, step.items, step.tokens)
    for added in range(1, 7):
        ops.advance_plan(plan)
        items = [item._replace(num_keys=item.num_keys + added) if item.causal else item for item in step.items]
        assert torch.equal(ops.attend(case.kv, 1, case.q, plan), Case(case.kv, items, case.q, case.k, case.v).attend())
    assert_close(ops.attend(case.kv, 1, case.q, plan), case.reference(), way)


def test_advance_refuses_to_leave_the_reserved_slots() -> None:
    kv = ops.allocate_kv(KVConfig(1, 4, 1, 64, torch.float32), 2)
    plan = ops.build_plan(kv, [AttentionItem(0, 1, [(0, 5)], 5, True)], 1)
    with pytest.raises(ValueError, match="item 0 has 5 keys and no reserved slot left"):
        ops.advance_plan(plan)


def test_plan_serves_every_layer_and_results_do_not_alias() -> None:
    for step in (decode_step(), Step(decode_step().items[:7], decode_step().slot, 7)):
        case = make_case(step, (9, 3), 64, FLOAT32, poison=0.5)
        plan = ops.build_plan(case.kv, case.items, len(case.q))
        first = ops.attend(case.kv, 1, case.q, plan)
        kept = first.clone()
        other = ops.attend(case.kv, 0, case.q, plan)
        assert torch.equal(first, kept)
        expected = reference.attend(case.q, case.k.flip(0), case.v.flip(0), case.items)
        assert_close(other, expected, FLOAT32)


@in_each_way
def test_strided_query_is_accepted(way: Way) -> None:
    case = make_case(prefill_step(), (9, 3), 64, way)
    wide = torch.zeros(len(case.q), 15, 64, dtype=way.dtype)
    wide[:, :9] = case.q
    expected = case.attend()
    case.q = wide[:, :9]
    assert torch.equal(case.attend(), expected)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([AttentionItem(0, 3, [(0, 16)], 5, True)], r"item 0 has queries \[0, 3\)"),
        ([AttentionItem(0, 2, [(20, 16)], 5, True)], "item 0 has runs"),
        ([AttentionItem(0, 2, [(0, 16)], 17, True)], "item 0 has 17 keys: its runs hold 16 slots"),
        ([AttentionItem(0, 2, [(0, 16)], 1, True)], "item 0 is causal with 1 keys for 2 queries"),
        ([AttentionItem(0, 1, [(0, 16)], 5, True)], "token 1 is in no attention item"),
    ],
)
def test_impossible_items_are_refused(items: list[AttentionItem], message: str) -> None:
    kv = ops.allocate_kv(KVConfig(1, 4, 1, 64, torch.float32), 2)
    with pytest.raises(ValueError, match=message):
        ops.build_plan(kv, items, 2)


FINGERPRINT = """
import torch
torch.set_num_threads(1)
from batchrun.kernels import ops
from batchrun.kernels.ops import AttentionItem, KVConfig
from batchrun.kernels.targets import processor, runnable
torch.manual_seed(0)
kv = ops.allocate_kv(KVConfig(1, 9, 3, 64, torch.bfloat16, kv_dtype=kept), 64)
ops.write_kv(kv, 0, torch.randn(1024, 3, 64).bfloat16(), torch.randn(1024, 3, 64).bfloat16(), torch.arange(1024))
items = [AttentionItem(i, 1, [(i * 64, 64)], 20 + i, True) for i in range(8)]
items += [AttentionItem(8, 60, [(512, 80)], 80, True), AttentionItem(0, 68, [(640, 300)], 300, False)]
q = torch.randn(68, 9, 64).bfloat16()
out = ops.attend(kv, 0, q, ops.build_plan(kv, items, 68))
out = ops.linear(out.flatten(1), ops.pack_linear(torch.randn(960, 576).bfloat16()))
"""


@pytest.mark.parametrize("way", [way for way in WAYS if way.dtype == torch.bfloat16], ids=str, indirect=True)
def test_same_inputs_give_the_same_bits_in_any_process(way: Way) -> None:
    choice = f"import torch\nfrom batchrun.kernels import ops\nops._choice, kept = {ops._choice!r}, {way.kv_dtype}\n"
    script = choice + FINGERPRINT + "\nprint(out.view(torch.int16).numpy().tobytes().hex())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    names: dict[str, Any] = {"kept": way.kv_dtype}
    for _ in range(2):
        exec(FINGERPRINT, names)
        here = names["out"].view(torch.int16).numpy().tobytes().hex()
        assert hashlib.sha256(here.encode()).digest() == hashlib.sha256(done.stdout.strip().encode()).digest()
