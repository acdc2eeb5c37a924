"""Model shapes read from Hugging Face's and GGUF's words for them."""

from typing import Any

import pytest

from batchrun.engine.config import EngineConfig, ModelConfig
from batchrun.engine.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.eos_token_id": 2,
}


def test_sizes_of_smollm2() -> None:
    config = ModelConfig.from_hf(LLAMA)
    assert config.head_dim == 64
    assert config.kv_bytes_per_token("bfloat16") == 23_040
    assert config.kv_bytes_per_token("float32") == 46_080
    assert config.kv_bytes_per_token("bfloat16", "int8") == 12_240
    assert config.num_parameters == 134_515_008
    assert (config.eos_ids, config.bos_id) == ((2,), 1)


def test_torch_types_count_bytes_as_their_names_do() -> None:
    torch = pytest.importorskip("torch")
    config = ModelConfig.from_hf(LLAMA)
    assert config.kv_bytes_per_token(torch.bfloat16) == config.kv_bytes_per_token("bfloat16")


def test_end_ids_of_the_generation_config_win() -> None:
    assert ModelConfig.from_hf(LLAMA, {"eos_token_id": [5, 7]}).eos_ids == (5, 7)
    assert ModelConfig.from_hf(LLAMA, {"eos_token_id": 0}).eos_ids == (0,)
    assert ModelConfig.from_hf(LLAMA, {}).eos_ids == (2,)
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5.0}, (5.0, None)),
        ({"rope_theta": 5.0, "rope_scaling": None}, (5.0, None)),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, (5.0, {"rope_type": "linear", "factor": 2.0})),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, (7.0, None)),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 3.0}},
            (7.0, {"rope_type": "linear", "factor": 3.0}),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_configs(rope: dict[str, Any], expected: tuple[float, Any]) -> None:
    base = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    config = ModelConfig.from_hf({**base, **rope})
    assert (config.rope_theta, config.rope_scaling) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM: supported is LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma3"}, "gemma3: supported is LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "'gelu': only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn': supported are default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"num_hidden_layers": None}, "num_hidden_layers = None: a whole number is needed"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings = 'long'"),
        ({"num_key_value_heads": 2}, "9 query heads and 2 key-value heads"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ModelConfig.from_hf({**LLAMA, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scaling", [{}, {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0}}])
def test_writing_a_config_and_reading_it_again_changes_nothing(scaling: dict[str, Any]) -> None:
    config = ModelConfig.from_hf({**LLAMA, **scaling}, {"eos_token_id": [2, 0]})
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_gguf_names_of_the_same_things() -> None:
    config = ModelConfig.from_gguf({**GGUF, "llama.rope.freq_base": 500.0, "tokenizer.ggml.eot_token_id": 1}, ["output.weight"])
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.max_context) == (2, 32, 48, 64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 8, 3)
    assert (config.rope_theta, config.rope_scaling, config.tie_embeddings) == (500.0, None, False)
    assert config.eos_ids == (2, 1)
    assert ModelConfig.from_gguf(GGUF, []).tie_embeddings


def test_gguf_head_size_and_scaling_are_taken_from_the_file() -> None:
    metadata = {**GGUF, "llama.attention.key_length": 16, "llama.attention.value_length": 16, "llama.rope.dimension_count": 16}
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = ModelConfig.from_gguf({**metadata, **scaling}, [])
    assert config.head_dim == 16
    assert config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    assert ModelConfig.from_gguf(metadata, [], [1.0, 2.0]).rope_scaling == {"rope_type": "factors", "factors": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "qwen2: supported is llama"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8"),
        ({"llama.block_count": None}, "block_count = None"),
    ],
)
def test_what_a_gguf_file_asks_for_and_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_gguf({**GGUF, **change}, [])


def test_engine_config_checks_its_counts() -> None:
    sizes = {"num_pages": 4, "page_size": 16, "max_running": 2, "chunk_tokens": 32, "max_context": 64}
    assert EngineConfig(**sizes).kv_tokens == 64
    for name in sizes:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            EngineConfig(**{**sizes, name: 0})
    with pytest.raises(ValueError, match="kv_dtype is 'int4': it must be one of auto, int8"):
        EngineConfig(**sizes, kv_dtype="int4")
    with pytest.raises(ValueError, match="job_seed is -1"):
        EngineConfig(**sizes, job_seed=-1)
