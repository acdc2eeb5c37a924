"""The counter-based generator against its authors' published answers and numpy's relative of it."""

import numpy as np
import pytest

from batchrun.engine.philox import philox4x32, uniforms


def words(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.uint32)


# "philox4x32 10" of kat_vectors in DEShawResearch/random123: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert philox4x32(words(*counter), words(*key))[0].tolist() == list(answer)


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    counter = generator.integers(0, 2**32, (50, 4), dtype=np.uint32)
    key = generator.integers(0, 2**32, (50, 2), dtype=np.uint32)
    together = philox4x32(counter, key)
    assert all(np.array_equal(together[i], philox4x32(counter[i : i + 1], key[i : i + 1])[0]) for i in range(50))


def test_uniforms_are_the_first_64_bits_and_below_one() -> None:
    (counter, key, answer) = KNOWN_ANSWERS[0]
    expected = ((answer[1] << 32 | answer[0]) >> 11) / 2**53
    assert uniforms(words(*counter), words(*key)).tolist() == [expected]
    # The largest 53-bit value still lies below 1.
    assert (2**53 - 1) / 2**53 < 1.0


def test_uniforms_of_consecutive_counters_are_uniform() -> None:
    counter = np.zeros((100_000, 4), np.uint32)
    counter[:, 3] = np.arange(100_000)
    drawn = uniforms(counter, np.zeros((100_000, 2), np.uint32))
    counts = np.bincount((drawn * 64).astype(int), minlength=64)
    chi_square = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
    assert 32 < chi_square < 104  # 63 degrees of freedom: one in a thousand on either side
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.012
