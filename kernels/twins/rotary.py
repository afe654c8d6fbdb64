"""From the projection of a layer to turned queries and filled caches, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .kv_cache import write_kv


def rotary_kv_write(
    query_out: Tensor,
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    inverse_frequencies: Tensor | None,
    magnitude: float = 1.0,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and turn queries and keys, fill `query_out`, and write keys and values to their slots.

    `qkv` is `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, any floating dtype: all
    query heads, then key heads, then value heads. `query_out` is `[num_tokens, num_heads,
    head_dim]`; the caches are those of `write_kv`. `positions` is int32 `[num_tokens]`,
    `slot_mapping` int64 `[num_tokens]`, where -1 writes no key and no value.

    `inverse_frequencies` is float32 `[rotary_dim / 2]`: dimension `i` turns with
    `i + rotary_dim / 2` by `position * inverse_frequencies[i]`, and the dimensions from
    `rotary_dim` on stay (Su et al., "RoFormer", 2021; the half-split layout). None turns nothing.
    `magnitude` multiplies cosine and sine. `query_norm` and `key_norm`, float32 `[head_dim]`, come
    together: every head is divided by its root mean square with `eps` and scaled before it is
    turned. Everything is float32 until it is stored.
    """
    num_heads, head_dim = query_out.shape[1:]
    num_kv_heads = key_cache.shape[1]
    heads = qkv.float().view(len(qkv), -1, head_dim)
    query, rest = heads[:, :num_heads], heads[:, num_heads:]
    key, value = rest[:, :num_kv_heads], rest[:, num_kv_heads:]
    if query_norm is not None and key_norm is not None:
        query, key = _head_norm(query, query_norm, eps), _head_norm(key, key_norm, eps)
    if inverse_frequencies is not None:
        angles = torch.outer(positions.float(), inverse_frequencies).unsqueeze(1)
        cosine, sine = angles.cos() * magnitude, angles.sin() * magnitude
        query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
    query_out.copy_(query)
    write_kv(key, value, key_cache, value_cache, slot_mapping)


def _head_norm(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = cosine.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1)
