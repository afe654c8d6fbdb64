"""Attention over a paged KV cache; arithmetic is float32."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import QUANTIZED, dequantize


def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    row_ids: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    num_decodes: int = 0,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Attend causally, each sequence over its own blocks; fills `out`.

    `out` and `query` are `[num_tokens, num_heads, head_dim]`. The tokens of sequence `s` are
    `query_start[s]` to `query_start[s + 1]` (int32 `[num_seqs + 1]`), the last ones of its context
    of `seq_lens[s]` tokens (int32 `[num_seqs]`). Its blocks are `block_tables[row_ids[s]]` (int32
    `[max_num_seqs, max_blocks]`). Query head `h` uses KV head `h // (num_heads / num_kv_heads)`.
    With a sliding window `w`, the query at position `i` sees the keys `j` with `i - w < j <= i`.
    A score `x` becomes `soft_cap * tanh(x / soft_cap)` if a cap is given (Gemma 2).
    The queries of a sequence of length 0 (padding) are not looked at, its rows of `out` are zero,
    and so are the rows behind the last query.

    What follows is known to the caller without asking the device, and changes the speed only:
    the first `num_decodes` sequences have one query each; no sequence has more than
    `max_query_len` queries or `max_seq_len` tokens (None: `num_tokens`, and what a row of
    `block_tables` can hold); `workspace` is scratch memory of kernels. Nothing of it is read here.
    """
    starts, lens, rows = query_start.tolist(), seq_lens.tolist(), row_ids.tolist()
    for sequence, (seq_len, row) in enumerate(zip(lens, rows, strict=True)):
        tokens = slice(starts[sequence], starts[sequence + 1])
        if seq_len == 0:
            out[tokens] = 0
            continue
        keys = _gather(key_cache, block_tables[row], seq_len)
        values = _gather(value_cache, block_tables[row], seq_len)
        result = _attend(query[tokens], keys, values, scale, sliding_window, soft_cap)
        out[tokens] = result.to(out.dtype)
    out[starts[-1] :] = 0


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Return the context of one sequence, float32 `[num_kv_heads, seq_len, head_dim]`."""
    num_blocks = -(-seq_len // cache.shape[2])
    used = block_table[:num_blocks].long()
    if cache.dtype in QUANTIZED:
        blocks = dequantize(cache.view(torch.int8)[used].view(cache.dtype))
    else:
        blocks = cache[used]  # [n, num_kv_heads, block_size, head_dim]
    _, num_kv_heads, block_size, head_dim = blocks.shape
    tokens = blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)
    return tokens[:, :seq_len].float()


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Return `[num_queries, num_heads, head_dim]`; the queries are the context's last tokens."""
    num_queries, num_heads, _ = query.shape
    num_kv_heads, seq_len, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = scale * query.float().transpose(0, 1) @ keys.transpose(1, 2)  # [heads, queries, keys]
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    position = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    key_position = torch.arange(seq_len, device=query.device)[None, :]
    hidden = key_position > position
    if sliding_window is not None:
        hidden |= key_position <= position - sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
