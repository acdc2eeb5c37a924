"""Each token is a pure function of its row's logits, settings and ids, and is drawn with the right frequency."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from batchrun.engine.sampler import Sampler, SampleRow
from batchrun.engine.sampling_params import SamplingParams

VOCAB = 1003  # not a multiple of any vector width
PROMPT = np.array([3, 5, 5, 900], dtype=np.int32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def row(params: SamplingParams, row_index: int = 0, sample: int = 0, position: int = 0, **ids: object) -> SampleRow:
    return SampleRow(params, row_index, sample, position, **({"prompt_ids": PROMPT, "output_ids": []} | ids))  # type: ignore[arg-type]


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def support(logits: list[float] | torch.Tensor, params: SamplingParams, draws: int = 4000) -> set[int]:
    """The tokens that come up in many draws."""
    return set(draw_many(torch.as_tensor(logits), params, draws).tolist())


def draw_many(logits: torch.Tensor, params: SamplingParams, draws: int) -> np.ndarray:
    sampler = Sampler(0, len(logits))
    chosen: list[int | None] = []
    for low in range(0, draws, 4000):
        rows = [row(params, position=position) for position in range(low, min(draws, low + 4000))]
        chosen += sampler.sample(logits.float().expand(len(rows), -1), rows)
    return np.array(chosen)


def kept_by_reference(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p, min-p: float64, one token at a time, written from the definitions."""
    scaled = logits.double().numpy() / params.temperature
    p = np.exp(scaled - scaled.max())
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k:
        order = order[: params.top_k]
    mass = p[order].sum()
    kept, before = [], 0.0
    for i in order:
        if before < params.top_p * mass:
            kept.append(i)
        before += p[i]
    result = np.zeros(len(p))
    for i in kept:
        if p[i] >= params.min_p * p.max():
            result[i] = p[i]
    return result / result.sum()


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=0.7, top_k=600, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=1.0, min_p=0.05, seed=42),
    SamplingParams(repetition_penalty=2.0),
    SamplingParams(temperature=0.9, frequency_penalty=1.0, presence_penalty=-0.5, seed=1),
    SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.3),
]


@pytest.mark.parametrize("vocab", [VOCAB, 64, 49_152])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    count = 40 if vocab < 10_000 else len(MIXED)
    logits = random_logits(count, vocab)
    prompt = PROMPT % vocab
    rows = [row(MIXED[i % len(MIXED)], i, i % 3, 5 * i, prompt_ids=prompt, output_ids=[1, 2, 2]) for i in range(count)]
    sampler = Sampler(7, vocab)
    together = sampler.sample(logits, rows)
    assert [sampler.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(count)] == together
    order = np.random.Generator(np.random.PCG64(1)).permutation(count).tolist()
    shuffled = sampler.sample(logits[order], [rows[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(count)] == together


def test_working_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30)
    rows = [row(MIXED[i % len(MIXED)], i) for i in range(30)]
    whole = Sampler(0, VOCAB).sample(logits, rows)
    monkeypatch.setattr("batchrun.engine.sampler._CHUNK_ELEMENTS", 4 * VOCAB)
    monkeypatch.setattr("batchrun.engine.sampler._FIRST_CANDIDATES", 2)
    assert Sampler(0, VOCAB).sample(logits, rows) == whole


def test_bfloat16_logits_give_the_tokens_of_the_same_numbers_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # One compiled exponential, one of torch: a draw may tip over where the two differ in the last bits, but hardly ever.
    logits = random_logits(len(MIXED) * 40).bfloat16()
    rows = [row(MIXED[i % len(MIXED)], i, output_ids=[1, 2]) for i in range(len(logits))]
    wide = Sampler(0, VOCAB).sample(logits.float(), rows)
    narrow = Sampler(0, VOCAB).sample(logits, rows)
    assert sum(a != b for a, b in zip(wide, narrow, strict=True)) <= 1
    monkeypatch.setattr("batchrun.kernels.ops._choice", "torch")
    assert Sampler(0, VOCAB).sample(logits, rows) == wide


def test_the_logits_are_not_changed() -> None:
    logits = random_logits(len(MIXED))
    before = logits.clone()
    Sampler(0, VOCAB).sample(logits, [row(params, output_ids=[1]) for params in MIXED])
    assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.full((3, VOCAB), -1.0)
    logits[0, [700, 20, 990]] = 4.0
    logits[1, [1001, 1002]] = 4.0
    assert Sampler(0, VOCAB).sample(logits, [row(SamplingParams())] * 3) == [20, 1001, 0]
    assert Sampler(0, VOCAB).sample(logits[:1], [row(SamplingParams())]) == [20]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)])
def test_only_the_rows_with_bad_logits_get_none(params: SamplingParams) -> None:
    logits = random_logits(5)
    logits[0, 17] = float("nan")
    logits[1, 17] = float("inf")
    logits[2] = float("-inf")
    logits[3, :900] = float("-inf")
    chosen = Sampler(0, VOCAB).sample(logits, [row(params, i) for i in range(5)])
    assert chosen[:3] == [None, None, None]
    assert chosen[3] is not None
    assert chosen[3] >= 900
    assert chosen[4] == Sampler(0, VOCAB).sample(logits[4:], [row(params, 4)])[0]


def test_a_greedy_row_is_untouched_by_a_penalised_neighbour() -> None:
    logits = random_logits(1).expand(2, -1).contiguous()
    best = int(logits[0].argmax())
    greedy, penalised = row(SamplingParams()), row(SamplingParams(repetition_penalty=2.0), output_ids=[best])
    assert Sampler(0, VOCAB).sample(logits, [greedy, penalised])[0] == best
    assert Sampler(0, VOCAB).sample(logits, [penalised, greedy])[1] == best
    assert Sampler(0, VOCAB).sample(logits, [penalised, greedy])[0] != best


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_over_prompt_and_output_as_in_transformers(penalty: float) -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    params = SamplingParams(repetition_penalty=penalty)
    sampler, logits = Sampler(0, VOCAB), random_logits(200, spread=1.0)
    output = [17, 17, 40, *range(100, 300)]
    ids = torch.tensor([[*PROMPT.tolist(), *output]]).expand(200, -1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone()).argmax(dim=-1).tolist()
    assert expected != logits.argmax(dim=-1).tolist()
    assert sampler.sample(logits, [row(params, output_ids=output)] * 200) == expected


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    # Token 3 is in the prompt only. Each case is computed by hand.
    logits = torch.tensor([[0.0, 5.0, 4.9, 5.2, 4.0]])
    sampler, prompt = Sampler(0, 5), np.array([3], np.int32)

    def choose(output: list[int], **params: float) -> int | None:
        return sampler.sample(logits, [row(SamplingParams(**params), prompt_ids=prompt, output_ids=output)])[0]  # type: ignore[arg-type]

    assert choose([], frequency_penalty=2.0, presence_penalty=2.0) == 3
    assert choose([3], presence_penalty=0.1) == 3  # 5.1
    assert choose([3, 3, 3], presence_penalty=0.1) == 3  # once, however often
    assert choose([3], frequency_penalty=0.25) == 1  # 4.95 < 5
    assert choose([3, 3, 1], frequency_penalty=0.125) == 3  # 4.95 > 4.9 > 4.875
    assert choose([3, 3, 3, 1], frequency_penalty=0.125) == 2  # 4.825, 4.875 < 4.9
    assert choose([4, 4, 4], frequency_penalty=-0.5) == 4  # 5.5
    assert choose([3, 1, 2], repetition_penalty=2.0) == 4  # 2.6, 2.5, 2.45 < 4


def test_penalties_apply_in_the_order_repetition_then_the_others() -> None:
    logits = torch.tensor([[4.0, 1.2]])
    # (4 / 2) - 0.9 = 1.1 < 1.2, but (4 - 0.9) / 2 = 1.55 would win.
    both = SamplingParams(repetition_penalty=2.0, presence_penalty=0.9)
    assert Sampler(0, 2).sample(logits, [row(both, prompt_ids=np.array([], np.int32), output_ids=[0])]) == [1]


def test_extreme_settings_give_a_token() -> None:
    logits = random_logits(1)
    for params in (
        SamplingParams(temperature=1e-320),
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=1.0, repetition_penalty=1e-300),
        SamplingParams(temperature=1.0, repetition_penalty=1e300),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1.0, top_k=10**9),
    ):
        token = Sampler(0, VOCAB).sample(logits, [row(params)])[0]
        assert token is not None
        assert 0 <= token < VOCAB
    assert Sampler(0, VOCAB).sample(logits, [row(SamplingParams(temperature=1e-320))]) == [int(logits.argmax())]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, seed=9),
        SamplingParams(temperature=1.5, top_k=9),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=1.0, min_p=0.2),
    ],
)
def test_frequencies_of_many_draws_match_the_exact_distribution(params: SamplingParams) -> None:
    logits = random_logits(1, vocab=30, seed=3, spread=1.2)[0]
    draws, exact = 40_000, kept_by_reference(logits, params)
    counts = np.bincount(draw_many(logits, params, draws), minlength=30)
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 0] * draws
    chi_square = ((counts[exact > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 3.5 * np.sqrt(2 * freedom) + 4  # about one in ten thousand


@pytest.mark.parametrize("vocab", [30, VOCAB])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=4.0, top_k=6),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=3.0, top_k=11, top_p=0.6),
        SamplingParams(temperature=2.0, min_p=0.3),
        SamplingParams(temperature=3.0, top_k=20, top_p=0.9, min_p=0.4),
    ],
)
def test_exactly_the_tokens_of_the_reference_can_be_drawn(params: SamplingParams, seed: int, vocab: int) -> None:
    logits = random_logits(1, vocab, seed=seed, spread=1.5 if vocab == 30 else 3.0)[0]
    exact = kept_by_reference(logits, params)
    kept = set(np.flatnonzero(exact).tolist())
    drawn = support(logits, params)
    assert drawn <= kept
    likely = set(np.flatnonzero(exact > 0.005).tolist())  # missed by 4,000 draws once in 5e8
    assert likely <= drawn


def test_top_k_and_top_p_agree_with_transformers() -> None:
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(1, vocab=40, seed=5, spread=1.0)
    warped = TopKLogitsWarper(15)(torch.zeros(1, 1), logits.clone())
    warped = TopPLogitsWarper(0.7)(torch.zeros(1, 1), warped)
    warped = MinPLogitsWarper(0.35)(torch.zeros(1, 1), warped)
    params = SamplingParams(temperature=1.0, top_k=15, top_p=0.7, min_p=0.35)
    assert support(logits[0], params) == set(torch.isfinite(warped[0]).nonzero().flatten().tolist())


def test_equal_logits_at_a_boundary_are_kept_by_lowest_id() -> None:
    logits = [1.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 1.0]
    assert support(logits, SamplingParams(temperature=1.0, top_k=4)) == {0, 1, 2, 3}
    # Four equal tokens of a quarter each: 0.5 is reached by two, anything above needs the third.
    even = torch.zeros(4)
    assert support(even, SamplingParams(temperature=1.0, top_p=0.5)) == {0, 1}
    assert support(even, SamplingParams(temperature=1.0, top_p=0.51)) == {0, 1, 2}
    # More equals than the first candidates: the lowest ids must still be found.
    many = torch.zeros(2000)
    assert max(support(many, SamplingParams(temperature=1.0, top_p=0.02), draws=400)) == 39
    assert max(support(many, SamplingParams(temperature=1.0, top_k=50), draws=400)) == 49


def test_min_p_keeps_a_token_exactly_at_the_threshold() -> None:
    even = torch.tensor([1.0, 1.0, 0.0])
    assert support(even, SamplingParams(temperature=1.0, min_p=1.0)) == {0, 1}
    assert support(even, SamplingParams(temperature=1.0, min_p=1.0, top_k=2)) == {0, 1}


def test_a_seeded_row_draws_the_same_in_any_place_and_job() -> None:
    logits = random_logits(1).expand(64, -1)
    seeded = SamplingParams(temperature=1.0, seed=42)
    drawn = Sampler(0, VOCAB).sample(logits, [row(seeded, 3, 1, position) for position in range(64)])
    assert Sampler(99, VOCAB).sample(logits, [row(seeded, 800, 1, position) for position in range(64)]) == drawn


def test_each_of_seed_row_sample_and_position_changes_the_draws() -> None:
    logits = random_logits(1).expand(64, -1)
    plain, seeded = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=5)

    def draw(job_seed: int, params: SamplingParams, row_index: int, sample: int, first: int) -> tuple[int | None, ...]:
        rows = [row(params, row_index, sample, first + position) for position in range(64)]
        return tuple(Sampler(job_seed, VOCAB).sample(logits, rows))

    streams = [
        draw(5, plain, 0, 0, 0),
        draw(6, plain, 0, 0, 0),
        draw(5 + 2**40, plain, 0, 0, 0),
        draw(5, plain, 1, 0, 0),
        draw(5, plain, 2**40, 0, 0),
        draw(5, plain, 0, 1, 0),
        draw(5, plain, 0, 0, 1000),
        draw(5, seeded, 0, 0, 0),  # the row's seed equal to the job's: another stream all the same
        draw(5, SamplingParams(temperature=1.0, seed=2**63 - 1), 0, 0, 0),
        draw(5, seeded, 0, 1, 0),
    ]
    assert len(set(streams)) == len(streams)


def test_truncation_does_not_need_the_whole_vocabulary_to_agree_with_it() -> None:
    # With and without a top-k that keeps everything, top-p must cut at the same token.
    logits = random_logits(8, seed=2)
    for top_p in (0.3, 0.9, 0.9999):
        without = [row(SamplingParams(temperature=1.0, top_p=top_p), i) for i in range(8)]
        with_all = [row(SamplingParams(temperature=1.0, top_p=top_p, top_k=VOCAB), i) for i in range(8)]
        assert Sampler(0, VOCAB).sample(logits, without) == Sampler(0, VOCAB).sample(logits, with_all)


def test_job_seed_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="--seed is -1"):
        Sampler(-1, VOCAB)
