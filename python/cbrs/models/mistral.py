"""Mistral: Llama with a sliding window in every layer and no biases."""

from dataclasses import replace

from cbrs.models import hf
from cbrs.models.config import ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.llama import LlamaForCausalLM

_DEFAULT_WINDOW = 4096
"""What the reference takes when a config does not say; null is no window."""


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral. Its GGUF files are of the `llama` architecture."""

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(fields, "MistralForCausalLM", positions=4096 * 32)
        hf.refuse_true(fields, "attention_bias", "mlp_bias")
        return replace(
            config,
            rotary=(hf.read_rotary(fields, config),) * config.num_layers,
            sliding_windows=hf.same_windows(fields, config.num_layers, _DEFAULT_WINDOW),
        )
