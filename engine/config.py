"""What a model looks like (ModelConfig) and how the engine may use the machine (EngineConfig). No torch here."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchrun.engine.errors import ModelError

if TYPE_CHECKING:
    import torch

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_GGUF_ARCHITECTURES = ("llama",)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
GGUF_ROPE_FACTORS = "factors"
"""Our own name for a GGUF file's `rope_freqs.weight`: every frequency is divided by its factor."""

KV_DTYPES = ("auto", "int8")
"""What keys and values are kept in: as the model computes, or in int8 with a scale per token and head."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much memory and how many rows the engine uses at once.

    Raises:
        ValueError: a count below 1, a negative seed, or an unknown kv_dtype.
    """

    num_pages: int
    """Pages of the KV pool, at least 1."""
    page_size: int
    """Tokens per page, as `kernels.ops.page_size` reports it."""
    max_running: int
    """Most sequences that are prefilled or decoded at once, at least 1."""
    chunk_tokens: int
    """Most prompt tokens computed in one step, at least 1; the step's decoding rows come on top."""
    max_context: int
    """Most tokens of one sequence, prompt and output together, at least 1."""
    reserve_output: bool = True
    """Start a row only when the pool can hold its longest output too, so that it is never preempted; False: its prompt."""
    job_seed: int = 0
    """Seed of the rows that have none of their own; 0 or more."""
    kv_dtype: str = "auto"
    """Of the pool, one of KV_DTYPES."""
    check_integrity: bool = False
    """Check the pool's and the tree's books after every step; for tests, slow."""

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_running", "chunk_tokens", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.job_seed < 0:
            raise ValueError(f"job_seed is {self.job_seed}: it must be 0 or more")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}: it must be one of {', '.join(KV_DTYPES)}")

    @property
    def kv_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only model, whichever file it came from."""

    architecture: str
    """Hugging Face's class name, one of SUPPORTED_ARCHITECTURES."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    """Query heads; a multiple of num_kv_heads."""
    num_kv_heads: int
    head_dim: int
    """Not always hidden_size / num_heads; even."""
    vocab_size: int
    """Rows of the embedding, at least the tokenizer's ids."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or `rope_type` (`linear`, `llama3`, `factors`) with its parameters under Hugging Face's names."""
    max_context: int
    """Positions that the model was made for."""
    tie_embeddings: bool
    """The output head is the embedding."""
    eos_ids: tuple[int, ...]
    """Tokens that end an output; may be empty."""
    bos_id: int | None
    attention_bias: bool = False
    """Biases on q, k, v and o."""
    mlp_bias: bool = False
    """Biases on gate, up and down."""

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        for name in (*sizes, "max_context"):
            if getattr(self, name) < 1:
                raise ModelError(f"the model's {name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            heads = f"{self.num_heads} query heads and {self.num_kv_heads} key-value heads"
            raise ModelError(f"the model has {heads}: the first must be a multiple of the second")
        if self.head_dim % 2:
            raise ModelError(f"the model's head_dim is {self.head_dim}: rotary positions need an even one")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Read the content of config.json and, where there is one, of generation_config.json (whose end ids win).

        Raises:
            ModelError: an architecture, activation, rope type or quantisation that is not supported, or a missing key.
        """
        architecture = _hf_architecture(config)
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise ModelError(f"the model's weights are quantised ({method}): give unquantised safetensors or a .gguf file")
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ModelError(f"the model's activation is {activation!r}: only 'silu' is supported")
        theta, scaling = _hf_rope(config)
        eos = (generation or {}).get("eos_token_id")
        if eos is None:
            eos = config.get("eos_token_id")
        bos = config.get("bos_token_id")
        num_heads, hidden_size = _int(config, "num_attention_heads"), _int(config, "hidden_size")
        return cls(
            architecture=architecture,
            num_layers=_int(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_int(config, "num_key_value_heads", num_heads),
            head_dim=_int(config, "head_dim", hidden_size // max(num_heads, 1)),
            vocab_size=_int(config, "vocab_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_context=_int(config, "max_position_embeddings", 2048),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_ids=_ids(eos),
            bos_id=(_ids(bos) or (None,))[0],
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensor_names: Collection[str], rope_factors: list[float] | None = None
    ) -> "ModelConfig":
        """Read a GGUF file's metadata; the tensors' names say whether the head is tied and whether there are biases.

        rope_factors is the content of the tensor `rope_freqs.weight`, where there is one.

        Raises:
            ModelError: an architecture or rope type that is not supported, or a missing key.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
            raise _unsupported(str(architecture), SUPPORTED_GGUF_ARCHITECTURES)
        values = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
        if values.get("expert_count"):
            raise ModelError(f"the model is a mixture of {values['expert_count']} experts: only dense models are supported")
        num_heads, hidden_size = _int(values, "attention.head_count"), _int(values, "embedding_length")
        head_dim = _int(values, "attention.key_length", hidden_size // max(num_heads, 1))
        if (value_dim := values.get("attention.value_length", head_dim)) != head_dim:
            raise ModelError(f"the model's values have {value_dim} dimensions and its keys {head_dim}: they must be equal")
        if (rotated := values.get("rope.dimension_count", head_dim)) != head_dim:
            raise ModelError(f"the model rotates {rotated} of {head_dim} dimensions: partial rotary positions are not supported")
        end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ends = [metadata[f"tokenizer.ggml.{key}"] for key in end_keys if f"tokenizer.ggml.{key}" in metadata]
        return cls(
            architecture="LlamaForCausalLM",
            num_layers=_int(values, "block_count"),
            hidden_size=hidden_size,
            intermediate_size=_int(values, "feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=_int(values, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=_int(values, "vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
            rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-5)),
            rope_theta=float(values.get("rope.freq_base", 10000.0)),
            rope_scaling=_gguf_rope_scaling(values, rope_factors),
            max_context=_int(values, "context_length"),
            tie_embeddings="output.weight" not in tensor_names,
            eos_ids=tuple(dict.fromkeys(int(end) for end in ends)),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json from which `from_hf` makes this config again."""
        scaling = {} if self.rope_scaling is None else self.rope_scaling
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, **scaling},
            "max_position_embeddings": self.max_context,
            "tie_word_embeddings": self.tie_embeddings,
            "eos_token_id": list(self.eos_ids),
            "bos_token_id": self.bos_id,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
        }

    def kv_bytes_per_token(self, dtype: "str | torch.dtype", kv_dtype: str = "auto") -> int:
        """Bytes of keys and values that one token takes in all layers; dtype is float32, bfloat16 or float16."""
        in_dtype = self.head_dim * _BYTES[str(dtype).removeprefix("torch.")]
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim + _SCALE_BYTES if kv_dtype == "int8" else in_dtype)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, a tied head counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
        layer += self.attention_bias * (q + 2 * kv + self.hidden_size)
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def _unsupported(architecture: str, supported: tuple[str, ...]) -> ModelError:
    return ModelError(f"the model's architecture is {architecture}: supported is {', '.join(supported)}")


def _hf_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    if names[0] not in SUPPORTED_ARCHITECTURES and not (config.get("architectures") is None and names[0] == "llama"):
        raise _unsupported(str(names[0]), SUPPORTED_ARCHITECTURES)
    return "LlamaForCausalLM"


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling; transformers 5 writes both into `rope_parameters`, older ones into two keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    rope_type = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if (partial := rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"the model rotates {partial} of each head: partial rotary positions are not supported")
    if rope_type not in (*SUPPORTED_ROPE_TYPES, GGUF_ROPE_FACTORS):
        raise ModelError(f"the model's rope type is {rope_type!r}: supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    if rope_type == "default":
        return theta, None
    if rope_type == "linear" and not math.isfinite(float(rope.get("factor", math.nan))):
        raise ModelError("the model's rope scaling is linear but has no factor")
    return theta, {"rope_type": rope_type, **rope}


def _gguf_rope_scaling(values: Mapping[str, Any], factors: list[float] | None) -> dict[str, Any] | None:
    if factors is not None:
        return {"rope_type": GGUF_ROPE_FACTORS, "factors": factors}
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"the model's rope type is {kind!r}: supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    return {"rope_type": "linear", "factor": float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))}


def _int(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"the model's configuration has {key} = {value!r}: a whole number is needed")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, (list, tuple)) else (int(value),)
