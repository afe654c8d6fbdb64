"""Qwen3: Llama with every query and key head normed before it is turned."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from cbrs.models import gguf, hf
from cbrs.models.config import ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.layers import HeadNorm, Weights
from cbrs.models.llama import LlamaForCausalLM, LlamaLayer
from cbrs.models.qwen2 import upper_windows


class Qwen3Layer(LlamaLayer):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        """Read the tensors of layer `index`."""
        super().__init__(config, weights, index)
        prefix = f"model.layers.{index}.self_attn"
        heads = config.num_heads, config.num_kv_heads
        self.head_norm = HeadNorm(weights, prefix, config.rms_norm_eps, *heads)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3, the dense models."""

    layer_class = Qwen3Layer
    gguf_names: ClassVar[dict[str, str]] = {
        **LlamaForCausalLM.gguf_names,
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(fields, "Qwen3ForCausalLM", positions=32768, head_dim=128)
        hf.refuse_true(fields, "mlp_bias")
        bias = fields.boolean("attention_bias", False)
        return replace(
            config,
            rotary=(hf.read_rotary(fields, config),) * config.num_layers,
            sliding_windows=upper_windows(fields, config.num_layers),
            attention_bias=bias,
            output_bias=bias,
        )

    @classmethod
    def config_from_gguf(cls, fields: gguf.GgufFields) -> ModelConfig:
        """Read the metadata of a GGUF file of the `qwen3` architecture."""
        config = gguf.base_config(fields, "Qwen3ForCausalLM")
        gguf.refuse_window(fields)
        return replace(config, rotary=(gguf.read_rotary(fields, config),) * config.num_layers)

    @classmethod
    def layer_tensors(cls, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of one layer."""
        yield from super().layer_tensors(config)
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
