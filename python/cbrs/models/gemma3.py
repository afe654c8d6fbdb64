"""Gemma 3, the text model.

Beyond Llama: embeddings are scaled by the square root of the width, every query and key head is
normed, attention and MLP are normed before and after, the MLP uses GELU, and most layers see a
window only and turn queries and keys by frequencies of their own.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cbrs.models import gguf, hf
from cbrs.models.config import MAX_LAYERS, MAX_POSITIONS, ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.layers import Angles, HeadNorm, RMSNorm, Weights
from cbrs.models.llama import Attention, LlamaForCausalLM, LlamaLayer
from cbrs.models.rope import Rotary
from cbrs.models.rope_config import read_scaling, require_full_rotation
from cbrs.weights import Values

_THETA = {hf.FULL: 1_000_000.0, hf.SLIDING: 10_000.0}
_PATTERN = 6  # every sixth layer sees the whole context
_LARGEST_LAYERS = 62
"""The model of this depth scales attention by its width per head; GGUF files do not say it."""


class Gemma3Layer(LlamaLayer):
    """One decoder layer, with norms around attention and MLP."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        """Read the tensors of layer `index`."""
        super().__init__(config, weights, index)
        prefix = f"model.layers.{index}"
        eps = config.rms_norm_eps
        heads = config.num_heads, config.num_kv_heads
        self.head_norm = HeadNorm(weights, f"{prefix}.self_attn", eps, *heads)
        # What is added to the hidden state is float32, as that is.
        self.after_attention = RMSNorm(
            weights, f"{prefix}.post_attention_layernorm.weight", eps, torch.float32
        )
        self.mlp_norm = RMSNorm(weights, f"{prefix}.pre_feedforward_layernorm.weight", eps)
        self.after_mlp = RMSNorm(
            weights, f"{prefix}.post_feedforward_layernorm.weight", eps, torch.float32
        )

    def forward(self, hidden: Tensor, angles: Angles | None, attention: Attention) -> Tensor:
        """Return the layer's output, float32 `[num_tokens, hidden_size]` as `hidden` is."""
        mixed = self.attend(self.attention_norm(hidden), angles, attention)
        added = self.out(mixed).float()
        hidden = hidden + (added if self.after_attention is None else self.after_attention(added))
        added = self.down(self.gated(self.mlp_norm(hidden))).float()
        total: Tensor = hidden + (added if self.after_mlp is None else self.after_mlp(added))
        return total


class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3, the text model."""

    layer_class = Gemma3Layer
    gguf_names: ClassVar[dict[str, str]] = {
        **LlamaForCausalLM.gguf_names,
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    gguf_factors: ClassVar[tuple[str, ...]] = ()
    tokens_without_embedding = 1  # the tokenizer is that of the multimodal models: an image token

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Read every tensor; names and shapes have been checked against `expected_tensors`."""
        super().__init__(config, weights)
        # Rounded as the weights are: the model was trained with the rounded number.
        scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype)
        self.embedding_scale = scale.item()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return what the first layer gets, float32 `[num_tokens, hidden_size]`."""
        return super().embed(token_ids).mul_(self.embedding_scale)

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(
            fields,
            "Gemma3ForCausalLM",
            positions=131_072,
            tied=True,
            head_dim=256,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
        )
        hf.refuse_true(fields, "use_bidirectional_attention", "mlp_bias")
        _refuse_softcapping(fields, "attn_logit_softcapping", "final_logit_softcapping")
        kinds = _layer_kinds(fields, config.num_layers)
        rotary = _rotary_by_kind(fields, config)
        window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
        if "sliding_window" not in fields.values:
            window = 4096
        bias = fields.boolean("attention_bias", False)
        return replace(
            config,
            attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0) ** -0.5,
            rotary=tuple(rotary[kind] for kind in kinds),
            sliding_windows=hf.windows_of(fields, kinds, window),
            attention_bias=bias,
            output_bias=bias,
        )

    @classmethod
    def config_from_gguf(cls, fields: gguf.GgufFields) -> ModelConfig:
        """Read the metadata of a GGUF file of the `gemma3` architecture."""
        config = gguf.base_config(fields, "Gemma3ForCausalLM")
        _refuse_softcapping(fields, "attn_logit_softcapping", "final_logit_softcapping")
        window = fields.integer("attention.sliding_window", 1, MAX_POSITIONS)
        pattern = fields.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, _PATTERN)
        kinds = _pattern_kinds(pattern, config.num_layers)
        local = gguf.read_theta(fields, _THETA[hf.SLIDING], "rope.freq_base_swa")
        rotary = {
            hf.FULL: gguf.read_rotary(fields, config, _THETA[hf.FULL]),
            hf.SLIDING: Rotary(local, config.head_dim),
        }
        scalar = config.head_dim
        if config.num_layers == _LARGEST_LAYERS:
            scalar = config.hidden_size // config.num_heads
        return replace(
            config,
            attention_scale=scalar**-0.5,
            rotary=tuple(rotary[kind] for kind in kinds),
            sliding_windows=hf.windows_of(fields, kinds, window),
            hidden_act="gelu_tanh",
        )

    @classmethod
    def layer_tensors(cls, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of one layer."""
        yield from super().layer_tensors(config)
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
        yield "pre_feedforward_layernorm.weight", (config.hidden_size,)
        yield "post_feedforward_layernorm.weight", (config.hidden_size,)

    @classmethod
    def convert_hf(cls, config: ModelConfig, name: str, values: Values) -> Values:
        """Add the 1 that norm weights are stored without; in GGUF files it has been added."""
        return values + np.float32(1.0) if name.endswith("norm.weight") else values


def _layer_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    pattern = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, _PATTERN)
    return hf.layer_kinds(fields, num_layers) or _pattern_kinds(pattern, num_layers)


def _pattern_kinds(pattern: int, num_layers: int) -> tuple[str, ...]:
    return tuple(hf.SLIDING if (layer + 1) % pattern else hf.FULL for layer in range(num_layers))


def _rotary_by_kind(fields: Fields, config: ModelConfig) -> dict[str, Rotary]:
    """Read `rope_parameters` by kind of layer (newer), or the single keys (older)."""
    require_full_rotation(fields)
    nested = fields.get("rope_parameters")
    if nested is None:
        whole = hf.read_rotary(fields, config, _THETA[hf.FULL])
        theta = hf.read_theta(fields, _THETA[hf.SLIDING], "rope_local_base_freq")
        return {hf.FULL: whole, hf.SLIDING: Rotary(theta, config.head_dim)}
    if not isinstance(nested, dict):
        raise fields.error("rope_parameters", f"{nested!r} is not an object")
    if fields.get("rope_scaling") is not None:
        raise fields.error("rope_scaling", "given together with rope_parameters")
    found = {}
    for kind, values in nested.items():
        if kind not in _THETA or not isinstance(values, dict | None):
            detail = f"{kind!r}: only objects for {' and '.join(_THETA)} are supported"
            raise fields.error("rope_parameters", detail)
        found[kind] = values or {}
    outer = {hf.FULL: "rope_theta", hf.SLIDING: "rope_local_base_freq"}
    rotary = {}
    for kind, default in _THETA.items():
        rope = Fields(found.get(kind, {}), fields.file)
        theta = hf.read_theta(rope, hf.read_theta(fields, default, outer[kind]))
        scaling = read_scaling(rope, config.max_position_embeddings)
        rotary[kind] = Rotary(theta, config.head_dim, scaling)
    return rotary


def _refuse_softcapping(fields: Fields, *keys: str) -> None:
    for key in keys:
        if fields.number(key, 0.0, 1e6, 0.0) != 0.0:
            raise fields.error(key, "soft caps are not supported")
