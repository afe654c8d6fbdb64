"""Philox4x32-10: random numbers by position instead of by order.

A number depends on its key and counter only (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", 2011). A token's draw therefore stays the same however requests are
batched, preempted or resumed.
"""

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(
    counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[UInt64s, UInt64s]
) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
    """Return four 32-bit words per element; all arguments hold 32-bit words in uint64 `[n]`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _WORD) ^ c1 ^ k0,
            second & _LOW,
            (first >> _WORD) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: UInt64s,
    positions: npt.NDArray[np.int32],
    choices: npt.NDArray[np.int32],
    draw: int = 0,
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per element, a multiple of 2^-53.

    The key is the seed; the counter is (position, choice, draw, 0). All arrays are `[n]`.
    """
    zero = np.zeros(len(seeds), dtype=np.uint64)
    counter = (
        positions.astype(np.uint64) & _LOW,
        choices.astype(np.uint64) & _LOW,
        zero + np.uint64(draw),
        zero,
    )
    high, low, _, _ = philox4x32(counter, (seeds & _LOW, seeds >> _WORD))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
