"""Reading of a Hugging Face `config.json`: the parts that architectures share.

A key that is absent or null gives the default that the architecture has in the reference.
"""

from typing import Any

from cbrs.models.config import (
    ACTIVATIONS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    Heads,
    ModelConfig,
)
from cbrs.models.fields import Fields
from cbrs.models.rope import Rotary
from cbrs.models.rope_config import read_scaling, require_full_rotation

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as `layer_types` names them."""


def base_config(
    fields: Fields,
    architecture: str,
    *,
    positions: int,
    tied: bool = False,
    eps: float = 1e-6,
    head_dim: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> ModelConfig:
    """Read what every architecture has, all but `rotary`; no layer has a window, nothing a bias.

    The keyword arguments are the architecture's defaults; `activation` is the key and its default.
    """
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    heads = Heads.read(fields, "hidden_size", "num_attention_heads", "num_key_value_heads")
    head_dim = heads.head_dim(fields, "head_dim", head_dim)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    bos = fields.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=heads.width,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, eps),
        max_position_embeddings=fields.integer(
            "max_position_embeddings", 1, MAX_POSITIONS, positions
        ),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tied),
        sliding_windows=(None,) * num_layers,
        hidden_act=_activation(fields, *activation),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
    )


def rope_fields(fields: Fields) -> Fields:
    """Return the rotary settings: `rope_parameters` (newer) or `rope_scaling` (older), or none."""
    given: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(key, f"{value!r} is not an object")
        if given and value != given:
            raise fields.error(key, "differs from rope_parameters, which is given as well")
        given = value
    return Fields(given, fields.file)


def read_theta(fields: Fields, default: float, key: str = "rope_theta") -> float:
    """Read the base of the rotary frequencies."""
    return fields.number(key, 1.001, 1e12, default)


def read_rotary(fields: Fields, config: ModelConfig, theta: float = 10000.0) -> Rotary:
    """Read rotary settings that hold for whole heads; `theta` is the architecture's default."""
    require_full_rotation(fields)
    rope = rope_fields(fields)
    scaling = read_scaling(rope, config.max_position_embeddings)
    return Rotary(read_theta(rope, read_theta(fields, theta)), config.head_dim, scaling)


def same_windows(
    fields: Fields, num_layers: int, default: int | None = None
) -> tuple[int | None, ...]:
    """Read `sliding_window`, one for all layers; `default` stands for an absent key, not null."""
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    if "sliding_window" not in fields.values:
        window = default
    wanted = FULL if window is None else SLIDING
    kinds = layer_kinds(fields, num_layers)
    if kinds is not None and set(kinds) != {wanted}:
        raise fields.error("layer_types", f"only {wanted!r} for every layer fits sliding_window")
    return (window,) * num_layers


def layer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """Read `layer_types`, the kind of each layer; None when it is absent."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"not a list of {num_layers} kinds, one a layer")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise fields.error("layer_types", f"{kind!r} is not supported; {FULL}, {SLIDING} are")
    return tuple(kinds)


def windows_of(
    fields: Fields, kinds: tuple[str, ...], window: int | None
) -> tuple[int | None, ...]:
    """Give sliding layers `window`; without one there must be none."""
    if window is None and SLIDING in kinds:
        raise fields.error("layer_types", f"{SLIDING!r}, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def refuse_true(fields: Fields, *keys: str) -> None:
    """Refuse settings that the architecture has no place for."""
    for key in keys:
        if fields.boolean(key, False):
            raise fields.error(key, "true is not supported for this architecture")


def _activation(fields: Fields, key: str, default: str) -> str:
    name = fields.text(key, default)
    if name not in ACTIVATIONS:
        raise fields.error(key, f"{name!r} is not supported; only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
