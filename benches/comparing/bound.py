"""The tokens/s of a closed loop if bytes and arithmetic take as long as the machine needs for them.

Arithmetic is that of the faster of float32 multiply-adds and bfloat16 matrix products
(`running.rates`). It is added up with the time of reading, request by request; an engine that hides
the arithmetic of prompts behind the reading of decodes may come nearer than the figure says, or
pass it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from running.rates import Rates

from cbrs.models.config import ModelConfig

from .weights import DTYPE_BYTES, config_of, matrix_sizes


@dataclass(frozen=True)
class Work:
    """What a model asks for, with weights and KV cache in one type."""

    config: ModelConfig
    dtype: str
    layers: int
    """Parameters of all matrices but the head."""
    head: int

    @classmethod
    def of(cls, model: str, dtype: str) -> Work | None:
        """None for `null`."""
        config = config_of(model)
        return None if config is None else cls(config, dtype, *matrix_sizes(config))

    def decode_s(self, num_seqs: int, context: float, rates: Rates) -> float:
        """Seconds of a step in which so many sequences decode, at least."""
        shape, itemsize = self.config, DTYPE_BYTES[self.dtype]
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
        num_bytes = itemsize * (self.layers + self.head) + num_seqs * context * token_bytes
        flops = num_seqs * (2 * (self.layers + self.head) + self._attention_flops(context))
        return max(num_bytes / rates.bytes_per_s, flops / rates.flops_per_s)

    def prefill_s(self, num_tokens: int, rates: Rates) -> float:
        """Seconds of a prompt at least, of which only the last token needs logits."""
        flops = num_tokens * (2 * self.layers + self._attention_flops(num_tokens / 2))
        return (flops + 2 * self.head) / rates.flops_per_s

    def _attention_flops(self, context: float) -> float:
        shape = self.config
        return 4 * shape.num_layers * shape.num_heads * shape.head_dim * context

    def tokens_per_s(self, clients: int, load: Any, rates: Rates) -> float:
        """Of a closed loop with `prompt_tokens` and `output_tokens`, nothing at the same time."""
        context = load.prompt_tokens + load.output_tokens / 2
        decode_s = self.decode_s(clients, context, rates) / clients
        prompt_s = self.prefill_s(load.prompt_tokens, rates)
        return float(load.output_tokens / (prompt_s + load.output_tokens * decode_s))
