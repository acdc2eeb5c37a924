"""The decoder's logits against transformers' own Llama on random tiny models, float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchrun.engine.config import ModelConfig
from batchrun.engine.errors import ModelError
from batchrun.engine.loader import ModelSource, load_model
from batchrun.engine.models.decoder import Decoder
from batchrun.engine.models.rope import inverse_frequencies
from batchrun.engine.weights import SafetensorsSource
from batchrun.kernels import ops

NUM_TOKENS = 45
ATOL = 1e-4

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped query": {},
    "multi query": {"num_key_value_heads": 1},
    "multi head": {"num_key_value_heads": 4},
    "tied head": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 20},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "llama3 rope": {"rope_parameters": LLAMA3, "head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def make_reference(changes: dict[str, Any], folder: Path) -> Any:
    """A random Llama of transformers, saved into folder; norms and biases are random too, so that each one counts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> Decoder:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return Decoder(config, SafetensorsSource([folder / "model.safetensors"]), torch.float32, "cpu")


def allocate(decoder: Decoder, num_slots: int) -> Any:
    config = decoder.config
    shape = ops.KVConfig(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, decoder.dtype)
    return ops.allocate_kv(shape, -(-num_slots // ops.page_size("cpu")))


def forward(decoder: Decoder, kv: Any, ids: torch.Tensor, start: int, rows: torch.Tensor, first_slot: int = 0) -> torch.Tensor:
    """One step of one sequence whose tokens [0, start) are in the pool already, at slots from first_slot on."""
    count = len(ids)
    positions = torch.arange(start, start + count)
    item = ops.AttentionItem(0, count, [(first_slot, start + count)], start + count, True)
    return decoder.forward(ids, positions, positions + first_slot, kv, ops.build_plan(kv, [item], count), rows)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, BASE["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    make_reference({}, tmp_path)
    return load(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path, ids: torch.Tensor) -> None:
    reference = make_reference(VARIANTS[variant], tmp_path)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    decoder = load(tmp_path)
    logits = forward(decoder, allocate(decoder, NUM_TOKENS), ids, 0, torch.arange(NUM_TOKENS))
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
    assert decoder.config.num_parameters == sum(parameter.numel() for parameter in reference.parameters())


def test_logits_come_back_for_the_asked_rows_in_their_order(decoder: Decoder, ids: torch.Tensor) -> None:
    every = forward(decoder, allocate(decoder, NUM_TOKENS), ids, 0, torch.arange(NUM_TOKENS))
    rows = torch.tensor([44, 3, 17])
    torch.testing.assert_close(forward(decoder, allocate(decoder, NUM_TOKENS), ids, 0, rows), every[rows], atol=1e-5, rtol=0)


def test_no_logit_rows_give_an_empty_result_and_still_fill_the_pool(decoder: Decoder, ids: torch.Tensor) -> None:
    whole = forward(decoder, allocate(decoder, 64), ids, 0, torch.arange(NUM_TOKENS))
    kv = allocate(decoder, 64)
    nothing = forward(decoder, kv, ids[:40], 0, torch.empty(0, dtype=torch.int64))
    assert nothing.shape == (0, BASE["vocab_size"])
    assert nothing.dtype == torch.float32
    rest = forward(decoder, kv, ids[40:], 40, torch.arange(5))
    torch.testing.assert_close(rest, whole[40:], atol=ATOL, rtol=0)


def test_chunks_and_slots_elsewhere_in_the_pool_change_nothing(decoder: Decoder, ids: torch.Tensor) -> None:
    whole = forward(decoder, allocate(decoder, 128), ids, 0, torch.arange(NUM_TOKENS))
    kv = allocate(decoder, 128)
    pieces = [
        forward(decoder, kv, ids[start:end], start, torch.arange(end - start), first_slot=48)
        for start, end in ((0, 16), (16, 33), (33, 34), (34, 45))
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=ATOL, rtol=0)


def test_bfloat16_stays_close_to_float32(tmp_path: Path, ids: torch.Tensor) -> None:
    make_reference({"initializer_range": 0.1}, tmp_path)
    exact = load(tmp_path)
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    rounded = Decoder(exact.config, source, torch.bfloat16, "cpu")
    rows = torch.arange(NUM_TOKENS)
    expected = forward(exact, allocate(exact, NUM_TOKENS), ids, 0, rows)
    logits = forward(rounded, allocate(rounded, NUM_TOKENS), ids, 0, rows)
    assert logits.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.995


def test_a_weight_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    make_reference({}, tmp_path)
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    config = ModelConfig.from_hf({**BASE, "architectures": ["LlamaForCausalLM"], "intermediate_size": 96})
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight is \[80, 48\]: its configuration says \[96, 48\]"):
        Decoder(config, source, torch.float32, "cpu")


def test_frequencies_divided_one_by_one() -> None:
    plain = ModelConfig.from_hf({**BASE, "architectures": ["LlamaForCausalLM"]})
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    rope = {"rope_type": "factors", "rope_theta": 10000.0, "factors": factors}
    scaled = ModelConfig.from_hf({**BASE, "architectures": ["LlamaForCausalLM"], "rope_parameters": rope})
    torch.testing.assert_close(inverse_frequencies(scaled) * torch.tensor(factors), inverse_frequencies(plain))


def test_the_shared_tiny_model_gives_the_same_logits_as_transformers(tiny_model_folder: Path) -> None:
    from transformers import LlamaForCausalLM

    model = load_model(ModelSource(tiny_model_folder, "hf", "tiny"), "cpu", "float32", 1)
    ids = torch.tensor(model.tokenizer.encode("user\nthe cat and the dog", parse_special=False))
    logits = forward(model.decoder, allocate(model.decoder, len(ids)), ids, 0, torch.arange(len(ids)))
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)(ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
