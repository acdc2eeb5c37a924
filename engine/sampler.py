"""Logits in, token ids out: a pure function of one row's logits, settings and tokens so far."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchrun.engine.philox import uniforms
from batchrun.engine.sampling_params import MAX_SEED, SamplingParams

_SEEDED = 1 << 31  # top bit of a counter's second word: row indices stay below 2^63, so the two kinds of row never meet
_MIN_TEMPERATURE = 1e-30  # float32 must not flush a temperature to 0; any gap of logits divided by this is infinite anyway
_CHUNK_ELEMENTS = 1 << 24  # logits copied and worked on at once, 64 MiB of float32
_FIRST_CANDIDATES = 128  # top-p alone: most rows' nucleus is smaller, and a full sort costs a hundred times as much
_BLOCK = 64  # width of the first level of the search in the cumulative weights


class SampleRow(NamedTuple):
    """What a row's next token depends on, its logits aside."""

    params: SamplingParams
    row_index: int
    """Position in the input file."""
    sample: int
    position: int
    """Output position of the token to choose, from 0."""
    prompt_ids: npt.NDArray[np.int32]
    output_ids: list[int]


class Sampler:
    """Chooses one token for each row of logits.

    In this order (that of transformers' `_get_logits_processor`; vLLM applies min-p before top-k):
      1. a row with NaN, +inf or nothing but -inf gets None;
      2. penalties: repetition over prompt and output, as transformers' RepetitionPenaltyLogitsProcessor; then frequency
         and presence over the output, as OpenAI and vLLM;
      3. temperature 0: the largest logit, the lowest id among equals;
      4. temperature;
      5. top-k: exactly k tokens, the lowest ids among equals;
      6. top-p over what top-k left: tokens in falling order, lowest id first among equals, as long as the mass before
         one is below top_p; at least one token;
      7. min-p: tokens with less than min_p of the most likely one's probability go;
      8. one uniform number, inverted through the cumulative distribution.

    The uniform number is Philox4x32-10's for (job seed; row_index, sample, position), or for (row's seed; sample,
    position) when the row has one. Weights are rounded to whole numbers, at most 2^53 in all, so that every sum of them
    is exact in float64 and thus the same for any batch, number of threads or order of summation. A token whose
    probability is below about 2^-36 of the most likely one's (2^-34 at 262,144 tokens) is never drawn.

    Args:
        job_seed: 0 to 2^63 - 1.
        vocab_size: width of the logits.
    """

    def __init__(self, job_seed: int, vocab_size: int) -> None:
        if not 0 <= job_seed <= MAX_SEED:
            raise ValueError(f"--seed is {job_seed}: it must be between 0 and 2^63 - 1")
        self.job_seed = job_seed
        self.vocab_size = vocab_size
        self._scale = 2.0 ** (53 - (vocab_size - 1).bit_length())

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
        """The next token of each row.

        Args:
            logits: float32 [R, vocab_size], on any device; not changed.
            rows: R rows, in the order of the logits.

        Returns:
            R token ids; None where the row's logits are not finite.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} for {len(rows)} rows of {self.vocab_size}"
        assert logits.dtype == torch.float32, logits.dtype
        if not rows:
            return []
        best = logits.argmax(dim=-1)
        # argmax takes NaN for the largest, so the value there tells all three kinds of bad row.
        finite = logits.gather(1, best[:, None]).isfinite().flatten().tolist()
        chosen = [token if fine else None for token, fine in zip(best.tolist(), finite, strict=True)]
        rest = [i for i, row in enumerate(rows) if finite[i] and (row.params.penalised or not row.params.greedy)]
        # Rows that need the same steps go together, which cannot change a result: no step mixes rows.
        for needs in (_truncated, _untruncated, _greedy):
            group = [i for i in rest if needs(rows[i].params)]
            for chunk in _chunks(group, max(1, _CHUNK_ELEMENTS // self.vocab_size)):
                scores = logits[chunk]  # a copy, changed in place from here on
                members = [rows[i] for i in chunk]
                for scores_of_row, row in zip(scores, members, strict=True):
                    if row.params.penalised:
                        _penalise(scores_of_row, row)
                tokens = scores.argmax(dim=-1) if needs is _greedy else self._draw(scores, members, needs is _truncated)
                for i, token in zip(chunk, tokens.tolist(), strict=True):
                    chosen[i] = token
        return chosen

    def _draw(self, scores: torch.Tensor, rows: Sequence[SampleRow], truncated: bool) -> torch.Tensor:
        """int64 [N] tokens drawn from scores, float32 [N, V], which are overwritten."""
        device = scores.device
        # The maximum is taken off before the division, so that no temperature can overflow.
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        scores.div_(_column([max(row.params.temperature, _MIN_TEMPERATURE) for row in rows], torch.float32, device))
        uniform = _column(self._uniforms(rows), torch.float64, device)
        least = _column([row.params.min_p for row in rows], torch.float32, device) * self._scale
        if truncated:
            return self._draw_truncated(scores, rows, uniform, least)
        weights = self._weights(scores)
        weights.masked_fill_(weights < least, 0.0)
        return _invert(weights, uniform)

    def _draw_truncated(
        self, scores: torch.Tensor, rows: Sequence[SampleRow], uniform: torch.Tensor, least: torch.Tensor
    ) -> torch.Tensor:
        """As _draw, from top-k and top-p's candidates, found without a full sort unless a row keeps very many."""
        vocab_size, device = self.vocab_size, scores.device
        limits = [min(row.params.top_k or vocab_size, vocab_size) for row in rows]
        top_k = _column(limits, torch.int64, device)
        top_p = _column([row.params.top_p for row in rows], torch.float64, device)
        total = torch.zeros_like(top_p)
        if vocab_size in limits:
            total = _blocks(self._weights(scores.clone()))[1][:, -1:]
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=device)
        todo = torch.arange(len(rows), device=device)
        width = min(vocab_size, max([_FIRST_CANDIDATES, *(2 * limit for limit in limits if limit < vocab_size)]))
        while len(todo):
            values, ids = _ranked(scores[todo], width)
            weights = self._weights(values.clone())
            weights.masked_fill_(torch.arange(width, device=device) >= top_k[todo], 0.0)
            cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
            mass = torch.where(top_k[todo] < vocab_size, cumulative[:, -1:], total[todo])
            keep = (cumulative - weights < top_p[todo] * mass) | (top_p[todo] >= 1.0)
            keep &= torch.arange(width, device=device) < top_k[todo]
            # Certain once the last token kept beats the last candidate: then all its equals are candidates too.
            last = values.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
            certain = (last > values[:, -1:]).flatten() | (self._weights(values[:, -1].clone()) == 0.0)
            if width == vocab_size:
                certain.fill_(True)
            weights.masked_fill_(~keep | (weights < least[todo]), 0.0)
            drawn = ids.gather(1, _invert(weights, uniform[todo])[:, None]).flatten()
            tokens[todo[certain]] = drawn[certain]
            todo = todo[~certain]
            width = min(vocab_size, 8 * width)
        return tokens

    def _weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Whole numbers proportional to the probabilities, in place; scores are <= 0 and 0 for the most likely token."""
        return scores.exp_().mul_(self._scale).round_()

    def _uniforms(self, rows: Sequence[SampleRow]) -> npt.NDArray[np.float64]:
        counter, key = np.empty((len(rows), 4), np.uint32), np.empty((len(rows), 2), np.uint32)
        for i, row in enumerate(rows):
            seed = self.job_seed if row.params.seed is None else row.params.seed
            stream = row.row_index if row.params.seed is None else _SEEDED << 32
            key[i] = seed & 0xFFFFFFFF, seed >> 32
            counter[i] = stream & 0xFFFFFFFF, stream >> 32, row.sample, row.position
        return uniforms(counter, key)


def _truncated(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0)


def _untruncated(params: SamplingParams) -> bool:
    return not params.greedy and not _truncated(params)


def _greedy(params: SamplingParams) -> bool:
    return params.greedy


def _chunks(items: list[int], size: int) -> Iterable[list[int]]:
    return (items[low : low + size] for low in range(0, len(items), size))


def _column(values: Sequence[float] | npt.NDArray[np.float64], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One number per row as a tensor [N, 1]."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _penalise(scores: torch.Tensor, row: SampleRow) -> None:
    """Apply a row's penalties to its scores, float32 [V], in place; finite scores stay finite."""
    params, device = row.params, scores.device
    output = np.asarray(row.output_ids, dtype=np.int64)
    limit = torch.finfo(torch.float32).max
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.concatenate([row.prompt_ids.astype(np.int64), output])).to(device)
        old = scores[seen]
        new = torch.where(old < 0, old * params.repetition_penalty, old / params.repetition_penalty)
        # A token that occurs several times is written the same value several times.
        scores[seen] = torch.where(old.isfinite(), new.clamp(-limit, limit), old)
    if output.size and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(output, return_counts=True)
        seen = torch.from_numpy(ids).to(device)
        occurrences = torch.from_numpy(counts).to(device, torch.float32)
        scores[seen] -= params.frequency_penalty * occurrences
        scores[seen] -= params.presence_penalty


def _ranked(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row in falling order, lowest id first among equals: values [N, width], ids int64.

    Which of several values equal to the last one are among them is left open.
    """
    values, ids = scores.topk(width, dim=-1, sorted=False)
    # Scores are <= 0, and the bits of a float's magnitude sort as whole numbers do: one key holds value and id.
    key = (values.abs().view(torch.int32).to(torch.int64) << 32) | ids
    rank = key.argsort(dim=-1)
    return values.gather(1, rank), ids.gather(1, rank)


def _blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, W] in blocks of 64 [N, B, 64], the last one filled up with zeros; running sums of blocks, float64 [N, B]."""
    rows, width = weights.shape
    if width % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - width % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    return blocks, blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [N]: where `uniform` [N, 1] of the mass of whole-number weights, float32 [N, W], lies."""
    # Two levels, since a running sum over the whole vocabulary costs many times the sums of blocks.
    blocks, bounds = _blocks(weights)
    # Never the total itself: the largest uniform number is 1 - 2^-53, and that times any float64 rounds to less than it.
    target = (uniform * bounds[:, -1:]).floor()
    block = torch.searchsorted(bounds, target, right=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    before = torch.where(block > 0, bounds.gather(1, (block - 1).clamp(min=0)), 0.0)
    offset = torch.searchsorted(inside, target - before, right=True)
    return (block * _BLOCK + offset).flatten()
