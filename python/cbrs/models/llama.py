"""The Llama architecture: RMSNorm, rotary positions, grouped heads, gated MLP.

The other architectures are this one with something added, so their classes derive from these. The
model sees the tokens of a whole batch as one list and knows nothing of sequences: those are the
attention back end's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cbrs._core import CpuDecoder, CpuKernels, DecoderLayer
from cbrs.models import gguf, hf
from cbrs.models.config import ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.layers import (
    Angles,
    Embedding,
    Group,
    HeadNorm,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SplitHead,
    TiedHead,
    Weights,
    activation,
    read_matrix,
    rotate,
)
from cbrs.parallel.split import rows_of_head, vocab_part
from cbrs.weights import Values

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
FINAL_NORM = "model.norm"

Cache: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""A layer's key or value cache as the native kernels take it."""

_GGUF_GLOBALS = {EMBEDDING: "token_embd", HEAD: "output", FINAL_NORM: "output_norm"}


class Attention(Protocol):
    """The part of an attention back end that a model calls, once per layer."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values of the batch, then return `[num_tokens, num_heads, head_dim]`."""


class LlamaLayer(nn.Module):
    """One decoder layer; q, k, v are one matrix, and so are gate and up."""

    qkv_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    gate_up_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        """Read the tensors of layer `index`."""
        super().__init__()
        prefix = f"model.layers.{index}"
        eps = config.rms_norm_eps
        self.index = index
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        qkv = [f"{prefix}.self_attn.{name}" for name in self.qkv_names]
        self.qkv = Linear.read(weights, qkv, config.attention_bias)
        self.out = Linear.read(
            weights, [f"{prefix}.self_attn.o_proj"], config.output_bias, splits_inputs=True
        )
        gate_up = [f"{prefix}.mlp.{name}" for name in self.gate_up_names]
        self.gate_up = Linear.read(weights, gate_up, config.mlp_bias, num_parts=2)
        self.down = Linear.read(
            weights, [f"{prefix}.mlp.down_proj"], config.mlp_bias, splits_inputs=True
        )
        self.activation = activation(config.hidden_act)
        self.attention_norm = RMSNorm(weights, f"{prefix}.input_layernorm.weight", eps)
        self.mlp_norm = RMSNorm(weights, f"{prefix}.post_attention_layernorm.weight", eps)
        self.head_norm: HeadNorm | None = None
        self.after_attention: RMSNorm | None = None
        self.after_mlp: RMSNorm | None = None

    def native(self, rotary: int | None, sliding_window: int | None) -> DecoderLayer:
        """Return the layer for a native decoder, in which `rotary` is its kind of positions."""
        norms = self.head_norm
        return DecoderLayer(
            qkv=self.qkv.parts,
            out=self.out.parts,
            gate_up=self.gate_up.parts,
            down=self.down.parts,
            attention_norm=self.attention_norm.weight.numpy(),
            mlp_norm=self.mlp_norm.weight.numpy(),
            after_attention=_weight_of(self.after_attention),
            after_mlp=_weight_of(self.after_mlp),
            head_norms=None if norms is None else (norms.query.numpy(), norms.key.numpy()),
            rotary=rotary,
            sliding_window=sliding_window,
        )

    def forward(self, hidden: Tensor, angles: Angles | None, attention: Attention) -> Tensor:
        """Return the layer's output, float32 `[num_tokens, hidden_size]` as `hidden` is."""
        mixed = self.attend(self.attention_norm(hidden), angles, attention)
        hidden = self.out(mixed, hidden)
        return self.down(self.gated(self.mlp_norm(hidden)), hidden)  # type: ignore[no-any-return]

    def attend(self, normed: Tensor, angles: Angles | None, attention: Attention) -> Tensor:
        """Return what the heads gather, `[num_tokens, num_heads * head_dim]`."""
        projected = self.qkv(normed)
        # Rotation and attention take float32 whatever the model runs in: the angles of late
        # positions need its precision.
        heads = projected.float().unflatten(-1, (-1, self.head_dim))
        split = self.num_heads + self.num_kv_heads
        placed = self.place(heads[:, :split], angles)
        query, key = placed[:, : self.num_heads], placed[:, self.num_heads :]
        mixed = attention.forward(self.index, query, key, heads[:, split:])
        return mixed.flatten(1).to(projected.dtype)

    def place(self, heads: Tensor, angles: Angles | None) -> Tensor:
        """Norm queries and keys if the model does, and give them their positions if they have."""
        if self.head_norm is not None:
            heads = self.head_norm(heads)
        return heads if angles is None else rotate(heads, angles)

    def gated(self, normed: Tensor) -> Tensor:
        """Return the inner state of the MLP, `[num_tokens, intermediate_size]`."""
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


def _split_head(
    config: ModelConfig, weights: Weights, group: Group, tied: Tensor | None, dtype: torch.dtype
) -> SplitHead:
    """Return a rank's part of the head; of the embedding `tied`, if it is that."""
    if tied is None:
        matrix = weights.read(f"{HEAD}.weight", dtype)
    else:
        begin, end = vocab_part(config.vocab_size, group)
        matrix = tied[begin:end].to(dtype)
    num_rows = rows_of_head(config.vocab_size, group.size)
    return SplitHead(matrix, num_rows, config.vocab_size, group)


def _weight_of(norm: RMSNorm | None) -> npt.NDArray[np.float32] | None:
    return None if norm is None else norm.weight.numpy()


class LlamaForCausalLM(nn.Module):
    """Token ids of a batch to the logits of the rows that are sampled from.

    Between the layers the hidden state is float32 whatever the weights are: rounding it to bfloat16
    after every layer would cost more accuracy than the weights' own rounding, and it is small.

    The class methods are what the loader asks: the configuration of a checkpoint, the tensors that
    it must hold, their names in GGUF files, and how stored values differ from those used here.
    """

    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer
    """What each layer is made of."""
    gguf_names: ClassVar[dict[str, str]] = {
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
    """Names of a layer's tensors in GGUF files."""
    gguf_factors: ClassVar[tuple[str, ...]] = (gguf.ROPE_FACTORS,)
    """Tensors of GGUF files that `config_from_gguf` reads."""
    tokens_without_embedding: ClassVar[int] = 0
    """How many tokens more than embeddings a tokenizer may have; prompts cannot use them."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Read every tensor; names and shapes have been checked against `expected_tensors`."""
        super().__init__()
        self.config = config
        kernels, quantization = weights.kernels, weights.quantization
        table = read_matrix(weights, f"{EMBEDDING}.weight")
        self.embedding = Embedding(table, kernels=kernels, quantization=quantization)
        self.embedding_scale = 1.0
        self.layers = nn.ModuleList(
            self.layer_class(config, weights, index) for index in range(config.num_layers)
        )
        # On the CPU logits are float32: in bfloat16 those of usual size lie 1/16 apart, so that the
        # best two would often be equal. The native kernels compute in float32 from any weights;
        # torch needs the head itself in it. A tied head is the embedding again.
        head_type = torch.float32 if weights.device.type == "cpu" else weights.dtype
        if kernels is not None and config.tie_word_embeddings:
            self.head: Linear = TiedHead(self.embedding, kernels)
        elif quantization is not None or kernels is not None:
            # From the stored table where it is tied: rounding it twice would be something else.
            head = EMBEDDING if config.tie_word_embeddings else HEAD
            matrix = read_matrix(weights, f"{head}.weight")
            self.head = Linear(matrix, kernels=kernels, quantization=quantization)
        elif weights.group is not None:
            tied = self.embedding.plain if config.tie_word_embeddings else None
            self.head = _split_head(config, weights, weights.group, tied, head_type)
        elif config.tie_word_embeddings:
            self.head = Linear(self.embedding.plain.to(head_type))
        else:
            self.head = Linear(weights.read(f"{HEAD}.weight", head_type))
        self.norm = RMSNorm(weights, f"{FINAL_NORM}.weight", config.rms_norm_eps, head_type)
        kinds = list(dict.fromkeys(config.rotary))
        self._rotaries = [
            None if kind is None else RotaryEmbedding(kind, weights.device) for kind in kinds
        ]
        self._kind_of_layer = [kinds.index(kind) for kind in config.rotary]

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, logits_index: Tensor, attention: Attention
    ) -> Tensor:
        """Return float32 logits `[len(logits_index), vocab_size]`.

        `token_ids` and `positions` are int32 `[num_tokens]`; `logits_index` int32 names the tokens
        whose logits are wanted.
        """
        hidden = self.embed(token_ids)
        angles = [None if rotary is None else rotary(positions) for rotary in self._rotaries]
        for layer, kind in zip(self.layers, self._kind_of_layer, strict=True):
            hidden = layer(hidden, angles[kind], attention)
        selected = self.norm(hidden.index_select(0, logits_index))
        logits: Tensor = self.head(selected).float()
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return what the first layer gets, float32 `[num_tokens, hidden_size]`."""
        embedded: Tensor = self.embedding(token_ids)
        return embedded

    def _layers(self) -> Iterator[LlamaLayer]:
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            yield layer

    def native_decoder(
        self, kernels: CpuKernels, key_caches: Sequence[Cache], value_caches: Sequence[Cache]
    ) -> CpuDecoder | None:
        """Return the model as one native call a batch, or None if its weights are not packed.

        The caches are those of the layers. The torch modules are its reference; both share the
        packed weights.
        """
        embedding, head = self.embedding.packed, self.head.packed
        if embedding is None or head is None:
            return None
        config = self.config
        kinds = [index for index, kind in enumerate(self._rotaries) if kind is not None]
        places = [kinds.index(kind) if kind in kinds else None for kind in self._kind_of_layer]
        layers = zip(self._layers(), places, config.sliding_windows, strict=True)
        return CpuDecoder(
            kernels,
            embedding=embedding,
            head=head,
            final_norm=self.norm.weight.numpy(),
            layers=[layer.native(place, window) for layer, place, window in layers],
            rotaries=[
                (kind.frequencies.numpy(), kind.magnitude)
                for kind in self._rotaries
                if kind is not None
            ],
            key_caches=key_caches,
            value_caches=value_caches,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            attention_scale=config.attention_scale,
            norm_eps=config.rms_norm_eps,
            embedding_scale=self.embedding_scale,
            activation=config.hidden_act,
        )

    @classmethod
    def config_from_hf(cls, fields: Fields) -> ModelConfig:
        """Read a `config.json`."""
        config = hf.base_config(fields, "LlamaForCausalLM", positions=2048)
        bias = fields.boolean("attention_bias", False)
        return replace(
            config,
            rotary=(hf.read_rotary(fields, config),) * config.num_layers,
            sliding_windows=hf.same_windows(fields, config.num_layers),
            attention_bias=bias,
            output_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
        )

    @classmethod
    def config_from_gguf(cls, fields: gguf.GgufFields) -> ModelConfig:
        """Read the metadata of a GGUF file of the `llama` architecture."""
        config = gguf.base_config(fields, "LlamaForCausalLM")
        return replace(
            config,
            rotary=(gguf.read_rotary(fields, config),) * config.num_layers,
            sliding_windows=(gguf.read_window(fields),) * config.num_layers,
        )

    @classmethod
    def expected_tensors(cls, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor that a checkpoint of this shape must hold."""
        table = (config.vocab_size, config.hidden_size)
        yield f"{EMBEDDING}.weight", table
        for layer in range(config.num_layers):
            for name, shape in cls.layer_tensors(config):
                yield f"model.layers.{layer}.{name}", shape
        yield f"{FINAL_NORM}.weight", (config.hidden_size,)
        if not config.tie_word_embeddings:
            yield f"{HEAD}.weight", table

    @classmethod
    def layer_tensors(cls, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of one layer."""
        width, hidden = config.hidden_size, config.intermediate_size
        query = config.num_heads * config.head_dim
        grouped = config.num_kv_heads * config.head_dim
        yield "input_layernorm.weight", (width,)
        yield "post_attention_layernorm.weight", (width,)
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", query, width, config.attention_bias),
            ("self_attn.k_proj", grouped, width, config.attention_bias),
            ("self_attn.v_proj", grouped, width, config.attention_bias),
            ("self_attn.o_proj", width, query, config.output_bias),
            ("mlp.gate_proj", hidden, width, config.mlp_bias),
            ("mlp.up_proj", hidden, width, config.mlp_bias),
            ("mlp.down_proj", width, hidden, config.mlp_bias),
        ):
            yield f"{name}.weight", (rows, columns)
            if has_bias:
                yield f"{name}.bias", (rows,)

    @classmethod
    def gguf_name(cls, name: str) -> str:
        """Return what a GGUF file calls the tensor with this Hugging Face name."""
        stem, _, kind = name.rpartition(".")
        if stem in _GGUF_GLOBALS:
            return f"{_GGUF_GLOBALS[stem]}.{kind}"
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{cls.gguf_names[part]}.{kind}"

    @classmethod
    def convert_hf(cls, config: ModelConfig, name: str, values: Values) -> Values:
        """Return the values to use for those that a safetensors file stores under `name`."""
        return values

    @classmethod
    def convert_gguf(cls, config: ModelConfig, name: str, values: Values) -> Values:
        """Return the values to use for those that a GGUF file stores for `name`."""
        return values
