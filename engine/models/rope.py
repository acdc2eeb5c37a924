"""Rotary position tables: the angles' cosines and sines, with the scalings that Llama models use."""

import math

import torch

from batchrun.engine.config import GGUF_ROPE_FACTORS, ModelConfig
from batchrun.engine.errors import ModelError


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position of each pair of dimensions, scaled as the config says.

    linear divides all by a factor; llama3 (Meta's Llama 3.1 reference code) divides those of long wavelength, keeps
    those of short, and blends in between; factors divides each by its own.

    Raises:
        ModelError: the scaling lacks a parameter.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    try:
        if scaling["rope_type"] == "linear":
            return frequencies / float(scaling["factor"])
        if scaling["rope_type"] == GGUF_ROPE_FACTORS:
            return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
        factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        trained = float(scaling["original_max_position_embeddings"])
    except KeyError as error:
        raise ModelError(f"the model's rope scaling has no {error.args[0]}") from error
    wavelengths = 2 * math.pi / frequencies
    smooth = (trained / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    slowed = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    between = (wavelengths <= trained / low) & (wavelengths >= trained / high)
    return torch.where(between, blended, slowed)


def rotary_table(config: ModelConfig, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [max_context, head_dim], both halves alike; taken in float32, rounded to dtype as transformers does."""
    positions = torch.arange(config.max_context, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config)).repeat(1, 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
