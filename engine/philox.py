"""Philox4x32-10, a counter-based random generator: the same key and counter give the same words, whatever came before.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), checked against the known
answers that its authors publish with Random123.
"""

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: UInt32, key: UInt32) -> UInt32:
    """Four random words for each counter.

    Args:
        counter: uint32 [N, 4].
        key: uint32 [N, 2].

    Returns:
        uint32 [N, 4]; each row depends on its own counter and key alone.
    """
    # 64-bit lanes hold 32-bit words, so that a product's halves are a shift and a mask.
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(counter: UInt32, key: UInt32) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) for each counter, float64 [N], from the block's first 64 bits (53 of them are used)."""
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 1] << _SHIFT) | words[:, 0]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
