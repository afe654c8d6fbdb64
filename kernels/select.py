"""Finding the largest few of a row without sorting it: shared by sampling and log-probabilities.

A row is read once for its largest number, and once more to count what lies above a few depths below
it. If a depth has all that can matter and not too much, what lies above it is copied together, in
the order of the ids, and the rest of the work is done there: on a few thousand numbers, that stay
close. If not (a flat distribution), it is done on the whole row, only slower. Thresholds are found
by halving the interval between two numbers' bits until it has one of them, or as many as wanted
(as with the pivots of FlashInfer: Ye et al., "FlashInfer", 2025).

The same row gives the same answer whatever batch it is in: nothing depends on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

DEPTHS = tl.constexpr((3.0, 6.0, 9.0, 12.0))
"""Depths in units of the temperature: e^-3 to e^-12 of the largest weight."""

CAPACITY = 4096
"""Candidates that are copied together at most; a multiple of the tiles they are read in."""

_LAST_ID = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-2139095041)
"""The key of minus infinity."""

ALL = tl.constexpr(0x7FFFFFFF)
"""Room for every number that equals a threshold."""


@triton.jit
def key_of(number):
    """Return int32 keys in the order of float32 numbers without NaN; both zeros are equal."""
    bits = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def largest_of(row_ptr, size, BLOCK: tl.constexpr):
    """Return the largest number and the lowest index that has it; infinity if there is a NaN."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_index = lane
    for start in range(0, size, BLOCK):
        number = tl.load(row_ptr + start + lane, mask=start + lane < size, other=float("-inf"))
        number = tl.where(number != number, float("inf"), number)
        best_index = tl.where(number > best, start + lane, best_index)
        best = tl.maximum(best, number)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, best_index, _LAST_ID), 0)


@triton.jit
def weight_of(number, largest, temperature):
    """Return e^((number - largest) / temperature)."""
    return tl.exp((number - largest) / temperature)


@triton.jit
def profile(row_ptr, size, largest, temperature, BLOCK: tl.constexpr):
    """Return the sum of the weights, and counts and sums of those above each of `DEPTHS`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    mass_0 = tl.zeros([BLOCK], tl.float32)
    mass_1 = tl.zeros([BLOCK], tl.float32)
    mass_2 = tl.zeros([BLOCK], tl.float32)
    mass_3 = tl.zeros([BLOCK], tl.float32)
    count_0 = tl.zeros([BLOCK], tl.int32)
    count_1 = tl.zeros([BLOCK], tl.int32)
    count_2 = tl.zeros([BLOCK], tl.int32)
    count_3 = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        number = tl.load(row_ptr + start + lane, mask=start + lane < size, other=float("-inf"))
        weight = weight_of(number, largest, temperature)
        total += weight
        above = number >= largest - temperature * DEPTHS[0]
        count_0 += above.to(tl.int32)
        mass_0 += tl.where(above, weight, 0.0)
        above = number >= largest - temperature * DEPTHS[1]
        count_1 += above.to(tl.int32)
        mass_1 += tl.where(above, weight, 0.0)
        above = number >= largest - temperature * DEPTHS[2]
        count_2 += above.to(tl.int32)
        mass_2 += tl.where(above, weight, 0.0)
        above = number >= largest - temperature * DEPTHS[3]
        count_3 += above.to(tl.int32)
        mass_3 += tl.where(above, weight, 0.0)
    return (
        tl.sum(total, 0),
        tl.sum(count_0, 0),
        tl.sum(count_1, 0),
        tl.sum(count_2, 0),
        tl.sum(count_3, 0),
        tl.sum(mass_0, 0),
        tl.sum(mass_1, 0),
        tl.sum(mass_2, 0),
        tl.sum(mass_3, 0),
    )


@triton.jit
def collect(row_ptr, size, cut, number_ptr, index_ptr, BLOCK: tl.constexpr):
    """Copy the numbers of at least `cut`, and their indices, in order; return how many."""
    lane = tl.arange(0, BLOCK)
    found = 0
    for start in range(0, size, BLOCK):
        number = tl.load(row_ptr + start + lane, mask=start + lane < size, other=float("-inf"))
        above = (number >= cut) & (start + lane < size)
        place = found + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(number_ptr + place, number, mask=above)
        tl.store(index_ptr + place, start + lane, mask=above)
        found += tl.sum(above.to(tl.int32), 0)
    tl.debug_barrier()  # what one thread wrote, others read
    return found


@triton.jit
def count_from(row_ptr, size, threshold, BLOCK: tl.constexpr):
    """Return how many keys are at least `threshold`."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        number = tl.load(row_ptr + start + lane, mask=inside, other=float("-inf"))
        count += (inside & (key_of(number) >= threshold)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_from(row_ptr, size, threshold, largest, temperature, BLOCK: tl.constexpr):
    """Return count and sum of the weights (float64) of the keys that are at least `threshold`."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        number = tl.load(row_ptr + start + lane, mask=inside, other=float("-inf"))
        above = inside & (key_of(number) >= threshold)
        count += above.to(tl.int32)
        mass += tl.where(above, weight_of(number, largest, temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0).to(tl.float64)


@triton.jit
def middle(low, high):
    """Return the number halfway between two int32 numbers, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def threshold_of_count(row_ptr, size, wanted, largest, BLOCK: tl.constexpr):
    """Return a key, and how many that equal it, so that with those above it they are `wanted`.

    If there are fewer numbers, all are.
    """
    low, high = LOWEST, key_of(largest) + 1
    count_low, count_high = size, 0
    # `low` has at least as many as wanted, `high` has fewer.
    while (count_low > wanted) & (middle(low, high) > low):
        probe = middle(low, high)
        count = count_from(row_ptr, size, probe, BLOCK)
        is_enough = count >= wanted
        low, high = tl.where(is_enough, probe, low), tl.where(is_enough, high, probe)
        count_low = tl.where(is_enough, count, count_low)
        count_high = tl.where(is_enough, count_high, count)
    room = wanted - count_high
    return low, tl.where(count_low <= wanted, ALL, room)


@triton.jit
def threshold_of_mass(
    row_ptr, size, target, floor, room_at_floor, largest, temperature, BLOCK: tl.constexpr
):
    """Return a key and room for its equals: the fewest largest whose weights reach `target`.

    Nothing below `floor` counts, and of its equals only `room_at_floor`. `target` is float64.
    """
    low, high = floor, key_of(largest) + 1
    count_low, _mass_low = mass_from(row_ptr, size, low, largest, temperature, BLOCK)
    count_high = 0
    mass_high = target * 0.0
    # Both stand for what is at least their key: `high` does not reach the target.
    while (count_low - count_high > 1) & (middle(low, high) > low):
        probe = middle(low, high)
        count, mass = mass_from(row_ptr, size, probe, largest, temperature, BLOCK)
        is_enough = mass >= target
        low, high = tl.where(is_enough, probe, low), tl.where(is_enough, high, probe)
        count_low = tl.where(is_enough, count, count_low)
        count_high = tl.where(is_enough, count_high, count)
        mass_high = tl.where(is_enough, mass_high, mass)
    bits = tl.where(low < 0, low ^ 0x7FFFFFFF, low)
    weight = weight_of(bits.to(tl.float32, bitcast=True), largest, temperature).to(tl.float64)
    # A weight so small that it is 0 does not bring the target nearer: then all of them stay.
    missing = (target - mass_high) / tl.where(weight > 0.0, weight, 1.0)
    room = tl.minimum(tl.maximum(tl.ceil(missing), 1.0), 1073741824.0).to(tl.int32)
    is_single = count_low - count_high <= 1
    room = tl.where((weight > 0.0) & ~is_single, room, ALL)
    return low, tl.where(low == floor, tl.minimum(room, room_at_floor), room)
