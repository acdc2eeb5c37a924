"""The one decoder: a Llama-shaped transformer whose every size and switch comes from ModelConfig."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchrun.engine.config import ModelConfig
from batchrun.engine.errors import ModelError
from batchrun.engine.models.rope import rotary_table
from batchrun.engine.weights import TensorSource
from batchrun.kernels import ops


class Linear:
    """A weight as the kernels want it, and its bias where the model has one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = ops.pack_linear(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out], of x's dtype."""
        y = ops.linear(x, self._weight)
        return y if self._bias is None else y + self._bias


def gated_layer(gate_up: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """[T, in] -> silu(gate) * up [T, I], from the gate's weight above the other half's and their biases where there are any."""
    if bias is None:
        weight = ops.pack_gated_linear(gate_up)
        return lambda x: ops.gated_linear(x, weight)
    layer = Linear(gate_up, bias)
    return lambda x: ops.silu_mul(layer(x))


class Layer(NamedTuple):
    """The weights of one layer; q, k, v are one matrix, gate and up are one."""

    attention_norm: torch.Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: torch.Tensor
    gated: Callable[[torch.Tensor], torch.Tensor]
    down: Linear


class WeightReader:
    """Reads tensors of known shape into the compute type, refusing what does not fit the config."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: str) -> None:
        self._source, self._dtype, self._device = source, dtype, device

    def stack(self, names: list[str], shapes: list[tuple[int, ...]]) -> torch.Tensor:
        """The named tensors below each other; a fresh tensor, so that no file stays mapped for it.

        Raises:
            ModelError: a tensor is missing or has another shape.
        """
        rows = sum(shape[0] for shape in shapes)
        result = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            tensor = self._source.get(name)
            if tuple(tensor.shape) != shape:
                raise ModelError(f"the model's tensor {name} is {list(tensor.shape)}: its configuration says {list(shape)}")
            result[start : start + shape[0]] = tensor
            start += shape[0]
        return result

    def matrix(
        self, names: list[str], out_sizes: list[int], in_size: int, biased: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One matrix [sum of out_sizes, in_size] from `NAME.weight` of each name, and `NAME.bias` of each where biased."""
        weight = self.stack([f"{name}.weight" for name in names], [(size, in_size) for size in out_sizes])
        return weight, self.stack([f"{name}.bias" for name in names], [(size,) for size in out_sizes]) if biased else None


class Decoder:
    """Token ids, positions and KV slots in; logits out. It owns the weights, never the KV pool.

    Weights, activations and keys have one dtype (float32, bfloat16, float16); the residual stream too, as in transformers.
    """

    @torch.inference_mode()
    def __init__(self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: str) -> None:
        """Read the weights from source, layer by layer.

        Raises:
            ModelError: a tensor is missing or has another shape than the config says.
        """
        self.config, self.dtype, self.device = config, dtype, device
        read = WeightReader(source, dtype, device)
        embedding = (config.vocab_size, config.hidden_size)
        self._embedding = read.stack(["model.embed_tokens.weight"], [embedding])
        self._layers = [self._read_layer(read, f"model.layers.{number}") for number in range(config.num_layers)]
        self._final_norm = read.stack(["model.norm.weight"], [(config.hidden_size,)])
        self._head = Linear(self._embedding if config.tie_embeddings else read.stack(["lm_head.weight"], [embedding]), None)
        self._cos, self._sin = rotary_table(config, dtype, device)

    def _read_layer(self, read: WeightReader, prefix: str) -> Layer:
        config, hidden = self.config, self.config.hidden_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv_names = [f"{attention}.{name}_proj" for name in "qkv"]
        gate_up_names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return Layer(
            attention_norm=read.stack([f"{prefix}.input_layernorm.weight"], [(hidden,)]),
            qkv=Linear(*read.matrix(qkv_names, [q, kv, kv], hidden, config.attention_bias)),
            attention_out=Linear(*read.matrix([f"{attention}.o_proj"], [hidden], q, config.attention_bias)),
            mlp_norm=read.stack([f"{prefix}.post_attention_layernorm.weight"], [(hidden,)]),
            gated=gated_layer(*read.matrix(gate_up_names, [config.intermediate_size] * 2, hidden, config.mlp_bias)),
            down=Linear(*read.matrix([f"{mlp}.down_proj"], [hidden], config.intermediate_size, config.mlp_bias)),
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Any,
        plan: Any,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step's tokens: their keys and values go into the pool, the logits of some of them come back.

        Args:
            token_ids, positions, slots: int64 [T] on the model's device; positions below config.max_context; a slot is
                where the token's keys and values lie in the pool.
            kv: the pool of `kernels.ops.allocate_kv`; written at `slots`, in every layer.
            plan: of `kernels.ops.build_plan`, which keys each token sees.
            logit_rows: int64 [L], which of the T tokens need logits.

        Returns:
            [L, vocab] in the model's dtype, contiguous; [0, vocab] for none.
        """
        config = self.config
        cos, sin = ops.gather(self._cos, positions), ops.gather(self._sin, positions)
        residual = ops.gather(self._embedding, token_ids)
        normed = ops.rms_norm(residual, self._layers[0].attention_norm, config.rms_norm_eps)
        last = config.num_layers - 1
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(normed).view(len(token_ids), -1, config.head_dim)
            q = ops.rotate_and_write(kv, number, qkv, cos, sin, slots)
            if number == last and not len(logit_rows):
                return torch.empty((0, config.vocab_size), dtype=self.dtype, device=self.device)
            attended = ops.attend(kv, number, q, plan).reshape(len(token_ids), config.num_heads * config.head_dim)
            if number == last:  # from here on nothing is kept but the logits
                attended, residual = ops.gather(attended, logit_rows), ops.gather(residual, logit_rows)
            normed, residual = ops.rms_norm_residual(layer.attention_out(attended), residual, layer.mlp_norm, config.rms_norm_eps)
            mlp = layer.down(layer.gated(normed))
            following = self._final_norm if number == last else self._layers[number + 1].attention_norm
            normed, residual = ops.rms_norm_residual(mlp, residual, following, config.rms_norm_eps)
        return self._head(normed)
