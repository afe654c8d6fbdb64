"""Log-probabilities of tokens and of the most likely ids; see `twins/sampling.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import choose, device_of
from .sampling import check_logits, sample_workspace_size, workspace_of
from .select import CAPACITY, DEPTHS, collect, largest_of, profile
from .twins.sampling import MAX_LOGPROBS

_FLOOR = tl.constexpr(-9999.0)
_LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def logprobs_kernel(
    ids_ptr,
    values_ptr,
    ranks_ptr,
    logits_ptr,
    logits_stride,
    index_ptr,
    token_ptr,
    workspace_ptr,  # int32 [num_rows, 2, CAPACITY]
    vocab_size,
    num_logprobs,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program."""
    place = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + place)
    if index >= 0:
        row_ptr = logits_ptr + index.to(tl.int64) * logits_stride
        token = tl.load(token_ptr + place)
        out = place * (1 + num_logprobs)
        number = tl.load(row_ptr + token)
        tl.store(ids_ptr + out, token)
        tl.store(ranks_ptr + place, 1 + _count_above(row_ptr, vocab_size, number, BLOCK))
        largest, _first = largest_of(row_ptr, vocab_size, BLOCK)
        if tl.abs(largest) < float("inf"):
            total, count_0, count_1, count_2, count_3, _m0, _m1, _m2, _m3 = profile(
                row_ptr, vocab_size, largest, 1.0, BLOCK
            )
            log_total = tl.log(total)
            tl.store(values_ptr + out, tl.maximum(number - largest - log_total, _FLOOR))
            if num_logprobs > 0:
                cut = -float("inf") + largest * 0.0
                enough = (count_3 >= num_logprobs) & (count_3 <= CAPACITY)
                cut = tl.where(enough, largest - DEPTHS[3], cut)
                enough = (count_2 >= num_logprobs) & (count_2 <= CAPACITY)
                cut = tl.where(enough, largest - DEPTHS[2], cut)
                enough = (count_1 >= num_logprobs) & (count_1 <= CAPACITY)
                cut = tl.where(enough, largest - DEPTHS[1], cut)
                enough = (count_0 >= num_logprobs) & (count_0 <= CAPACITY)
                cut = tl.where(enough, largest - DEPTHS[0], cut)
                own_ptr = workspace_ptr + place * 2 * CAPACITY
                number_ptr = own_ptr.to(tl.pointer_type(tl.float32))
                source_ptr = row_ptr
                size = vocab_size
                num_listed = 0
                if cut > float("-inf"):
                    size = collect(row_ptr, vocab_size, cut, number_ptr, own_ptr + CAPACITY, BLOCK)
                    num_listed = size
                    source_ptr = number_ptr
                _best(
                    ids_ptr + out + 1,
                    values_ptr + out + 1,
                    source_ptr,
                    own_ptr + CAPACITY,
                    num_listed,
                    size,
                    num_logprobs,
                    largest,
                    log_total,
                    BLOCK,
                )
        else:
            tl.store(values_ptr + out, _FLOOR)
            for column in range(num_logprobs):
                # Ids that exist, so that a reader can name them.
                tl.store(ids_ptr + out + 1 + column, tl.minimum(column, vocab_size - 1))
                tl.store(values_ptr + out + 1 + column, _FLOOR)


@triton.jit
def _count_above(row_ptr, size, limit, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        number = tl.load(row_ptr + start + lane, mask=start + lane < size, other=float("-inf"))
        count += (number > limit).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _best(
    out_ids_ptr,
    out_values_ptr,
    number_ptr,
    id_ptr,
    num_listed,
    size,
    num_logprobs,
    largest,
    log_total,
    BLOCK: tl.constexpr,
):
    """Store the likeliest ids one after the other: each is the best of those after the last."""
    lane = tl.arange(0, BLOCK)
    last, last_place = largest, -1
    for column in range(num_logprobs):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_place = tl.full([BLOCK], _LAST_ID, tl.int32)
        for start in range(0, size, BLOCK):
            place = start + lane
            number = tl.load(number_ptr + place, mask=place < size, other=float("-inf"))
            is_later = (number < last) | ((number == last) & (place > last_place))
            is_better = (place < size) & is_later
            is_better = is_better & ((number > best) | (best_place == _LAST_ID))
            best = tl.where(is_better, number, best)
            best_place = tl.where(is_better, place, best_place)
        found = tl.max(best, 0)
        found_place = tl.min(tl.where(best == found, best_place, _LAST_ID), 0)
        if found_place != _LAST_ID:  # else there are no more: the last one again
            last, last_place = found, found_place
        token = last_place
        if num_listed > 0:
            token = tl.load(id_ptr + last_place)
        tl.store(out_ids_ptr + column, token)
        tl.store(out_values_ptr + column, tl.maximum(last - largest - log_total, _FLOOR))


def logprobs(
    ids: Tensor,
    values: Tensor,
    ranks: Tensor,
    logits: Tensor,
    logits_index: Tensor,
    token_ids: Tensor,
    vocab_size: int,
    workspace: Tensor | None = None,
) -> None:
    """Fill `ids`, `values` and `ranks`; see the twin.

    Without a `workspace` of `sample_workspace_size` int32 elements one is allocated.
    """
    num_rows, columns = ids.shape
    if columns - 1 > MAX_LOGPROBS:
        raise ValueError(
            f"{columns - 1} most likely ids are asked for: at most {MAX_LOGPROBS} are reported"
        )
    if num_rows == 0:
        return
    check_logits(logits, vocab_size)
    workspace = workspace_of(workspace, sample_workspace_size(num_rows), logits.device)
    launch = choose("logprobs", device_of(logits.device).capability)
    logprobs_kernel[(num_rows,)](
        ids,
        values,
        ranks,
        logits,
        logits.stride(0),
        logits_index,
        token_ids,
        workspace,
        vocab_size,
        columns - 1,
        CAPACITY=CAPACITY,
        **launch.constants,
        **launch.options,
    )
