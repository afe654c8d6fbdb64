"""SmolLM3: Llama where some layers, by default every fourth, give no positions at all."""

from dataclasses import replace

import numpy as np

from cbrs.models import gguf, hf
from cbrs.models.config import MAX_LAYERS, MAX_POSITIONS, ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.llama import LlamaForCausalLM
from cbrs.weights import Values

_THETA = 2_000_000.0
_INTERVAL = 4  # GGUF files do not say it


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3."""

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(fields, "SmolLM3ForCausalLM", positions=32768, tied=True)
        rotary = hf.read_rotary(fields, config, _THETA)
        turned = _turned_layers(fields, config.num_layers)
        bias = fields.boolean("attention_bias", False)
        return replace(
            config,
            rotary=tuple(rotary if turns else None for turns in turned),
            sliding_windows=_windows(fields, turned),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, fields: gguf.GgufFields) -> ModelConfig:
        """Read the metadata of a GGUF file of the `smollm3` architecture."""
        config = gguf.base_config(fields, "SmolLM3ForCausalLM")
        gguf.refuse_window(fields)
        rotary = gguf.read_rotary(fields, config, _THETA)
        turned = _every_but(_INTERVAL, config.num_layers)
        return replace(config, rotary=tuple(rotary if turns else None for turns in turned))

    @classmethod
    def convert_gguf(cls, config: ModelConfig, name: str, values: Values) -> Values:
        """Put query and key rows, which are stored pair by pair, half a head apart."""
        if ".q_proj." not in name and ".k_proj." not in name:
            return values
        rows = np.arange(len(values)).reshape(-1, config.head_dim // 2, 2)
        return values[rows.swapaxes(1, 2).reshape(-1)]


def _turned_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Read which layers turn queries and keys: `no_rope_layers` has a 1 for those that do."""
    interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, _INTERVAL)
    marks = fields.get("no_rope_layers")
    if marks is None:
        return _every_but(interval, num_layers)
    if not isinstance(marks, list) or len(marks) < num_layers:
        raise fields.error("no_rope_layers", f"not a list of at least {num_layers} marks")
    for mark in marks:
        if isinstance(mark, bool) or mark not in (0, 1):
            raise fields.error("no_rope_layers", f"{mark!r} is neither 0 nor 1")
    return [mark == 1 for mark in marks[:num_layers]]


def _every_but(interval: int, num_layers: int) -> list[bool]:
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _windows(fields: Fields, turned: list[bool]) -> tuple[int | None, ...]:
    """Read the windows; without `layer_types` the layers that do not turn have them."""
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    if not fields.boolean("use_sliding_window", False):
        window = None
    kinds = hf.layer_kinds(fields, len(turned))
    if kinds is None:
        kinds = tuple(hf.FULL if window is None or turns else hf.SLIDING for turns in turned)
    return hf.windows_of(fields, kinds, window)
