"""Reading of rotary settings: which scaling a checkpoint declares.

`dynamic` is refused: its frequencies depend on the length that a sequence has reached, so keys
already in the cache would have to be rotated anew, and a sequence's result would depend on how it
was batched.
"""

from cbrs.models.fields import Fields
from cbrs.models.rope import RopeScaling, yarn_magnitude

_SUPPORTED = ("linear", "llama3", "yarn")
_MAX_POSITIONS = 1 << 31
# What a plain rotary setting may hold; anything else asks for a scaling.
_PLAIN_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def rope_type(fields: Fields) -> tuple[str, str]:
    """Return the key that names the kind of a rotary setting, and the kind."""
    key = "rope_type" if fields.get("rope_type") is not None else "type"
    return key, fields.text(key, "default")


def read_scaling(fields: Fields, max_position_embeddings: int) -> RopeScaling | None:
    """Read `rope_scaling` or `rope_parameters` of a Hugging Face config; None for plain rotary."""
    key, kind = rope_type(fields)
    require_full_rotation(fields)
    _refuse_nested(fields)
    if kind == "default":
        refuse_unused(fields)
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


def refuse_unused(fields: Fields) -> None:
    """Refuse a parameter of a scaling where no scaling would be applied."""
    type_key, _ = rope_type(fields)
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
