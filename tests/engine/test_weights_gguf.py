"""De-quantising, block by block, against the formats' definitions written out value by value."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from batchrun.engine.gguf_file import GgufFile

ROWS, BLOCKS = 3, 2


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * value for value in np.frombuffer(block[2:34], np.int8)]


def q4_0(block: bytes) -> list[float]:
    nibbles = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [half(block, 0) * (nibble - 8) for nibble in nibbles]


def q4_1(block: bytes) -> list[float]:
    nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [half(block, 0) * nibble + half(block, 2) for nibble in nibbles]


def scale_and_min(packed: bytes, j: int) -> tuple[int, int]:
    """The j-th of eight pairs of 6-bit numbers in 12 bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def q4_k(block: bytes, high_bits: bytes = b"") -> list[float]:
    scales, quants = block[4:16], block[-128:]
    values = []
    for j in range(8):
        scale, minimum = scale_and_min(scales, j)
        for i in range(32):
            quant = quants[32 * (j // 2) + i] >> 4 * (j % 2) & 15
            if high_bits:
                quant |= (high_bits[i] >> j & 1) << 4
            values.append(half(block, 0) * scale * quant - half(block, 2) * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    return q4_k(block, high_bits=block[16:48])


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    values = []
    for k in range(256):
        part, quarter, i = k // 128, k % 128 // 32, k % 32
        nibble = low[64 * part + 32 * (quarter % 2) + i] >> 4 * (quarter // 2) & 15
        quant = (nibble | (high[32 * part + i] >> 2 * quarter & 3) << 4) - 32
        values.append(half(block, 208) * int(scales[k // 16]) * quant)
    return values


# The definition, and where in a block its half-precision scales lie.
FORMATS: dict[str, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    "Q8_0": (q8_0, (0,)),
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_random_blocks_mean_what_the_format_says(name: str, tmp_path: Path) -> None:
    definition, scales = FORMATS[name]
    kind = gguf.GGMLQuantizationType[name]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(0)
    data = draw.integers(0, 256, (ROWS, BLOCKS, block_bytes), dtype=np.uint8)
    for at in scales:
        data[..., at : at + 2] = draw.uniform(0.01, 1, (ROWS, BLOCKS, 1)).astype("<f2").view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(block_values * BLOCKS)
    writer.add_feed_forward_length(ROWS)
    writer.add_head_count(2)
    writer.add_vocab_size(4)
    writer.add_tensor("blk.0.ffn_up.weight", data.reshape(ROWS, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = np.array([[value for block in row for value in definition(block.tobytes())] for row in data])
    read = GgufFile(tmp_path / "one.gguf").array("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_allclose(read, expected, rtol=1e-5, atol=1e-5)
