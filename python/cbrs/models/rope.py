"""Rotary position frequencies: which scaling a checkpoint declares and what it means.

A declared scaling is applied exactly or the checkpoint is refused; it is never ignored. `dynamic`
is refused: its frequencies depend on the length that a sequence has reached, so keys already in the
cache would have to be rotated anew, and a sequence's result would depend on how it was batched.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cbrs.models.fields import Fields

_SUPPORTED = ("linear", "llama3", "yarn")
_MAX_POSITIONS = 1 << 31
# What a plain rotary setting may hold; anything else asks for a scaling.
_PLAIN_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies, with the parameters of all supported types.

    `attention_factor` multiplies both the cosine and the sine (yarn). `freq_factors` divides the
    frequencies one by one, for files that store the finished factors instead of their parameters.
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


def read_rope_scaling(fields: Fields, max_position_embeddings: int) -> RopeScaling | None:
    """Read `rope_scaling` or `rope_parameters` of a Hugging Face config; None for plain rotary."""
    key = "rope_type" if fields.get("rope_type") is not None else "type"
    kind = fields.text(key, "default")
    require_full_rotation(fields)
    _refuse_nested(fields)
    if kind == "default":
        _refuse_unused(fields, key)
        return None
    if kind == "dynamic":
        raise fields.error(
            key,
            "'dynamic' is not supported: it depends on the length reached, which a shared key "
            f"cache cannot follow; supported are {', '.join(_SUPPORTED)}",
        )
    if kind not in _SUPPORTED:
        raise fields.error(key, f"{kind!r} is not supported; supported: {', '.join(_SUPPORTED)}")
    factor = fields.number("factor", 1e-6, 1e6)
    original = fields.integer(
        "original_max_position_embeddings", 1, _MAX_POSITIONS, max_position_embeddings
    )
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low = fields.number("low_freq_factor", 1e-6, 1e6)
        high = fields.number("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            raise fields.error("high_freq_factor", f"{high:g} is not above low_freq_factor {low:g}")
        return RopeScaling("llama3", factor, original, low, high)
    return _read_yarn(fields, factor, original)


def require_full_rotation(fields: Fields) -> None:
    """Refuse a model that rotates only a part of each head."""
    if fields.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "only 1.0 is supported")


def _refuse_nested(fields: Fields) -> None:
    for key, value in fields.values.items():
        if isinstance(value, dict):
            raise fields.error(key, "rotary settings by kind of layer are not supported")


def _refuse_unused(fields: Fields, type_key: str) -> None:
    """Refuse a parameter of a scaling where no scaling would be applied."""
    for key, value in fields.values.items():
        if key not in _PLAIN_KEYS and value is not None:
            detail = f"without a scaling in {type_key}, it would have no effect; give one of "
            raise fields.error(key, detail + ", ".join(_SUPPORTED))


def _read_yarn(fields: Fields, factor: float, original: int) -> RopeScaling:
    fast = fields.number("beta_fast", 0.0, 1e6, 32.0) or 32.0
    slow = fields.number("beta_slow", 0.0, 1e6, 1.0) or 1.0
    if fast < slow:
        raise fields.error("beta_fast", f"{fast:g} is below beta_slow {slow:g}")
    attention = fields.optional_number("attention_factor", 0.0, 1e6)
    if attention is None:
        mscale = fields.number("mscale", 0.0, 1e6, 0.0)
        all_dim = fields.number("mscale_all_dim", 0.0, 1e6, 0.0)
        attention = yarn_magnitude(factor)
        if mscale and all_dim:
            attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention,
        truncate=fields.boolean("truncate", True),
    )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return the growth of the attention magnitude that yarn asks for at this factor."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Float32s:
    """Return the angle per position of each pair of dimensions, float32 `[head_dim / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain: Float32s = np.reciprocal(np.power(np.float32(theta), exponents)).astype(np.float32)
    if scaling is None:
        return plain
    if scaling.freq_factors:
        return np.divide(plain, np.asarray(scaling.freq_factors, dtype=np.float32))
    if scaling.type == "linear":
        return np.divide(plain, np.float32(scaling.factor))
    if scaling.type == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, theta, head_dim, scaling)


def _llama3(plain: Float32s, scaling: RopeScaling) -> Float32s:
    # Rotations over the original context decide: many stay as they are, few are stretched by the
    # factor, and between the two limits the frequency is blended.
    rotations = scaling.original_max_position_embeddings * plain.astype(np.float64) / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: Float32s = (plain * keep + plain / scaling.factor * (1.0 - keep)).astype(np.float32)
    return blended


def _yarn(plain: Float32s, theta: float, head_dim: int, scaling: RopeScaling) -> Float32s:
    def pair_at(rotations: float) -> float:
        """Pair of dimensions (fractional) that turns this often over the original context."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_at(scaling.beta_fast), pair_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    stretch = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    blended: Float32s = (plain / scaling.factor * stretch + plain * (1.0 - stretch)).astype(
        np.float32
    )
    return blended
