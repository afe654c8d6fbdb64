"""The Llama architecture: RMSNorm, rotary positions, grouped heads, gated MLP.

Mistral differs only by its sliding window, which attention applies. The model sees the tokens of a
whole batch as one list and knows nothing of sequences: those are the attention back end's.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cbrs.models.config import ModelConfig
from cbrs.models.layers import Linear, RMSNorm, RotaryEmbedding, Weights, rotate

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
FINAL_NORM = "model.norm"

_GGUF_GLOBALS = {EMBEDDING: "token_embd", HEAD: "output", FINAL_NORM: "output_norm"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Attention(Protocol):
    """The part of an attention back end that a model calls, once per layer."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values of the batch, then return `[num_tokens, num_heads, head_dim]`."""


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that a checkpoint of this shape must hold."""
    width, hidden = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    grouped = config.num_kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", query, width, config.attention_bias),
        ("self_attn.k_proj", grouped, width, config.attention_bias),
        ("self_attn.v_proj", grouped, width, config.attention_bias),
        ("self_attn.o_proj", width, query, config.attention_bias),
        ("mlp.gate_proj", hidden, width, config.mlp_bias),
        ("mlp.up_proj", hidden, width, config.mlp_bias),
        ("mlp.down_proj", width, hidden, config.mlp_bias),
    )
    yield f"{EMBEDDING}.weight", (config.vocab_size, width)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        for name, rows, columns, has_bias in projections:
            yield f"{prefix}.{name}.weight", (rows, columns)
            if has_bias:
                yield f"{prefix}.{name}.bias", (rows,)
    yield f"{FINAL_NORM}.weight", (width,)
    if not config.tie_word_embeddings:
        yield f"{HEAD}.weight", (config.vocab_size, width)


def gguf_name(name: str) -> str:
    """Return what a GGUF file calls the tensor with this Hugging Face name."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_GLOBALS:
        return f"{_GGUF_GLOBALS[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"


class LlamaLayer(nn.Module):
    """One decoder layer; q, k, v are one matrix, and so are gate and up."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        """Read the tensors of layer `index`."""
        super().__init__()
        prefix = f"model.layers.{index}"
        bias, eps = config.attention_bias, config.rms_norm_eps
        attention = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.qkv = Linear.read(weights, attention, bias)
        self.out = Linear.read(weights, [f"{prefix}.self_attn.o_proj"], bias)
        gated = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        self.gate_up = Linear.read(weights, gated, config.mlp_bias)
        self.down = Linear.read(weights, [f"{prefix}.mlp.down_proj"], config.mlp_bias)
        self.attention_norm = RMSNorm(weights, f"{prefix}.input_layernorm.weight", eps)
        self.mlp_norm = RMSNorm(weights, f"{prefix}.post_attention_layernorm.weight", eps)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor, attention: Attention) -> Tensor:
        """Return the layer's output, float32 `[num_tokens, hidden_size]` as `hidden` is."""
        projected = self.qkv(self.attention_norm(hidden))
        # Rotation and attention take float32 whatever the model runs in: the angles of late
        # positions need its precision.
        heads = projected.float().unflatten(-1, (-1, self.head_dim))
        rotated = rotate(heads[:, : self.num_heads + self.num_kv_heads], cosine, sine)
        mixed = attention.forward(
            self.index,
            rotated[:, : self.num_heads],
            rotated[:, self.num_heads :],
            heads[:, self.num_heads + self.num_kv_heads :],
        )
        hidden = self.out(mixed.flatten(1).to(projected.dtype), hidden)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), hidden)  # type: ignore[no-any-return]


class LlamaForCausalLM(nn.Module):
    """Token ids of a batch to the logits of the rows that are sampled from.

    Between the layers the hidden state is float32 whatever the weights are: rounding it to bfloat16
    after every layer would cost more accuracy than the weights' own rounding, and it is small.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Read every tensor; names and shapes have been checked against `expected_tensors`."""
        super().__init__()
        self.config = config
        self.embedding = weights.read(f"{EMBEDDING}.weight")
        self.layers = nn.ModuleList(
            LlamaLayer(config, weights, index) for index in range(config.num_layers)
        )
        # On the CPU the head is float32: bfloat16 logits of usual size lie 1/16 apart, so that the
        # best two would often be equal. A tied head is the embedding again; packed it is a second
        # copy, which the head's product (the largest of a small model) repays.
        head_type = torch.float32 if weights.device.type == "cpu" else weights.dtype
        tied = config.tie_word_embeddings
        head = self.embedding if tied else weights.read(f"{HEAD}.weight", head_type)
        self.head = Linear(head.to(head_type), pack=weights.pack)
        self.norm = RMSNorm(weights, f"{FINAL_NORM}.weight", config.rms_norm_eps, head_type)
        self.rotary = RotaryEmbedding(
            config.rope_theta, config.head_dim, config.rope_scaling, weights.device
        )

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, logits_index: Tensor, attention: Attention
    ) -> Tensor:
        """Return float32 logits `[len(logits_index), vocab_size]`.

        `token_ids` and `positions` are int32 `[num_tokens]`; `logits_index` int32 names the tokens
        whose logits are wanted.
        """
        hidden = F.embedding(token_ids, self.embedding).float()
        cosine, sine = self.rotary(positions)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine, attention)
        selected = self.norm(hidden.index_select(0, logits_index))
        logits: Tensor = self.head(selected).float()
        return logits
