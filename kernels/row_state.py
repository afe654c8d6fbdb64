"""Bias, penalties, bans and the history of rows, on the device; see `twins/row_state.py`.

One program takes one row, in phases with a barrier between them: first the row is copied, then its
lists are gone through. No id comes twice in a list, so that nothing has to be counted here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import choose, device_of
from .twins.row_state import RowState

_WORD_BLOCK = tl.constexpr(32)


@triton.jit
def change_logits_kernel(
    scores_ptr,
    unusable_ptr,
    logits_ptr,
    logits_stride,
    index_ptr,
    rows_ptr,
    positions_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    bias_start_ptr,
    bias_length_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    seen_start_ptr,
    seen_length_ptr,
    seen_ids_ptr,
    seen_counts_ptr,
    banned_start_ptr,
    banned_length_ptr,
    banned_ids_ptr,
    min_tokens_ptr,
    words_start_ptr,
    words_length_ptr,
    word_start_ptr,
    word_length_ptr,
    word_ids_ptr,
    output_start_ptr,
    output_ids_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """One sample a program."""
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample)
    if row >= 0:
        source_ptr = logits_ptr + tl.load(index_ptr + sample).to(tl.int64) * logits_stride
        own_ptr = scores_ptr + sample.to(tl.int64) * vocab_size
        lane = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lane < vocab_size
            score = tl.load(source_ptr + start + lane, mask=inside, other=float("-inf"))
            score = score.to(tl.float32)
            tl.store(own_ptr + start + lane, score, mask=inside)
            best = tl.maximum(best, tl.where(score != score, float("inf"), score))
        largest = tl.max(best, 0)
        tl.store(unusable_ptr + sample, 1 - (tl.abs(largest) < float("inf")).to(tl.int32))
        tl.debug_barrier()  # what one thread copied, another changes

        place = tl.arange(0, LIST_BLOCK)
        first = tl.load(bias_start_ptr + row)
        length = tl.load(bias_length_ptr + row)
        for start in range(0, length, LIST_BLOCK):
            listed = start + place < length
            ids = tl.load(bias_ids_ptr + first + start + place, mask=listed, other=-1)
            known = (ids >= 0) & (ids < vocab_size)
            value = tl.load(bias_values_ptr + first + start + place, mask=listed, other=0.0)
            score = tl.load(own_ptr + ids, mask=known, other=0.0)
            possible = known & (tl.abs(score) != float("inf"))
            tl.store(own_ptr + ids, _finite(score + value), mask=possible)
        tl.debug_barrier()

        presence = tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        repetition = tl.load(repetition_ptr + row)
        first = tl.load(seen_start_ptr + row)
        length = tl.load(seen_length_ptr + row)
        for start in range(0, length, LIST_BLOCK):
            listed = start + place < length
            ids = tl.load(seen_ids_ptr + first + start + place, mask=listed, other=-1)
            known = (ids >= 0) & (ids < vocab_size)
            count = tl.load(seen_counts_ptr + first + start + place, mask=listed, other=0)
            score = tl.load(own_ptr + ids, mask=known, other=0.0)
            possible = known & (tl.abs(score) != float("inf"))
            repeated = tl.where(score > 0.0, tl.div_rn(score, repetition), score * repetition)
            reduced = repeated - frequency * count.to(tl.float32)
            reduced = reduced - tl.where(count > 0, presence, 0.0)
            tl.store(own_ptr + ids, _finite(reduced), mask=possible)
        tl.debug_barrier()

        num_outputs = tl.load(positions_ptr + sample)
        first = tl.load(banned_start_ptr + row)
        length = tl.load(banned_length_ptr + row)
        if num_outputs >= tl.load(min_tokens_ptr + row):
            length = 0
        for start in range(0, length, LIST_BLOCK):
            listed = start + place < length
            ids = tl.load(banned_ids_ptr + first + start + place, mask=listed, other=-1)
            known = (ids >= 0) & (ids < vocab_size)
            tl.store(own_ptr + ids, float("-inf"), mask=known)
        first = tl.load(words_start_ptr + row)
        length = tl.load(words_length_ptr + row)
        output_end_ptr = output_ids_ptr + tl.load(output_start_ptr + row) + num_outputs
        for word in range(first, first + length):
            word_ptr = word_ids_ptr + tl.load(word_start_ptr + word)
            num_leads = tl.load(word_length_ptr + word) - 1
            last = tl.load(word_ptr + num_leads)
            if (num_leads <= num_outputs) & (last >= 0) & (last < vocab_size):
                differences = 0
                for start in range(0, num_leads, _WORD_BLOCK):
                    offset = start + tl.arange(0, _WORD_BLOCK)
                    lead = tl.load(word_ptr + offset, mask=offset < num_leads, other=0)
                    said_ptr = output_end_ptr - num_leads + offset
                    said = tl.load(said_ptr, mask=offset < num_leads, other=0)
                    differences += tl.sum((lead != said).to(tl.int32), 0)
                if differences == 0:
                    tl.store(own_ptr + last, float("-inf"))


@triton.jit
def _finite(score):
    return tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def record_tokens_kernel(
    tokens_ptr,
    rows_ptr,
    positions_ptr,
    seen_start_ptr,
    seen_length_ptr,
    seen_capacity_ptr,
    seen_ids_ptr,
    seen_counts_ptr,
    output_start_ptr,
    output_capacity_ptr,
    output_ids_ptr,
    LIST_BLOCK: tl.constexpr,
):
    """One sample a program."""
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample)
    if row >= 0:
        token = tl.load(tokens_ptr + sample)
        position = tl.load(positions_ptr + sample)
        if position < tl.load(output_capacity_ptr + row):
            tl.store(output_ids_ptr + tl.load(output_start_ptr + row) + position, token)
        first = tl.load(seen_start_ptr + row)
        length = tl.load(seen_length_ptr + row)
        place = tl.arange(0, LIST_BLOCK)
        found = -1
        for start in range(0, length, LIST_BLOCK):
            listed = start + place < length
            ids = tl.load(seen_ids_ptr + first + start + place, mask=listed, other=-1)
            here = tl.max(tl.where(listed & (ids == token), start + place, -1), 0)
            found = tl.maximum(found, here)
        if found >= 0:
            count = tl.load(seen_counts_ptr + first + found)
            tl.debug_barrier()  # every thread has read the count before one of them writes it
            tl.store(seen_counts_ptr + first + found, count + 1)
        elif length < tl.load(seen_capacity_ptr + row):
            tl.debug_barrier()
            tl.store(seen_ids_ptr + first + length, token)
            tl.store(seen_counts_ptr + first + length, 1)
            tl.store(seen_length_ptr + row, length + 1)


def change_logits(
    scores: Tensor,
    unusable: Tensor,
    logits: Tensor,
    logits_index: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: RowState,
) -> None:
    """Fill `scores` with the logits after bias, penalties and bans; see the twin."""
    num_samples, vocab_size = scores.shape
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError("scores must be float32 and contiguous")
    if logits.shape[1] < vocab_size or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {list(logits.shape)}: {vocab_size} columns are needed, next to each other"
        )
    if num_samples == 0:
        return
    launch = choose("change_logits", device_of(logits.device).capability)
    change_logits_kernel[(num_samples,)](
        scores,
        unusable,
        logits,
        logits.stride(0),
        logits_index,
        rows,
        positions,
        state.presence_penalty,
        state.frequency_penalty,
        state.repetition_penalty,
        state.bias_start,
        state.bias_length,
        state.bias_ids,
        state.bias_values,
        state.seen_start,
        state.seen_length,
        state.seen_ids,
        state.seen_counts,
        state.banned_start,
        state.banned_length,
        state.banned_ids,
        state.min_tokens,
        state.words_start,
        state.words_length,
        state.word_start,
        state.word_length,
        state.word_ids,
        state.output_start,
        state.output_ids,
        vocab_size,
        **launch.constants,
        enable_fp_fusion=False,  # as in the twin, every operation rounds
        **launch.options,
    )


def record_tokens(token_ids: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> None:
    """Add the tokens just drawn to the histories of their rows; see the twin."""
    if len(rows) == 0:
        return
    launch = choose("record_tokens", device_of(token_ids.device).capability)
    record_tokens_kernel[(len(rows),)](
        token_ids,
        rows,
        positions,
        state.seen_start,
        state.seen_length,
        state.seen_capacity,
        state.seen_ids,
        state.seen_counts,
        state.output_start,
        state.output_capacity,
        state.output_ids,
        **launch.constants,
        **launch.options,
    )
