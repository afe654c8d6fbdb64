"""The meaning of every kernel in plain PyTorch, with the kernels' own arguments; any device.

These are what the fast kernels are tested against, so nothing here is clever. Caches are
`[num_blocks, num_kv_heads, block_size, head_dim]`, of any floating dtype; arithmetic is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Write keys and values `[num_tokens, num_kv_heads, head_dim]` to their slots of the caches.

    `slot_mapping` is int64 `[num_tokens]`: `block * block_size + offset`, or -1 for a token that is
    not written. Both caches are written in place.
    """
    block_size = key_cache.shape[2]
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block, offset = slots // block_size, slots % block_size
    key_cache[block, :, offset] = key[written].to(key_cache.dtype)  # [n, num_kv_heads, head_dim]
    value_cache[block, :, offset] = value[written].to(value_cache.dtype)


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
) -> None:
    """Attend causally, each sequence over its own blocks; fills `out`.

    `out` and `query` are `[num_tokens, num_heads, head_dim]`. The tokens of sequence `s` are
    `query_start[s]` to `query_start[s + 1]` (int32 `[num_seqs + 1]`), the last ones of its context
    of `seq_lens[s]` tokens (int32 `[num_seqs]`). Its blocks are `block_tables[row_ids[s]]` (int32
    `[max_num_seqs, max_blocks]`). Query head `h` uses KV head `h // (num_heads / num_kv_heads)`.
    With a sliding window `w`, the query at position `i` sees the keys `j` with `i - w < j <= i`.
    Rows of `out` behind the last query are set to zero.
    """
    starts, lens, rows = query_start.tolist(), seq_lens.tolist(), row_ids.tolist()
    for sequence, (seq_len, row) in enumerate(zip(lens, rows, strict=True)):
        tokens = slice(starts[sequence], starts[sequence + 1])
        keys = _gather(key_cache, block_tables[row], seq_len)
        values = _gather(value_cache, block_tables[row], seq_len)
        out[tokens] = _attend(query[tokens], keys, values, scale, sliding_window).to(out.dtype)
    out[starts[-1] :] = 0


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Return the context of one sequence, float32 `[num_kv_heads, seq_len, head_dim]`."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    num_blocks = -(-seq_len // block_size)
    blocks = cache[block_table[:num_blocks].long()]  # [n, num_kv_heads, block_size, head_dim]
    tokens = blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)
    return tokens[:, :seq_len].float()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Return `[num_queries, num_heads, head_dim]`; the queries are the context's last tokens."""
    num_queries, num_heads, _ = query.shape
    num_kv_heads, seq_len, _ = keys.shape
    group = num_heads // num_kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = scale * query.float().transpose(0, 1) @ keys.transpose(1, 2)  # [heads, queries, keys]
    position = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    key_position = torch.arange(seq_len, device=query.device)[None, :]
    hidden = key_position > position
    if sliding_window is not None:
        hidden |= key_position <= position - sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
