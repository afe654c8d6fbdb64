# ruff: noqa: B018 (an attribute is fetched for the time that it takes)
"""Fetching every array of a batch, written out as a runner's code would do it."""

from __future__ import annotations

import numpy as np

import cbrs


def fetch_batch(batch: cbrs.Batch) -> None:
    """Fetch every array of a batch, as numpy views."""
    batch.token_ids
    batch.positions
    batch.slot_mapping
    batch.query_start
    batch.seq_lens
    batch.row_ids
    batch.request_ids
    batch.choice_ids
    batch.logits_index
    batch.sample_index
    batch.sample_rows
    batch.sample_positions
    batch.sample_choices
    batch.prompt_logits_index
    batch.prompt_target_ids
    batch.prompt_rows
    batch.num_prompt_logprobs
    batch.new_rows
    batch.new_row_tables
    batch.freed_rows
    batch.block_table_updates
    batch.block_tables
    batch.temperature
    batch.top_k
    batch.top_p
    batch.min_p
    batch.seeds
    batch.presence_penalty
    batch.frequency_penalty
    batch.repetition_penalty
    batch.min_tokens
    batch.num_logprobs


def fetch_outputs(outputs: cbrs.StepOutput) -> None:
    """Fetch every array of a step's events."""
    outputs.request_ids
    outputs.choice_ids
    outputs.token_ids
    outputs.finish_reasons
    outputs.stop_ids
    outputs.started_request_ids
    outputs.started_num_cached_tokens
    outputs.logprob_events
    outputs.logprobs
    outputs.prompt_logprob_requests
    outputs.prompt_logprob_positions
    outputs.prompt_logprobs


def fetch(batch: cbrs.Batch) -> None:
    """Fetch every array of a batch and of its outputs."""
    fetch_batch(batch)
    fetch_outputs(batch.outputs)


def check_that_all_are_fetched(batch: cbrs.Batch) -> None:
    """Fail if an array exists that the functions above leave out: a later one must count, too."""
    for owner, function in ((batch, fetch_batch), (batch.outputs, fetch_outputs)):
        names = [name for name in dir(type(owner)) if not name.startswith("_")]
        arrays = {name for name in names if isinstance(getattr(owner, name), np.ndarray)}
        missing = arrays - set(function.__code__.co_names)
        assert not missing, f"{function.__name__} leaves out {sorted(missing)}"
