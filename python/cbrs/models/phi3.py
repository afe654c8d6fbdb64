"""Phi-3: Llama whose checkpoints store q, k, v as one matrix, and gate and up as another.

Some of its models turn only a part of each head, or stretch the frequencies ("longrope"). Those
have two sets of divisors: short, for sequences up to the original context, and long, for longer
ones. A sequence that crosses over would have to be computed anew, so cbrs takes the short set and
the original context.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from cbrs.models import gguf, hf
from cbrs.models.config import MAX_POSITIONS, ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.llama import LlamaForCausalLM, LlamaLayer
from cbrs.models.rope import RopeScaling, Rotary
from cbrs.models.rope_config import refuse_unused, rope_type

logger = logging.getLogger("cbrs")

_LONGROPE = ("longrope", "su", "yarn")  # the last two are older names, in Phi-3 only
_LONGROPE_KEYS = (
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
    "factor",
    "attention_factor",
    "original_max_position_embeddings",
)
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


class Phi3Layer(LlamaLayer):
    """One decoder layer."""

    qkv_names = ("qkv_proj",)
    gate_up_names = ("gate_up_proj",)


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3, Phi-3.5 and the text models of Phi-4."""

    layer_class = Phi3Layer
    gguf_names: ClassVar[dict[str, str]] = {
        **LlamaForCausalLM.gguf_names,
        "self_attn.qkv_proj": "attn_qkv",
        "mlp.gate_up_proj": "ffn_up",
    }
    gguf_factors: ClassVar[tuple[str, ...]] = (_SHORT, _LONG)

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(fields, "Phi3ForCausalLM", positions=4096, eps=1e-5)
        hf.refuse_true(fields, "attention_bias", "mlp_bias")
        rope = hf.rope_fields(fields)
        key, kind = rope_type(rope)
        original = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS, 4096)
        scaling = None
        if kind == "default":
            refuse_unused(rope)
        elif kind not in _LONGROPE:
            raise rope.error(key, f"{kind!r} is not supported; only {', '.join(_LONGROPE)}")
        dim = _turned(rope, fields, config.head_dim)
        if kind != "default":
            scaling = _read_longrope(rope, dim, original, config.max_position_embeddings)
            config = _within(config, original, fields)
        rotary = Rotary(hf.read_theta(rope, hf.read_theta(fields, 10000.0)), dim, scaling)
        return replace(
            config,
            rotary=(rotary,) * config.num_layers,
            sliding_windows=hf.same_windows(fields, config.num_layers),
        )

    @classmethod
    def config_from_gguf(cls, fields: gguf.GgufFields) -> ModelConfig:
        """Read the metadata of a GGUF file of the `phi3` architecture."""
        config = gguf.base_config(fields, "Phi3ForCausalLM")
        if fields.text("rope.scaling.type", "none") != "none":
            raise fields.error("rope.scaling.type", "is not supported in phi3 files")
        dim = fields.integer("rope.dimension_count", 2, config.head_dim, config.head_dim)
        if dim % 2:
            raise fields.error("rope.dimension_count", f"{dim} is odd; pairs are needed")
        scaling = None
        if fields.tensor_names & {_SHORT, _LONG}:
            original = fields.integer("rope.scaling.original_context_length", 1, MAX_POSITIONS)
            magnitude = fields.number("rope.scaling.attn_factor", 0.0, 1e6)
            factors = fields.factors(_SHORT, dim // 2)
            fields.factors(_LONG, dim // 2)
            scaling = RopeScaling("longrope", attention_factor=magnitude, freq_factors=factors)
            config = _within(config, original, fields)
        elif fields.number("rope.scaling.attn_factor", 0.0, 1e6, 1.0) != 1.0:
            raise fields.error("rope.scaling.attn_factor", f"given without {_SHORT}")
        # 0 is no window; files that say nothing are older than the key, not without a window.
        window = fields.integer("attention.sliding_window", 0, MAX_POSITIONS) or None
        return replace(
            config,
            rotary=(Rotary(gguf.read_theta(fields, 10000.0), dim, scaling),) * config.num_layers,
            sliding_windows=(window,) * config.num_layers,
        )

    @classmethod
    def layer_tensors(cls, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of one layer."""
        width, hidden = config.hidden_size, config.intermediate_size
        query = config.num_heads * config.head_dim
        grouped = config.num_kv_heads * config.head_dim
        yield "input_layernorm.weight", (width,)
        yield "post_attention_layernorm.weight", (width,)
        yield "self_attn.qkv_proj.weight", (query + 2 * grouped, width)
        yield "self_attn.o_proj.weight", (width, query)
        yield "mlp.gate_up_proj.weight", (2 * hidden, width)
        yield "mlp.down_proj.weight", (width, hidden)


def _turned(rope: Fields, fields: Fields, head_dim: int) -> int:
    """Read how many dimensions of a head turn."""
    outer = fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    part = rope.number("partial_rotary_factor", 0.0, 1.0, outer)
    dim = int(head_dim * part)
    if dim < 2 or dim % 2:
        detail = f"{part:g} of {head_dim} dimensions is {dim}; an even number is needed"
        raise fields.error("partial_rotary_factor", detail)
    return dim


def _read_longrope(rope: Fields, dim: int, original: int, positions: int) -> RopeScaling:
    """Read the short divisors and the magnitude; the long ones must be there and of this size."""
    for key, value in rope.values.items():
        if key not in _LONGROPE_KEYS and value is not None:
            raise rope.error(key, "is not supported for longrope")
    # The outer key is the one that counts in the reference.
    if rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS, original) != original:
        raise rope.error(
            "original_max_position_embeddings", f"differs from the config's {original}"
        )
    short, _ = (_factors(rope, key, dim // 2) for key in ("short_factor", "long_factor"))
    factor = rope.number("factor", 1e-6, 1e6, positions / original)
    magnitude = 1.0
    if factor > 1.0 and original > 1:
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original))
    magnitude = rope.number("attention_factor", 0.0, 1e6, magnitude)
    return RopeScaling("longrope", attention_factor=magnitude, freq_factors=short)


def _factors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise rope.error(key, f"not a list of {count} divisors, one for each pair that turns")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise rope.error(key, f"{value!r} is not a divisor from 0 to 1e9")
    return tuple(float(value) for value in values)


def _within(config: ModelConfig, original: int, fields: Fields) -> ModelConfig:
    """Keep the context to the positions that the short divisors are for."""
    if config.max_position_embeddings <= original:
        return config
    logger.warning(
        "%s: the context is %d of %d positions: longrope beyond the original context is not "
        "supported, since it would change the keys of sequences that are already cached",
        fields.file,
        original,
        config.max_position_embeddings,
    )
    return replace(config, max_position_embeddings=original)
