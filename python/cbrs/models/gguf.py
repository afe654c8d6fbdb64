"""Reading of GGUF metadata: the parts that architectures share.

Keys begin with the architecture's name in these files; messages give them in full.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cbrs.models.config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    Heads,
    ModelConfig,
)
from cbrs.models.fields import Fields, load_error
from cbrs.models.rope import RopeScaling, Rotary, yarn_magnitude

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, in files of Llama 3.1 and later."""

_ABSENT_ID = 0xFFFFFFFF  # a special token id that means "none"


class GgufSource(Protocol):
    """A GGUF file as `cbrs._core` opens it."""

    @property
    def metadata(self) -> dict[str, Any]:
        """All metadata."""

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors."""

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, `(out_features, in_features)` for a matrix."""

    def tensor(self, name: str, dtype: str) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
        """Return the values as float32, or as the bits of bfloat16 in uint16."""


class GgufFields(Fields):
    """The metadata of one GGUF file, read by the keys of its architecture, and its tensors."""

    def __init__(self, source: GgufSource, file: str | Path) -> None:
        """Read `source`, which was opened at `file`."""
        metadata = source.metadata
        self.architecture = Fields(metadata, file, "general.").text("architecture")
        super().__init__(metadata, file, f"{self.architecture}.")
        self.tensor_names = frozenset(source.tensor_names)
        self._source = source

    def rows(self, name: str) -> int:
        """Return the first dimension of a tensor that must be there."""
        if name not in self.tensor_names:
            raise load_error(self.file, name, "missing tensor")
        return self._source.tensor_shape(name)[0]

    def factors(self, name: str, count: int) -> tuple[float, ...]:
        """Read the tensor `name` of `count` divisors of the rotary frequencies."""
        if name not in self.tensor_names:
            raise load_error(self.file, name, "missing tensor")
        shape = tuple(self._source.tensor_shape(name))
        if shape != (count,):
            raise load_error(
                self.file, name, f"shape {list(shape)}, but {count} factors are needed"
            )
        factors = tuple(float(value) for value in self._source.tensor(name, "float32"))
        if not all(0.0 < value < float("inf") for value in factors):
            raise load_error(self.file, name, "holds a factor that is not positive and finite")
        return factors


def base_config(fields: GgufFields, architecture: str) -> ModelConfig:
    """Read what every architecture has, all but `rotary`; no layer has a window.

    `architecture` is the Hugging Face name. The presence of biases and of an output head among the
    tensors decides about those.
    """
    if fields.integer("expert_count", 0, 1 << 20, 0) > 0:
        raise fields.error("expert_count", "mixtures of experts are not supported")
    vocab_size = fields.rows("token_embd.weight")
    require(fields, "vocab_size", vocab_size, "rows of token_embd.weight")
    heads = Heads.read(
        fields, "embedding_length", "attention.head_count", "attention.head_count_kv"
    )
    head_dim = heads.head_dim(fields, "attention.key_length")
    require(fields, "attention.value_length", head_dim, "dimensions of a head")
    num_layers = fields.integer("block_count", 1, MAX_LAYERS)
    special = Fields(_present_ids(fields.values), fields.file, "tokenizer.ggml.")
    bos = special.token_ids("bos_token_id", vocab_size)
    eos = special.token_ids("eos_token_id", vocab_size)
    eot = special.token_ids("eot_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=heads.width,
        intermediate_size=fields.integer("feed_forward_length", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        max_position_embeddings=fields.integer("context_length", 1, MAX_POSITIONS),
        tie_word_embeddings="output.weight" not in fields.tensor_names,
        sliding_windows=(None,) * num_layers,
        attention_bias="blk.0.attn_q.bias" in fields.tensor_names,
        output_bias="blk.0.attn_output.bias" in fields.tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in fields.tensor_names,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos + eot)),
    )


def read_rotary(fields: GgufFields, config: ModelConfig, theta: float = 10000.0) -> Rotary:
    """Read rotary settings that hold for whole heads; `theta` is the architecture's default."""
    require(fields, "rope.dimension_count", config.head_dim, "dimensions of a head")
    scaling = _read_scaling(fields, config.max_position_embeddings)
    if ROPE_FACTORS in fields.tensor_names:
        if scaling is not None:
            key = f"{fields.prefix}rope.scaling.type"
            raise load_error(fields.file, ROPE_FACTORS, f"given together with {key}")
        factors = fields.factors(ROPE_FACTORS, config.head_dim // 2)
        scaling = RopeScaling("factors", freq_factors=factors)
    return Rotary(read_theta(fields, theta), config.head_dim, scaling)


def read_theta(fields: GgufFields, default: float, key: str = "rope.freq_base") -> float:
    """Read the base of the rotary frequencies."""
    return fields.number(key, 1.001, 1e12, default)


def read_window(fields: GgufFields) -> int | None:
    """Read the sliding window; None when the file says 0, or nothing."""
    return fields.integer("attention.sliding_window", 0, MAX_POSITIONS, 0) or None


def refuse_window(fields: GgufFields) -> None:
    """Refuse a window where the file would not say which layers have it."""
    if read_window(fields) is not None:
        detail = f"windows are not supported in {fields.architecture!r} files"
        raise fields.error("attention.sliding_window", detail)


def require(fields: Fields, key: str, number: int, what: str) -> None:
    """Refuse a stated `key` that is not `number`."""
    if fields.integer(key, 0, MAX_POSITIONS, number) != number:
        raise fields.error(key, f"{fields.get(key)}, but there are {number} {what}")


def _read_scaling(fields: GgufFields, positions: int) -> RopeScaling | None:
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
