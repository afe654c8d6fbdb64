"""Rotary position frequencies: the scalings and what they mean.

A declared scaling is applied exactly or the checkpoint is refused; it is never ignored.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies, with the parameters of all supported types.

    `attention_factor` multiplies both the cosine and the sine (yarn, longrope). `freq_factors`
    divides the frequencies one by one (longrope, and files that store the finished factors).
    """

    type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Rotary:
    """How a layer turns queries and keys: the first `dim` dimensions of each head, by position.

    `theta` is the base of the frequencies.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the growth of the attention magnitude that yarn asks for at this factor."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rotary: Rotary) -> Float32s:
    """Return the angle per position of each pair of dimensions, float32 `[dim / 2]`."""
    scaling = rotary.scaling
    exponents = np.arange(0, rotary.dim, 2, dtype=np.float32) / np.float32(rotary.dim)
    power = np.power(np.float32(rotary.theta), exponents)
    plain: Float32s = np.reciprocal(power).astype(np.float32)
    if scaling is None:
        return plain
    if scaling.freq_factors:
        return np.divide(plain, np.asarray(scaling.freq_factors, dtype=np.float32))
    if scaling.type == "linear":
        return np.divide(plain, np.float32(scaling.factor))
    if scaling.type == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, rotary.theta, rotary.dim, scaling)


def _llama3(plain: Float32s, scaling: RopeScaling) -> Float32s:
    # Rotations over the original context decide: many stay as they are, few are stretched by the
    # factor, and between the two limits the frequency is blended.
    rotations = scaling.original_max_position_embeddings * plain.astype(np.float64) / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: Float32s = (plain * keep + plain / scaling.factor * (1.0 - keep)).astype(np.float32)
    return blended


def _yarn(plain: Float32s, theta: float, dim: int, scaling: RopeScaling) -> Float32s:
    def pair_at(rotations: float) -> float:
        """Pair of dimensions (fractional) that turns this often over the original context."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_at(scaling.beta_fast), pair_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = np.arange(dim // 2, dtype=np.float64)
    stretch = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    blended: Float32s = (plain / scaling.factor * stretch + plain * (1.0 - stretch)).astype(
        np.float32
    )
    return blended
