"""What a checkpoint says about its model, checked once.

`ModelConfig` is the only form in which the rest of the package sees a model's shape. It is read
from a Hugging Face `config.json` or from GGUF metadata; every number has been compared with a
limit before anything is sized by it, and settings that cbrs cannot apply are refused.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbrs.models.fields import Fields
from cbrs.models.rope import (
    RopeScaling,
    read_rope_scaling,
    require_full_rotation,
    yarn_magnitude,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Hugging Face architecture names that can be loaded; both are the Llama architecture."""

MAX_LAYERS = 1024
MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 30
_ABSENT_ID = 0xFFFFFFFF  # a GGUF special token id that means "none"

logger = logging.getLogger("cbrs")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one decoder model.

    `vocab_size` counts the rows of the embedding, which may be more than the tokenizer knows.
    `sliding_window` w lets a token attend to itself and the w - 1 tokens before it; None is the
    whole context. `eos_token_ids` end a sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None

    @classmethod
    def from_hf(
        cls,
        values: Mapping[str, Any],
        file: str | Path,
        generation: Mapping[str, Any] | None = None,
    ) -> "ModelConfig":
        """Read the object of a `config.json`; `generation` is `generation_config.json` if any.

        The end tokens of `generation` replace those of `values`, as they do in the reference.
        """
        fields = Fields(values, file)
        architecture = _hf_architecture(fields)
        vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB_SIZE)
        heads = _Heads.read(fields, "hidden_size", "num_attention_heads", "num_key_value_heads")
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, heads.default_head_dim(fields))
        positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, 2048)
        rope = _hf_rope(fields)
        stops = Fields(generation or {}, Path(file).with_name("generation_config.json"))
        eos = stops.token_ids("eos_token_id", vocab_size)
        bos = fields.token_ids("bos_token_id", vocab_size)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=heads.width,
            intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
            num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=_even(fields, "head_dim", head_dim),
            rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
            rope_theta=rope.number("rope_theta", 1.001, 1e12, _hf_theta(fields)),
            rope_scaling=read_rope_scaling(rope, positions),
            max_position_embeddings=positions,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            hidden_act=_hf_activation(fields),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos or fields.token_ids("eos_token_id", vocab_size),
            sliding_window=_hf_window(fields, architecture),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        file: str | Path,
        *,
        tensor_shape: Callable[[str], tuple[int, ...]],
        tensor_names: Collection[str],
    ) -> "ModelConfig":
        """Read the metadata of a GGUF file of the `llama` architecture.

        `tensor_names` and `tensor_shape` describe the file's tensors: the embedding gives the
        vocabulary, and the presence of biases and of an output head decides about those.
        """
        general = Fields(metadata, file, "general.")
        architecture = general.text("architecture")
        if architecture != "llama":
            raise general.error("architecture", f"{architecture!r} is not supported; only 'llama'")
        fields = Fields(metadata, file, "llama.")
        if fields.integer("expert_count", 0, 1 << 20, 0) > 0:
            raise fields.error("expert_count", "mixtures of experts are not supported")
        if "token_embd.weight" not in tensor_names:
            raise Fields({}, file).error("token_embd.weight", "missing tensor")
        vocab_size = tensor_shape("token_embd.weight")[0]
        _require(fields, "vocab_size", vocab_size, "rows of token_embd.weight")
        heads = _Heads.read(
            fields, "embedding_length", "attention.head_count", "attention.head_count_kv"
        )
        head_dim = fields.integer(
            "attention.key_length", 2, MAX_HEAD_DIM, heads.default_head_dim(fields)
        )
        _require(fields, "attention.value_length", head_dim, "dimensions of a head")
        _require(fields, "rope.dimension_count", head_dim, "dimensions of a head")
        positions = fields.integer("context_length", 1, MAX_POSITIONS)
        special = Fields(_present_ids(metadata), file, "tokenizer.ggml.")
        bos = special.token_ids("bos_token_id", vocab_size)
        eos = special.token_ids("eos_token_id", vocab_size)
        eot = special.token_ids("eot_token_id", vocab_size)
        return cls(
            architecture="LlamaForCausalLM",
            vocab_size=vocab_size,
            hidden_size=heads.width,
            intermediate_size=fields.integer("feed_forward_length", 1, MAX_WIDTH),
            num_layers=fields.integer("block_count", 1, MAX_LAYERS),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=_even(fields, "attention.key_length", head_dim),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_theta=fields.number("rope.freq_base", 1.001, 1e12, 10000.0),
            rope_scaling=_gguf_rope(fields, positions),
            max_position_embeddings=positions,
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            hidden_act="silu",
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos + eot)),
            sliding_window=fields.optional_integer("attention.sliding_window", 1, MAX_POSITIONS),
        )


@dataclass(frozen=True)
class _Heads:
    """Width of the model and how it is divided; the divisions have been checked."""

    width: int
    num_heads: int
    num_kv_heads: int
    heads_key: str

    @classmethod
    def read(cls, fields: Fields, width_key: str, heads_key: str, kv_key: str) -> "_Heads":
        width = fields.integer(width_key, 1, MAX_WIDTH)
        num_heads = fields.integer(heads_key, 1, MAX_HEADS)
        num_kv_heads = fields.integer(kv_key, 1, MAX_HEADS, num_heads)
        if width % num_heads:
            raise fields.error(heads_key, f"{num_heads} does not divide the width of {width}")
        if num_heads % num_kv_heads:
            raise fields.error(kv_key, f"{num_kv_heads} does not divide {num_heads} heads")
        return cls(width, num_heads, num_kv_heads, heads_key)

    def default_head_dim(self, fields: Fields) -> int:
        """Return width / heads, refused if it could not be a head dimension."""
        head_dim = self.width // self.num_heads
        if not 2 <= head_dim <= MAX_HEAD_DIM:
            detail = f"{self.num_heads} heads of width {head_dim}, outside 2 to {MAX_HEAD_DIM}"
            raise fields.error(self.heads_key, detail)
        return head_dim


def _require(fields: Fields, key: str, number: int, what: str) -> None:
    """Refuse a stated `key` that is not `number`."""
    if fields.integer(key, 0, MAX_POSITIONS, number) != number:
        raise fields.error(key, f"{fields.get(key)}, but there are {number} {what}")


def _even(fields: Fields, key: str, head_dim: int) -> int:
    if head_dim % 2:
        raise fields.error(key, f"{head_dim} is odd; rotary positions need pairs")
    return head_dim


def _hf_architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None and fields.text("model_type", "") in ("llama", "mistral"):
        names = [f"{fields.text('model_type').capitalize()}ForCausalLM"]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", f"{names!r} is not a list of names")
    if names[0] not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise fields.error("architectures", f"{names[0]!r} is not supported; only {supported}")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized safetensors are not supported")
    if fields.get("auto_map") is not None:
        logger.warning(
            "%s: auto_map names code of the checkpoint's own; cbrs never runs such code and uses "
            "its own %s",
            fields.file,
            names[0],
        )
    return names[0]


def _hf_rope(fields: Fields) -> Fields:
    """Return the rotary settings: `rope_parameters` (newer) or `rope_scaling` (older), or none."""
    require_full_rotation(fields)
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


def _hf_theta(fields: Fields) -> float:
    return fields.number("rope_theta", 1.001, 1e12, 10000.0)


def _hf_activation(fields: Fields) -> str:
    name = fields.text("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{name!r} is not supported; only 'silu'")
    return "silu"


def _hf_window(fields: Fields, architecture: str) -> int | None:
    window = fields.optional_integer("sliding_window", 1, MAX_POSITIONS)
    if "sliding_window" not in fields.values and architecture == "MistralForCausalLM":
        window = 4096  # what the reference takes when a config of this kind does not say
    kinds = fields.get("layer_types")
    if kinds is None:
        return window
    wanted = "full_attention" if window is None else "sliding_attention"
    if not isinstance(kinds, list) or any(kind != wanted for kind in kinds):
        raise fields.error("layer_types", f"only {wanted!r} for every layer fits sliding_window")
    return window


def _gguf_rope(fields: Fields, positions: int) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            if fields.number(key, 0.0, 1e6, 1.0) not in (0.0, 1.0):
                raise fields.error(key, "given without rope.scaling.type; linear or yarn is needed")
        return None
    if kind not in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", f"{kind!r} is not supported; linear or yarn is")
    factor = fields.number("rope.scaling.factor", 1e-6, 1e6)
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = fields.integer("rope.scaling.original_context_length", 1, MAX_POSITIONS, positions)
    magnitude = fields.number("rope.scaling.attn_factor", 0.0, 1e6, 1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
        attention_factor=magnitude * yarn_magnitude(factor),
    )


def _present_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the special token ids that say "none"."""
    return {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and value not in (_ABSENT_ID, -1)
    }
