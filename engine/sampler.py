"""Logits in, token ids out: a pure function of one row's logits, settings and tokens so far."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchrun.engine.philox import uniforms
from batchrun.engine.sampling_params import MAX_SEED, SamplingParams
from batchrun.kernels import ops

_SEEDED = 1 << 31  # top bit of a counter's second word: row indices stay below 2^63, so the two kinds of row never meet
_MIN_TEMPERATURE = 1e-30  # float32 must not flush a temperature to 0; any gap of logits divided by this is infinite anyway
_CHUNK_ELEMENTS = 1 << 24  # logits copied and worked on at once, 64 MiB of float32
_FIRST_CANDIDATES = 128  # top-p alone: most rows' nucleus is smaller, and a full sort costs a hundred times as much


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
        self._scale = ops.weight_scale(vocab_size)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
        """The next token of each row.

        Args:
            logits: [R, vocab_size], any floating dtype, on any device; not changed. All arithmetic is float32 or wider.
            rows: R rows, in the order of the logits.

        Returns:
            R token ids; None where the row's logits are not finite.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} for {len(rows)} rows of {self.vocab_size}"
        if not rows:
            return []
        best, fine = ops.best(logits)
        finite = fine.tolist()
        chosen = [token if fine else None for token, fine in zip(best.tolist(), finite, strict=True)]
        # Rows that need the same steps go together, which cannot change a result: no step mixes rows.
        groups: dict[tuple[bool, bool, bool], list[int]] = {}
        for i, row in enumerate(rows):
            params = row.params
            if finite[i] and (params.penalised or not params.greedy):
                groups.setdefault((params.penalised, params.greedy, _truncated(params)), []).append(i)
        for group in groups.values():
            for chunk in _chunks(group, max(1, _CHUNK_ELEMENTS // self.vocab_size)):
                tokens = self._choose(logits, best, torch.tensor(chunk, device=logits.device), [rows[i] for i in chunk])
                for i, token in zip(chunk, tokens.tolist(), strict=True):
                    chosen[i] = token
        return chosen

    def _choose(self, logits: torch.Tensor, best: torch.Tensor, which: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """int64 [N]: the tokens of rows `which` of the logits, all of the same needs; best, int64 [R], are the likeliest."""
        params, device = rows[0].params, logits.device
        if params.penalised:
            logits, which = logits[which].float(), torch.arange(len(rows), device=device)
            for scores, row in zip(logits, rows, strict=True):
                _penalise(scores, row)
            best = ops.best(logits)[0]
            if params.greedy:
                return best
        place = best[which]
        temperature = _column([max(row.params.temperature, _MIN_TEMPERATURE) for row in rows], torch.float32, device)
        min_p = _column([row.params.min_p for row in rows], torch.float32, device)
        uniform = _column(self._uniforms(rows), torch.float64, device)
        if not _truncated(params):
            return ops.draw(logits, ops.Draws(which, place, temperature.flatten(), min_p.flatten(), uniform.flatten()))
        scores = logits[which].float()
        # The maximum is taken off before the division, so that no temperature can overflow.
        scores.sub_(scores.gather(1, place[:, None])).div_(temperature)
        return self._draw_truncated(scores, rows, uniform, min_p * self._scale)

    def _draw_truncated(
        self, scores: torch.Tensor, rows: Sequence[SampleRow], uniform: torch.Tensor, least: torch.Tensor
    ) -> torch.Tensor:
        """int64 [N] tokens drawn from top-k and top-p's candidates, found without a full sort unless a row keeps very many.

        scores: float32 [N, V], divided by the temperature, 0 for the most likely token.
        """
        vocab_size, device = self.vocab_size, scores.device
        limits = [min(row.params.top_k or vocab_size, vocab_size) for row in rows]
        top_k = _column(limits, torch.int64, device)
        top_p = _column([row.params.top_p for row in rows], torch.float64, device)
        total = torch.zeros_like(top_p)
        if vocab_size in limits:
            total = ops.block_sums(ops.whole_weights(scores.clone(), self._scale))[1][:, -1:]
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=device)
        todo = torch.arange(len(rows), device=device)
        width = min(vocab_size, max([_FIRST_CANDIDATES, *(2 * limit for limit in limits if limit < vocab_size)]))
        while len(todo):
            values, ids = _ranked(scores[todo], width)
            weights = ops.whole_weights(values.clone(), self._scale)
            negligible = weights[:, -1] == 0.0
            weights.masked_fill_(torch.arange(width, device=device) >= top_k[todo], 0.0)
            cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
            mass = torch.where(top_k[todo] < vocab_size, cumulative[:, -1:], total[todo])
            keep = (cumulative - weights < top_p[todo] * mass) | (top_p[todo] >= 1.0)
            keep &= torch.arange(width, device=device) < top_k[todo]
            # Certain once the last token kept beats the last candidate: then all its equals are candidates too.
            last = values.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
            certain = (last > values[:, -1:]).flatten() | negligible
            if width == vocab_size:
                certain.fill_(True)
            weights.masked_fill_(~keep | (weights < least[todo]), 0.0)
            drawn = ids.gather(1, ops.invert(weights, uniform[todo].flatten())[:, None]).flatten()
            tokens[todo[certain]] = drawn[certain]
            todo = todo[~certain]
            width = min(vocab_size, 8 * width)
        return tokens

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
