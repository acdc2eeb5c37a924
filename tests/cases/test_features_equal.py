"""No feature changes a token: 60 rows with shared beginnings against transformers' own Llama, row by row without a cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from batchrun.engine.tokenizer import Tokenizer

MAX_TOKENS = 24
"""Over a page of own tokens, so that running rows need more pages and are preempted for them."""
END = 2

FEATURES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefix cache": {"prefix_cache": False},
    "given order": {"order": "given"},
    "no dedupe": {"dedupe": False},
    "chunks of 1": {"chunk_tokens": 1},
    "chunks of 16": {"chunk_tokens": 16},
    "1 running": {"max_running": 1},
    "200 running": {"max_running": 200},
    "small pool": {"kv_tokens": 256},
}
PREEMPTED = {"order": "given", "kv_tokens": 256, "max_running": 12, "engine": {"reserve_output": False, "check_integrity": True}}


def prompts() -> list[str]:
    """Interleaved groups, prefixes of two levels, two rows that are the beginning of others, duplicates."""
    texts = []
    for i in range(58):
        group, half = i % 5, i % 2
        texts.append(f"user{' the cat' * (12 + 5 * group)} of group {group}{' and the dog' * 3 * half} is {i % 53}")
    return [*texts, "user the cat", "user" + " the cat" * 12]


@pytest.fixture(scope="module")
def reference(tiny_model_folder: Path) -> list[list[int]]:
    """Greedy output ids of each row, every token from a forward pass over all that comes before it."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()
    outputs: dict[str, list[int]] = {}
    texts = prompts()
    for text, ids in zip(texts, Tokenizer.from_folder(tiny_model_folder).encode_raw(texts), strict=True):
        if text in outputs:
            continue
        output: list[int] = []
        with torch.inference_mode():
            while len(output) < MAX_TOKENS and END not in output:
                logits = model(torch.tensor([[*ids, *output]]), use_cache=False).logits[0, -1]
                best, second = logits.topk(2).values.tolist()
                assert best - second > 1e-5, "a near-tie: equal tokens cannot be asked for"
                output.append(int(logits.argmax()))
        outputs[text] = output
    assert len({tuple(output) for output in outputs.values()}) > 40
    return [outputs[text] for text in texts]


@pytest.fixture
def run(run_job: Callable[..., Any], tiny_model_folder: Path) -> Callable[..., Any]:
    def run_prompts(**options: Any) -> Any:
        return run_job(pa.table({"prompt": prompts()}), model=tiny_model_folder, **{"max_tokens": MAX_TOKENS, **options})

    return run_prompts


@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_output_is_that_of_transformers(run: Callable[..., Any], reference: list[list[int]], feature: str) -> None:
    assert run(**FEATURES[feature]).ids == reference


def test_greedy_output_is_that_of_transformers_after_eviction_and_preemption(
    run: Callable[..., Any], reference: list[list[int]]
) -> None:
    outcome = run(**PREEMPTED)
    assert outcome.summary["preemptions"] > 0
    assert outcome.summary["evictions"] > 0
    assert outcome.ids == reference


def test_samples_are_the_same_with_every_feature(run: Callable[..., Any]) -> None:
    sampling = {"temperature": 0.9, "n": 3, "seed": 7, "ignore_eos": True}
    expected = run(**sampling)
    assert expected.column("sample") == [0, 1, 2] * 60
    assert len({tuple(ids) for ids in expected.ids}) > 170
    for feature, options in FEATURES.items():
        assert run(**sampling, **options).ids == expected.ids, feature
    preempted = run(**sampling, **PREEMPTED)
    assert preempted.summary["preemptions"] > 0
    assert preempted.ids == expected.ids
    assert run(**{**sampling, "seed": 8}).ids != expected.ids
