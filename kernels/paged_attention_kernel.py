"""Attention over a paged KV cache as Triton kernels: tiles of queries, and the sum of splits.

One kernel serves decoding, prompts and the verification of drafts. A program has one KV head and
`BLOCK_M` rows: consecutive queries of one sequence, each with all the `GROUP` heads that share the
KV head, so that keys and values are read once for all of them. It walks over `BLOCK_N` keys at a
time with a running maximum and sum (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
With `SPLIT`, several programs share the keys of a tile, and `sum_splits` weighs their results
(Flash-Decoding, Dao et al. 2023). Exponentials are to the base 2.

Nothing depends on lengths but what the device reads: a launch can be replayed with other lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, acc, WIDEN: tl.constexpr):
    """Return `acc + a @ b`; `WIDEN` is for the interpreter, which has no products of bfloat16."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _number(x, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """Return cache numbers as `DTYPE`; exact for 8-bit ones."""
    if WIDEN:
        return x.to(tl.float32).to(DTYPE)
    return x.to(DTYPE)


@triton.jit
def _walk(
    acc,
    greatest,
    total,
    q,
    positions,
    begin,
    end,
    lowest,
    key_cache,
    value_cache,
    key_factors,
    value_factors,
    table,
    stride_block,
    head_offset,
    scale,
    soft_cap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Take in the keys `begin <= j < end`; without `MASKED` all rows see all of them."""
    dims = tl.arange(0, PADDED_DIM)
    columns = tl.arange(0, BLOCK_N)
    # Keys outside read block 0, whatever it holds: their scores are hidden, their values zero.
    keys = begin + columns
    coming = tl.load(table + keys // BLOCK_SIZE, mask=(keys >= lowest) & (keys < end), other=0)
    for first in range(begin, end, BLOCK_N):
        keys = first + columns
        inside = (keys >= lowest) & (keys < end)
        # Loaded one turn ahead: keys and values then depend on no load of the same turn, and Triton
        # keeps as many of them under way as there are stages.
        blocks = coming
        after = keys + BLOCK_N
        coming = tl.load(table + after // BLOCK_SIZE, mask=after < end, other=0)
        offset = keys % BLOCK_SIZE
        base = blocks.to(tl.int64) * stride_block + head_offset  # a pool can pass 2^31 elements
        token = base + offset * HEAD_DIM
        if HEAD_DIM == PADDED_DIM:
            k = tl.load(key_cache + token[None, :] + dims[:, None])  # [PADDED_DIM, BLOCK_N]
        else:
            here = (dims < HEAD_DIM)[:, None]
            k = tl.load(key_cache + token[None, :] + dims[:, None], mask=here, other=0.0)
        scores = _dot(
            q,
            _number(k, q.dtype, WIDEN),
            tl.zeros([q.shape[0], BLOCK_N], tl.float32),
            WIDEN,
        )
        if QUANTIZED:
            # two bytes each, behind the numbers of the block
            factor = base // 2 + (BLOCK_SIZE * HEAD_DIM // 2) + offset
            if MASKED:
                key_factor = tl.load(key_factors + factor, mask=inside, other=0.0)
                value_factor = tl.load(value_factors + factor, mask=inside, other=0.0)
            else:
                key_factor = tl.load(key_factors + factor)
                value_factor = tl.load(value_factors + factor)
            scores *= key_factor.to(tl.float32)[None, :]
        scores *= scale
        if SOFT_CAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x)); `scale` has the 2
            scores = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        if MASKED:
            seen = inside[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, 1))
        if MASKED:  # a row that has seen no key yet
            shift = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        else:
            shift = new_greatest
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(greatest - shift)
        total = total * shrink + tl.sum(weights, 1)
        greatest = new_greatest
        if MASKED:
            if HEAD_DIM == PADDED_DIM:
                present = inside[:, None]
            else:
                present = inside[:, None] & (dims < HEAD_DIM)[None, :]
            v = tl.load(value_cache + token[:, None] + dims[None, :], mask=present, other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            v = tl.load(value_cache + token[:, None] + dims[None, :])  # [BLOCK_N, PADDED_DIM]
        else:
            present = (dims < HEAD_DIM)[None, :]
            v = tl.load(value_cache + token[:, None] + dims[None, :], mask=present, other=0.0)
        if QUANTIZED:
            weights *= value_factor.to(tl.float32)[None, :]
        acc = acc * shrink[:, None]
        acc = _dot(weights.to(VALUE_DTYPE), _number(v, VALUE_DTYPE, WIDEN), acc, WIDEN)
    return acc, greatest, total


@triton.jit(do_not_specialize=["window", "first_seq", "num_seqs", "num_tokens", "num_splits"])
def attention(
    out,
    partial,
    log_sums,
    query,
    key_cache,
    value_cache,
    key_factors,
    value_factors,
    block_tables,
    row_ids,
    query_start,
    seq_lens,
    scale,
    soft_cap,
    window,
    first_seq,
    num_seqs,
    num_tokens,
    num_splits,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_table,
    stride_block,
    stride_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SPLIT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend with one tile of queries; grid `(tiles, num_kv_heads, num_splits)`.

    `ONE_QUERY`: tile `s` is sequence `s`, whose query is token `s`. Otherwise the sequences from
    `first_seq` on (those before have a token each) have a tile for each `BLOCK_M // GROUP` queries;
    those of `s` begin at tile `(query_start[s] - first_seq) // BLOCK_Q + s - first_seq`, which
    leaves room for a last one that is not full. What follows the last query counts as one more
    sequence with no context. Partial results are float32
    `[num_tokens - first_seq, num_heads, num_splits, HEAD_DIM]`, `log_sums` without HEAD_DIM.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if ONE_QUERY:
        seq = tl.program_id(0)
        token = seq
        num_queries = 1
        first_query = 0
        seq_len = tl.load(seq_lens + seq)
        row = tl.load(row_ids + seq)
    else:
        # Late tiles of a sequence see most keys: they begin first.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        low = first_seq
        high = num_seqs + 1
        while high - low > 1:
            middle = (low + high) // 2
            start = tl.load(query_start + middle) - first_seq
            before = start // BLOCK_Q + middle - first_seq <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        seq = low
        real = seq < num_seqs
        token = tl.load(query_start + seq)
        after = tl.load(query_start + seq + 1, mask=real, other=num_tokens)
        num_queries = after - token
        first_query = (tile - (token - first_seq) // BLOCK_Q - seq + first_seq) * BLOCK_Q
        if first_query >= num_queries:
            return
        seq_len = tl.load(seq_lens + seq, mask=real, other=0)
        row = tl.load(row_ids + seq, mask=real, other=0)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    valid = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    if ONE_QUERY:
        valid = rows < GROUP
        queries = tl.zeros([BLOCK_M], tl.int32)
    heads = kv_head * GROUP + rows % GROUP
    tokens = (token + queries).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)

    position = seq_len - num_queries + first_query  # of the tile's first query
    kv_end = tl.minimum(seq_len, position + BLOCK_Q)
    if ONE_QUERY:
        kv_end = seq_len
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(position - window + 1, 0)
    begin = lowest // BLOCK_N * BLOCK_N
    end = kv_end
    num_heads = tl.num_programs(1) * GROUP
    if SPLIT:
        part = ((tokens - first_seq) * num_heads + heads) * num_splits + split
        tiles = tl.maximum(tl.cdiv(kv_end - begin, BLOCK_N), 0)
        step = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES) * BLOCK_N
        begin += split * step
        end = tl.minimum(kv_end, begin + step)
        if (split > 0) & (begin >= kv_end):  # short contexts need fewer
            tl.store(log_sums + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
            return

    q = tl.load(
        query
        + tokens[:, None] * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=valid[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    ).to(COMPUTE_DTYPE)
    positions = seq_len - num_queries + queries
    table = block_tables + row.to(tl.int64) * stride_table
    head_offset = kv_head.to(tl.int64) * stride_head
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # A decode reads more than it computes: one loop, so that its loads never stop.
    if not (ONE_QUERY or WINDOW):
        full = tl.maximum(tl.minimum(end, position + 1) - begin, 0) // BLOCK_N * BLOCK_N
        acc, greatest, total = _walk(
            acc,
            greatest,
            total,
            q,
            positions,
            begin,
            begin + full,
            lowest,
            key_cache,
            value_cache,
            key_factors,
            value_factors,
            table,
            stride_block,
            head_offset,
            scale,
            soft_cap,
            window,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            QUANTIZED,
            WINDOW,
            SOFT_CAP,
            False,
            VALUE_DTYPE,
            WIDEN,
        )
        begin += full
    acc, greatest, total = _walk(
        acc,
        greatest,
        total,
        q,
        positions,
        begin,
        end,
        lowest,
        key_cache,
        value_cache,
        key_factors,
        value_factors,
        table,
        stride_block,
        head_offset,
        scale,
        soft_cap,
        window,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        QUANTIZED,
        WINDOW,
        SOFT_CAP,
        True,
        VALUE_DTYPE,
        WIDEN,
    )

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # no key: zero
    stored = valid[:, None] & (dims < HEAD_DIM)[None, :]
    if SPLIT:
        log_sum = greatest + tl.log2(tl.where(total == 0.0, 1.0, total))  # without a key: -inf
        tl.store(log_sums + part, log_sum, mask=valid)
        tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=stored)
    else:
        place = tokens[:, None] * stride_out_token + heads[:, None] * stride_out_head
        tl.store(out + place + dims[None, :], acc.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["first_token", "num_splits"])
def sum_splits(
    out,
    partial,
    log_sums,
    first_token,
    num_splits,
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Weigh the splits of one head of one token; grid `(tokens, num_heads)`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = (token * tl.num_programs(1) + head) * num_splits
    steps = tl.arange(0, STEP)
    dims = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([PADDED_DIM], tl.float32)
    total = 0.0
    greatest = float("-inf")
    for begin in range(0, num_splits, STEP):
        splits = begin + steps
        log_sum = tl.load(log_sums + first + splits, mask=splits < num_splits, other=float("-inf"))
        used = log_sum != float("-inf")  # a split that was not needed has written no result
        new_greatest = tl.maximum(greatest, tl.max(log_sum, 0))
        shift = tl.where(new_greatest == float("-inf"), 0.0, new_greatest)
        weights = tl.exp2(log_sum - shift)
        results = tl.load(
            partial + (first + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=used[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        shrink = tl.exp2(greatest - shift)
        acc = acc * shrink + tl.sum(results * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        greatest = new_greatest
    acc = acc / tl.where(total == 0.0, 1.0, total)
    place = (token + first_token) * stride_out_token + head * stride_out_head
    tl.store(out + place + dims, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
