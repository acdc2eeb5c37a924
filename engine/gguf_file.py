"""Reading a GGUF file: metadata, config, and tensors under Hugging Face's names and in its row order."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchrun.engine.config import ModelConfig
from batchrun.engine.errors import ModelError

if TYPE_CHECKING:
    import torch

SUPPORTED_QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_OUTSIDE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NOT_WEIGHTS = ("rope_freqs.weight",)


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor of a Llama model; None for one that is not a weight.

    Raises:
        ModelError: a tensor that a Llama model does not have.
    """
    if name in _NOT_WEIGHTS:
        return None
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE_NAMES:
        return f"{_OUTSIDE_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    raise ModelError(f"the model has a tensor {name!r}, which a plain Llama model does not have: it is not supported")


def unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order of q and k in a GGUF file of a Llama model.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head's dimensions, Hugging Face pairs (i, i + head_dim / 2); its
    converter therefore interleaves the two halves of each head. rows is [num_heads * head_dim, ...]; the result is new.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class GgufFile:
    """An open GGUF file; a `weights.TensorSource` that de-quantises each tensor to float32 as it is asked for."""

    def __init__(self, path: Path) -> None:
        """Takes seconds: the `gguf` package walks the whole vocabulary in Python.

        Raises:
            ModelError: not a GGUF file, cut, or of an unsupported architecture, quantisation or tensor.
        """
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
            # Values are read in the middle of an error path too: a cut file fails in many ways.
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise ModelError(f"{path} cannot be read as GGUF ({error}): is it cut? Fetch it again") from error
        if (parts := self.metadata.get("split.count", 0)) > 1:
            raise ModelError(f"{path} is one of {parts} parts: join them into one file first (llama.cpp's gguf-split --merge)")
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        factors = self._stored.get("rope_freqs.weight")
        rope_factors = None if factors is None else [float(value) for value in np.asarray(factors.data).ravel()]
        self.config = ModelConfig.from_gguf(self.metadata, self._stored.keys(), rope_factors)
        self._names: dict[str, str] = {}
        for name, tensor in self._stored.items():
            if (kind := tensor.tensor_type.name) not in SUPPORTED_QUANTISATIONS:
                raise ModelError(f"{path}: tensor {name} is {kind}; supported are {', '.join(SUPPORTED_QUANTISATIONS)}")
            if (translated := hf_name(name)) is not None:
                self._names[translated] = name

    def names(self) -> Collection[str]:
        """Hugging Face's names of all weights."""
        return self._names.keys()

    def get(self, name: str) -> "torch.Tensor":
        """One weight, float32.

        Raises:
            ModelError: the file has no such weight.
        """
        import torch

        return torch.from_numpy(self.array(name))

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """One weight by Hugging Face's name, float32, a fresh array."""
        from gguf.quants import dequantize

        if name not in self._names:
            raise ModelError(f"{self.path} has no tensor for {name}: it is not a whole Llama model")
        stored = self._stored[self._names[name]]
        values = dequantize(stored.data, stored.tensor_type)
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            return unpermute(values, heads)
        return values if values.flags.owndata else np.array(values)
