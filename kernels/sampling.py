"""Draws a token for each sample on the device, without a word to the host; see `twins/sampling.py`.

One program takes one row. Without top_k, top_p and min_p two readings of the row are enough: its
largest logit, and the draw. With them `select` narrows the row down first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import choose, device_of
from .select import (
    ALL,
    CAPACITY,
    DEPTHS,
    LOWEST,
    collect,
    key_of,
    largest_of,
    mass_from,
    profile,
    threshold_of_count,
    threshold_of_mass,
    weight_of,
)
from .twins.sampling import SamplingParameters

_GREEDY_TEMPERATURE = tl.constexpr(1e-4)
_LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def sample_kernel(
    token_ptr,
    error_ptr,
    logits_ptr,
    logits_stride,
    index_ptr,
    rows_ptr,
    positions_ptr,
    choices_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    unusable_ptr,
    workspace_ptr,  # int32 [num_samples, 2, CAPACITY]
    vocab_size,
    draw,
    HAS_UNUSABLE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sample a program."""
    sample = tl.program_id(0)
    row = tl.load(rows_ptr + sample)
    token = 0
    error = 0
    if row >= 0:
        row_ptr = logits_ptr + tl.load(index_ptr + sample).to(tl.int64) * logits_stride
        largest, first = largest_of(row_ptr, vocab_size, BLOCK)
        if HAS_UNUSABLE:
            is_bad = tl.load(unusable_ptr + sample) != 0
        else:
            is_bad = (tl.abs(largest) < float("inf")) == 0
        error = tl.where(is_bad, 1, tl.where(largest == float("-inf"), 2, 0))
        temperature = tl.load(temperature_ptr + row)
        if error == 0:
            if temperature <= _GREEDY_TEMPERATURE:
                token = first
            else:
                seed = tl.load(seeds_ptr + row)
                position = tl.load(positions_ptr + sample)
                choice = tl.load(choices_ptr + sample)
                top_k = tl.load(top_k_ptr + row)
                top_p = tl.load(top_p_ptr + row)
                min_p = tl.minimum(tl.load(min_p_ptr + row), 1.0)
                has_top_k = (top_k > 0) & (top_k < vocab_size)
                if has_top_k | (top_p < 1.0) | (min_p > 0.0):
                    top_k = tl.where(has_top_k, top_k, 0)
                    own_ptr = workspace_ptr + sample.to(tl.int64) * 2 * CAPACITY
                    number_ptr = own_ptr.to(tl.pointer_type(tl.float32))
                    id_ptr = own_ptr + CAPACITY
                    total, cut = _cut(
                        row_ptr,
                        vocab_size,
                        largest,
                        temperature,
                        top_k,
                        top_p,
                        min_p,
                        CAPACITY,
                        BLOCK,
                    )
                    # Code for one source only: it is long.
                    source_ptr = row_ptr
                    size = vocab_size
                    num_listed = 0
                    if cut > float("-inf"):
                        size = collect(row_ptr, vocab_size, cut, number_ptr, id_ptr, BLOCK)
                        num_listed = size
                        source_ptr = number_ptr
                    token = _draw_restricted(
                        source_ptr,
                        id_ptr,
                        num_listed,
                        size,
                        largest,
                        temperature,
                        top_k,
                        top_p,
                        min_p,
                        total,
                        seed,
                        position,
                        choice,
                        draw,
                        BLOCK,
                    )
                else:
                    token = _draw_any(
                        row_ptr,
                        vocab_size,
                        largest,
                        temperature,
                        seed,
                        position,
                        choice,
                        draw,
                        BLOCK,
                    )
    tl.store(token_ptr + sample, token)
    tl.store(error_ptr + sample, error)


@triton.jit
def _cut(
    row_ptr,
    size,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the sum of all weights, and a logit below which nothing is kept.

    Minus infinity if more than `CAPACITY` would remain.
    """
    total, count_0, count_1, count_2, count_3, mass_0, mass_1, mass_2, mass_3 = profile(
        row_ptr, size, largest, temperature, BLOCK
    )
    # A little more, so that rounding does not leave out what the target needs.
    mass = top_p * total * 1.00001
    cut = -float("inf") + largest * 0.0
    for step in tl.static_range(4):
        if step == 0:
            depth, count, reached = DEPTHS[3], count_3, mass_3
        elif step == 1:
            depth, count, reached = DEPTHS[2], count_2, mass_2
        elif step == 2:
            depth, count, reached = DEPTHS[1], count_1, mass_1
        else:
            depth, count, reached = DEPTHS[0], count_0, mass_0
        has_all = tl.where(top_k > 0, count >= top_k, (top_p < 1.0) & (reached >= mass))
        # Weights of at least min_p are all that stay, unless sums over more are needed.
        has_all = has_all | (
            (tl.exp(-depth + temperature * 0.0) <= min_p * 0.9999) & ((top_k == 0) | (top_p >= 1.0))
        )
        cut = tl.where(has_all & (count <= CAPACITY), largest - temperature * depth, cut)
    return total, cut


@triton.jit
def _draw_restricted(
    number_ptr,
    id_ptr,
    num_listed,
    size,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    total,
    seed,
    position,
    choice,
    draw,
    BLOCK: tl.constexpr,
):
    """Return the token drawn from `size` numbers, whose ids are listed or are their places."""
    threshold = LOWEST
    room = ALL
    if top_k > 0:
        threshold, room = threshold_of_count(number_ptr, size, top_k, largest, BLOCK)
    if top_p < 1.0:
        mass = total.to(tl.float64)
        if top_k > 0:
            above_count, above = mass_from(
                number_ptr, size, threshold + 1, largest, temperature, BLOCK
            )
            count, mass = mass_from(number_ptr, size, threshold, largest, temperature, BLOCK)
            equals = tl.maximum(count - above_count, 1)
            share = tl.minimum(room, equals).to(tl.float64) / equals.to(tl.float64)
            mass = above + (mass - above) * share
        threshold, room = threshold_of_mass(
            number_ptr,
            size,
            top_p.to(tl.float64) * mass,
            threshold,
            room,
            largest,
            temperature,
            BLOCK,
        )
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], _LAST_ID, tl.int32)
    equal_before = 0
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        number = tl.load(number_ptr + start + lane, mask=inside, other=float("-inf"))
        is_listed = start + lane < num_listed
        listed = tl.load(id_ptr + start + lane, mask=is_listed, other=0)
        ids = tl.where(is_listed, listed, start + lane)
        key = key_of(number)
        equal = inside & (key == threshold)
        rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)  # from 1
        equal_before += tl.sum(equal.to(tl.int32), 0)
        kept = inside & ((key > threshold) | (equal & (rank <= room)))
        kept = kept & (weight_of(number, largest, temperature) >= min_p)
        noise = _gumbel(_word(seed, position, choice, draw, ids))
        score = (number - largest) / temperature + noise
        score = tl.where(kept, score, float("-inf"))
        best_id = tl.where(score > best, ids, best_id)
        best = tl.maximum(best, score)
    found = tl.max(best, 0)
    return tl.min(tl.where(best == found, best_id, _LAST_ID), 0)


@triton.jit
def _draw_any(
    row_ptr, size, largest, temperature, seed, position, choice, draw, BLOCK: tl.constexpr
):
    """Return the token drawn from a whole row."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], _LAST_ID, tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + lane
        number = tl.load(row_ptr + ids, mask=ids < size, other=float("-inf"))
        group = start // 4 + tl.arange(0, BLOCK // 4)
        w0, w1, w2, w3 = _words(seed, position, choice, draw, group)
        word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # [BLOCK]
        score = (number - largest) / temperature + _gumbel(word)
        best_id = tl.where(score > best, ids, best_id)
        best = tl.maximum(best, score)
    found = tl.max(best, 0)
    return tl.min(tl.where(best == found, best_id, _LAST_ID), 0)


@triton.jit
def _words(seed, position, choice, draw, group):
    """Return four words for each group of ids: Philox of (position, choice, draw, group)."""
    zero = group * 0
    return tl.philox(seed, zero + position, zero + choice, zero + draw, group)


@triton.jit
def _word(seed, position, choice, draw, ids):
    w0, w1, w2, w3 = _words(seed, position, choice, draw, ids // 4)
    lower = tl.where((ids & 1) == 0, w0, w1)
    upper = tl.where((ids & 1) == 0, w2, w3)
    return tl.where((ids & 2) == 0, lower, upper)


@triton.jit
def _gumbel(word):
    """Return -log(-log(1 - v)) for v = (word + 0.5) / 2^32, from what is smaller of v and 1 - v."""
    v = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(rest)))


def sample_workspace_size(num_samples: int) -> int:
    """Return how many int32 elements of workspace `sample` needs for up to `num_samples`."""
    return num_samples * 2 * CAPACITY


def sample(
    token_ids: Tensor,
    errors: Tensor,
    logits: Tensor,
    logits_index: Tensor,
    rows: Tensor,
    positions: Tensor,
    choices: Tensor,
    parameters: SamplingParameters,
    vocab_size: int,
    unusable: Tensor | None = None,
    workspace: Tensor | None = None,
    draw: int = 0,
) -> None:
    """Fill `token_ids` and `errors`; see the twin.

    Without a `workspace` of `sample_workspace_size` int32 elements one is allocated.
    """
    num_samples = len(rows)
    if num_samples == 0:
        return
    check_logits(logits, vocab_size)
    workspace = workspace_of(workspace, sample_workspace_size(num_samples), logits.device)
    launch = choose("sample", device_of(logits.device).capability)
    sample_kernel[(num_samples,)](
        token_ids,
        errors,
        logits,
        logits.stride(0),
        logits_index,
        rows,
        positions,
        choices,
        parameters.temperature,
        parameters.top_k,
        parameters.top_p,
        parameters.min_p,
        parameters.seeds,
        rows if unusable is None else unusable,
        workspace,
        vocab_size,
        draw,
        HAS_UNUSABLE=unusable is not None,
        CAPACITY=CAPACITY,
        **launch.constants,
        **launch.options,
    )


def check_logits(logits: Tensor, vocab_size: int) -> None:
    """Raise `ValueError` if `logits` are not float32 rows of at least `vocab_size` numbers."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.shape[1] < vocab_size:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}: float32 rows of at least "
            f"{vocab_size} numbers next to each other are needed"
        )


def workspace_of(workspace: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return the workspace, or a new one; raises `ValueError` if it is too small."""
    if workspace is None:
        return torch.empty(size, dtype=torch.int32, device=device)
    if workspace.dtype != torch.int32 or workspace.numel() < size:
        raise ValueError(
            f"the workspace has {workspace.numel()} elements of {workspace.dtype}: {size} of int32 "
            "are needed"
        )
    return workspace
