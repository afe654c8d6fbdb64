"""Attention over a paged KV cache on a GPU: chooses tiles and splits, and launches the kernels.

Decodes and the verification of drafts read much and compute little: their heads share one tile, and
the keys of a sequence are split among programs. Prompts compute: large tiles, one program for all
keys. A batch of both takes two launches, or one if its decodes read little.

Nothing is asked of the device, and what is launched depends on shapes and on the bounds that the
caller names, so calls can be captured in a CUDA graph and replayed with other lengths within them.

Tolerances against the twin in float32, for values of about 1: 2e-2 with bfloat16 queries or a
quantized cache, 4e-3 with float16, 2e-5 with float32 queries.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launch import Example
from .paged_attention_kernel import attention, sum_splits
from .twins.kv_cache import FP8, QUANTIZED, SCALE_BYTES

_LOG2_E = math.log2(math.e)

_INTERPRETED = not isinstance(attention, triton.runtime.JITFunction)

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


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
    """Attend causally, each sequence over its own blocks; fills `out`. The twin says what it means.

    The first `num_decodes` sequences have one query each (a padded one has length 0). No sequence
    may have more than `max_query_len` queries or `max_seq_len` tokens; what is smaller is faster.
    `workspace` is float32, contiguous, of any size: splits are as many as fit (`workspace_size`
    says how large is enough). None asks torch for memory when splits are wanted.

    Heads are the same number for each KV head. ValueError names an argument that does not fit.
    """
    num_tokens, num_heads, _ = query.shape
    num_seqs = seq_lens.shape[0]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    _check(
        tuple(query.shape),
        tuple(key_cache.shape),
        query.dtype,
        key_cache.dtype,
        launch.device_of(query.device),
    )
    if (
        out.shape != query.shape
        or value_cache.shape != key_cache.shape
        or value_cache.dtype != key_cache.dtype
    ):
        raise ValueError(
            f"out {list(out.shape)} and query {list(query.shape)}, key cache "
            f"{list(key_cache.shape)} {key_cache.dtype} and value cache {list(value_cache.shape)} "
            f"{value_cache.dtype} must be alike"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key and value cache must be contiguous")
    if not 0 <= num_decodes <= min(num_seqs, num_tokens):
        raise ValueError(
            f"num_decodes is {num_decodes}: it must lie between 0 and the {num_seqs} sequences "
            f"and {num_tokens} tokens"
        )
    if not scale > 0:
        raise ValueError(f"scale is {scale}: it must be above 0")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}: it must be above 0, or None for no cap")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}: it must be at least 1, or None")
    longest = block_tables.shape[1] * block_size
    if max_seq_len is not None:
        longest = min(longest, max_seq_len)
    if sliding_window is not None:
        longest = min(longest, sliding_window)
    arguments = _Arguments(
        out, query, key_cache, value_cache, block_tables, row_ids, query_start, seq_lens
    )
    arguments.numbers(scale, sliding_window, soft_cap)

    choose = _Chooser(query, key_cache)
    if num_decodes < num_seqs:
        # a tile of a prompt's size for one query wastes work, another launch wastes time
        limit = choose.tiles(num_tokens).constants["MIXED_KEYS"]
        if num_decodes * longest <= limit:
            num_decodes = 0
    if num_decodes:
        group = num_heads // num_kv_heads
        decode = choose.few(group)
        _run(arguments, decode, num_decodes, 0, num_decodes, longest, workspace, one_query=True)
    if num_decodes == num_seqs:
        if num_tokens > num_seqs:
            out[num_seqs:].zero_()
        return
    longest_query = num_tokens if max_query_len is None else min(num_tokens, max_query_len)
    rows = longest_query * (num_heads // num_kv_heads)
    split = rows <= _FEW_ROWS
    plan = choose.few(rows) if split else choose.tiles(num_tokens)
    span = longest if sliding_window is None else longest + longest_query
    _run(
        arguments,
        plan,
        num_seqs,
        num_decodes,
        num_tokens,
        span if split else 0,
        workspace,
        one_query=False,
    )


_FEW_ROWS = 64
"""Rows (queries times heads of a group) up to which a sequence's queries are one tile of splits."""


def workspace_size(num_tokens: int, num_heads: int, head_dim: int, num_splits: int = 16) -> int:
    """Return the float32 numbers that `num_splits` splits of `num_tokens` queries take."""
    return num_tokens * num_heads * num_splits * (head_dim + 1)


class _Chooser:
    """The launches for one kind of query and cache."""

    def __init__(self, query: Tensor, key_cache: Tensor) -> None:
        self._capability = launch.device_of(query.device).capability
        self._shape = {
            "head_dim": query.shape[2],
            "kv_bytes": key_cache.element_size(),
            "query_bytes": query.element_size(),
        }
        self._group = query.shape[1] // key_cache.shape[1]

    def few(self, rows: int) -> launch.Launch:
        """Return the launch of tiles with no more than `rows` rows."""
        chosen = launch.choose("attention_decode", self._capability, **self._shape)
        return _with_rows(chosen, max(16, triton.next_power_of_2(rows)))

    def tiles(self, num_tokens: int) -> launch.Launch:
        """Return the launch of large tiles, as large as `num_tokens` queries can fill."""
        chosen = launch.choose("attention_prefill", self._capability, **self._shape)
        most = max(16, triton.next_power_of_2(num_tokens * self._group))
        rows = max(min(chosen.constants["BLOCK_M"], most), triton.next_power_of_2(self._group))
        return _with_rows(chosen, rows)


def _with_rows(chosen: launch.Launch, rows: int) -> launch.Launch:
    constants = {**chosen.constants, "BLOCK_M": rows}
    return launch.Launch(chosen.num_warps, chosen.num_stages, constants)


class _Arguments:
    """What all launches of one call share."""

    def __init__(
        self,
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        row_ids: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
    ) -> None:
        self.out, self.query = out, query
        self.num_kv_heads = key_cache.shape[1]
        self.quantized = key_cache.dtype in QUANTIZED
        factors = [
            cache.view(torch.bfloat16) if self.quantized else cache
            for cache in (key_cache, value_cache)
        ]
        self.tensors = (query, key_cache, value_cache, *factors)
        self.index = (block_tables, row_ids, query_start, seq_lens)
        self.strides = (
            out.stride(0),
            out.stride(1),
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
        )
        self.head_dim = query.shape[2]
        compute, value = _types(query.dtype, key_cache.dtype)
        self.constants: dict[str, Any] = {
            "GROUP": query.shape[1] // self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": max(16, triton.next_power_of_2(self.head_dim)),
            "BLOCK_SIZE": key_cache.shape[2],
            "QUANTIZED": self.quantized,
            "COMPUTE_DTYPE": _TYPES[compute],
            "VALUE_DTYPE": _TYPES[value],
            "WIDEN": _INTERPRETED,
        }

    def numbers(self, scale: float, window: int | None, soft_cap: float | None) -> None:
        """Set what scores are multiplied with, capped by and restricted to."""
        self.constants |= {"WINDOW": window is not None, "SOFT_CAP": soft_cap is not None}
        if soft_cap is None:
            self.scalars = (scale * _LOG2_E, 0.0, window or 0)
        else:
            self.scalars = (2 * scale / soft_cap * _LOG2_E, soft_cap * _LOG2_E, window or 0)


def _run(
    arguments: _Arguments,
    plan: launch.Launch,
    num_seqs: int,
    first_seq: int,
    num_tokens: int,
    span: int,
    workspace: Tensor | None,
    *,
    one_query: bool,
) -> None:
    """Launch for the sequences from `first_seq` on, in splits if a tile's `span` is worth it."""
    constants = dict(plan.constants)
    constants.pop("MIXED_KEYS", None)
    waves, longest_part = constants.pop("WAVES", 0), constants.pop("MAX_KEYS", 0)
    group = arguments.constants["GROUP"]
    if one_query:
        tiles = num_seqs
    else:
        tiles = (num_tokens - first_seq) // (constants["BLOCK_M"] // group)
        tiles += num_seqs - first_seq + 1
    rows = (num_tokens - first_seq) * arguments.num_kv_heads * group
    num_splits = 1
    if span:
        processors = launch.device_of(arguments.query.device).num_processors
        programs = tiles * arguments.num_kv_heads
        wanted = max(-(-waves * processors // programs), -(-span // longest_part))
        useful = -(-span // (constants["MIN_TILES"] * constants["BLOCK_N"]))
        num_splits = max(1, min(wanted, useful, _MAX_SPLITS))
        if workspace is not None:
            num_splits = max(
                1, min(num_splits, workspace.numel() // (rows * (arguments.head_dim + 1)))
            )
    partial = log_sums = arguments.out
    if num_splits > 1:
        count = rows * num_splits
        if workspace is None:
            workspace = torch.empty(
                count * (arguments.head_dim + 1),
                dtype=torch.float32,
                device=arguments.query.device,
            )
        log_sums, partial = workspace[:count], workspace[count:]
    attention[(tiles, arguments.num_kv_heads, num_splits)](
        arguments.out,
        partial,
        log_sums,
        *arguments.tensors,
        *arguments.index,
        *arguments.scalars,
        first_seq,
        num_seqs,
        num_tokens,
        num_splits,
        *arguments.strides,
        **arguments.constants,
        **constants,
        ONE_QUERY=one_query,
        SPLIT=num_splits > 1,
        **plan.options,
    )
    if num_splits > 1:
        total = launch.choose("attention_sum", launch.device_of(arguments.query.device).capability)
        sum_splits[(num_tokens - first_seq, arguments.num_kv_heads * group)](
            arguments.out,
            partial,
            log_sums,
            first_seq,
            num_splits,
            arguments.strides[0],
            arguments.strides[1],
            HEAD_DIM=arguments.head_dim,
            PADDED_DIM=arguments.constants["PADDED_DIM"],
            **total.constants,
            **total.options,
        )


_MAX_SPLITS = 64


@lru_cache(maxsize=256)
def _types(query: torch.dtype, cache: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the type of queries and keys, and that of weights and values, in products.

    8-bit numbers are exact in any. Weights of quantized values hold the factors, which float16 is
    too narrow for. Types that differ meet in float32.
    """
    if query == torch.float32:
        return torch.float32, torch.float32
    if cache in QUANTIZED:
        return query, torch.bfloat16
    return (query, query) if query == cache else (torch.float32, torch.float32)


@lru_cache(maxsize=256)
def _check(
    query: tuple[int, ...],
    cache: tuple[int, ...],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: launch.Device,
) -> None:
    """Raise ValueError for shapes and types that no kernel takes."""
    if dtype not in _TYPES or (cache_dtype not in _TYPES and cache_dtype not in QUANTIZED):
        raise ValueError(
            f"query is {dtype} and cache {cache_dtype}: a query is float32, bfloat16 or float16, "
            "a cache also int8 or float8_e4m3fn"
        )
    if cache_dtype == FP8 and device.capability < (8, 9):
        raise ValueError(
            f"capability {device.capability[0]}.{device.capability[1]} has no float8_e4m3fn (8.9 "
            "and later have): use an int8 cache"
        )
    _, num_heads, head_dim = query
    _, num_kv_heads, block_size, row = cache
    if num_heads % num_kv_heads or num_heads // num_kv_heads > _MAX_GROUP:
        raise ValueError(
            f"{num_heads} heads and {num_kv_heads} KV heads: there must be the same number for "
            f"each, at most {_MAX_GROUP}"
        )
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}: it must be even and at most {_MAX_HEAD_DIM}")
    if row != head_dim + (SCALE_BYTES if cache_dtype in QUANTIZED else 0):
        raise ValueError(f"a row of the {cache_dtype} cache is {row} long, head_dim is {head_dim}")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: it must be at least 1")


_MAX_GROUP = 128
_MAX_HEAD_DIM = 256


def _example(row: launch.Row) -> Example:
    """Return what a row of attention is compiled as: Llama's and Qwen's kind of call.

    The row's example has `query` and `cache` (Triton's names of types), `head_dim`, and may have
    `group` (4) and `block_size` (16).
    """
    wanted, constants = row.example, dict(row.launch.constants)
    for name in ("MIXED_KEYS", "WAVES", "MAX_KEYS"):
        constants.pop(name, None)
    head_dim, group = wanted["head_dim"], wanted.get("group", 4)
    query, cache = wanted["query"], wanted["cache"]
    quantized = cache in ("i8", "fp8e4nv")
    decode = row.kernel == "attention_decode"
    if decode:
        constants["BLOCK_M"] = max(16, triton.next_power_of_2(group))
    names = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    factors = "*bf16" if quantized else f"*{cache}"
    pointers = {
        "out": f"*{query}",
        "partial": "*fp32" if decode else f"*{query}",
        "log_sums": "*fp32" if decode else f"*{query}",
        "query": f"*{query}",
        "key_cache": f"*{cache}",
        "value_cache": f"*{cache}",
        "key_factors": factors,
        "value_factors": factors,
        "block_tables": "*i32",
        "row_ids": "*i32",
        "query_start": "*i32",
        "seq_lens": "*i32",
    }
    strides = [name for name in attention.arg_names if name.startswith("stride_")]
    signature = pointers | {
        "scale": "fp32",
        "soft_cap": "fp32",
        **dict.fromkeys(("window", "first_seq", "num_seqs", "num_tokens", "num_splits"), "i32"),
        **dict.fromkeys(strides, "i32"),
    }
    constants |= {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": wanted.get("block_size", 16),
        "ONE_QUERY": decode,
        "SPLIT": decode,
        "QUANTIZED": quantized,
        "WINDOW": False,
        "SOFT_CAP": False,
        "COMPUTE_DTYPE": names[query],
        "VALUE_DTYPE": tl.bfloat16 if quantized and query != "fp32" else names[query],
        "WIDEN": False,
    }
    return Example(attention, signature, constants, (*pointers, *strides), hot=query != "fp32")


def _example_sum(row: launch.Row) -> Example:
    """Return what the sum of splits is compiled as; the row's example has `head_dim`."""
    pointers = {"out": "*bf16", "partial": "*fp32", "log_sums": "*fp32"}
    strides = ("stride_out_token", "stride_out_head")
    signature = pointers | dict.fromkeys(("first_token", "num_splits", *strides), "i32")
    head_dim = row.example["head_dim"]
    constants = {
        **row.launch.constants,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
    }
    return Example(sum_splits, signature, constants, (*pointers, *strides))


EXAMPLES = {
    "attention_decode": _example,
    "attention_prefill": _example,
    "attention_sum": _example_sum,
}
"""What `cbrs.kernels.compile` builds rows of the launch table as."""
