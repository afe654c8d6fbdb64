"""Qwen2: Llama with biases on queries, keys and values, and windows in its upper layers."""

from dataclasses import replace

from cbrs.models import gguf, hf
from cbrs.models.config import MAX_LAYERS, MAX_POSITIONS, ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5."""

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(fields, "Qwen2ForCausalLM", positions=32768)
        hf.refuse_true(fields, "mlp_bias")
        return replace(
            config,
            rotary=(hf.read_rotary(fields, config),) * config.num_layers,
            sliding_windows=upper_windows(fields, config.num_layers),
            attention_bias=True,
        )

    @classmethod
    def config_from_gguf(cls, fields: gguf.GgufFields) -> ModelConfig:
        """Read the metadata of a GGUF file of the `qwen2` architecture."""
        config = gguf.base_config(fields, "Qwen2ForCausalLM")
        gguf.refuse_window(fields)
        rotary = gguf.read_rotary(fields, config)
        return replace(config, rotary=(rotary,) * config.num_layers, attention_bias=True)


def upper_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Read the windows of Qwen models: off unless `use_sliding_window`.

    Without `layer_types` the layers from `max_window_layers` on have the window.
    """
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    if "sliding_window" not in fields.values:
        window = 4096
    if not fields.boolean("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
    kinds = hf.layer_kinds(fields, num_layers)
    if kinds is None:
        sliding = 0 if window is None else max(0, num_layers - first)
        kinds = (hf.FULL,) * (num_layers - sliding) + (hf.SLIDING,) * sliding
    return hf.windows_of(fields, kinds, window)
