"""What a checkpoint says about its model, checked once.

`ModelConfig` is the only form in which the rest of the package sees a model's shape. Each
architecture reads it from a Hugging Face `config.json` or from GGUF metadata, with the common
readers of `models.hf` and `models.gguf`; every number has been compared with a limit before
anything is sized by it, and settings that cbrs cannot apply are refused.
"""

from dataclasses import dataclass

from cbrs.models.fields import Fields
from cbrs.models.rope import Rotary

MAX_LAYERS = 1024
MAX_VOCAB_SIZE = 1 << 22
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 30

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by the names that a config.json uses."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one decoder model.

    `vocab_size` counts the rows of the embedding, which may be more than the tokenizer knows.
    `attention_scale` multiplies the products of queries and keys. `rotary` and `sliding_windows`
    have one entry a layer: how it turns queries and keys, None where it does not; and the window w
    that lets a token attend to itself and the w - 1 tokens before it, None for the whole context.
    `attention_bias` is that of queries, keys and values, `output_bias` that of attention's result.
    `hidden_act` is "silu" or "gelu_tanh". `eos_token_ids` end a sequence.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rotary: tuple[Rotary | None, ...] = ()
    sliding_windows: tuple[int | None, ...] = ()
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Heads:
    """Width of the model and how it is divided; the divisions have been checked."""

    width: int
    num_heads: int
    num_kv_heads: int
    heads_key: str

    @classmethod
    def read(cls, fields: Fields, width_key: str, heads_key: str, kv_key: str) -> "Heads":
        """Read the three numbers; the number of key heads is by default that of query heads."""
        width = fields.integer(width_key, 1, MAX_WIDTH)
        num_heads = fields.integer(heads_key, 1, MAX_HEADS)
        num_kv_heads = fields.integer(kv_key, 1, MAX_HEADS, num_heads)
        if width % num_heads:
            raise fields.error(heads_key, f"{num_heads} does not divide the width of {width}")
        if num_heads % num_kv_heads:
            raise fields.error(kv_key, f"{num_kv_heads} does not divide {num_heads} heads")
        return cls(width, num_heads, num_kv_heads, heads_key)

    def head_dim(self, fields: Fields, key: str, default: int | None = None) -> int:
        """Read the elements of a head; by default width / heads."""
        if default is None and fields.get(key) is None:
            default = self.width // self.num_heads
            if not 2 <= default <= MAX_HEAD_DIM:
                detail = f"{self.num_heads} heads of width {default}, outside 2 to {MAX_HEAD_DIM}"
                raise fields.error(self.heads_key, detail)
        head_dim = fields.integer(key, 2, MAX_HEAD_DIM, default)
        if head_dim % 2:
            raise fields.error(key, f"{head_dim} is odd; rotary positions need pairs")
        return head_dim
