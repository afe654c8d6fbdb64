"""Arrays of batches are views that the scheduler keeps: right in every step, harmless for ever."""

import gc
import threading
import weakref

import numpy as np
import pytest
from scheduler_kit import assert_drained, make_scheduler, run

import cbrs
from cbrs.errors import StepError

PER_TOKEN = ("token_ids", "positions", "slot_mapping")
PER_SEQUENCE = ("seq_lens", "row_ids", "request_ids", "choice_ids")
PER_SAMPLE = ("sample_index", "sample_rows", "sample_positions", "sample_choices")
PER_EVENT = ("request_ids", "choice_ids", "token_ids", "finish_reasons", "stop_ids")
MAX_NUM_SEQS = 100


def lengths(batch):
    """Lengths of the lent arrays of a batch, by what they count."""
    return {
        "tokens": {len(getattr(batch, name)) for name in PER_TOKEN},
        "sequences": {len(getattr(batch, name)) for name in PER_SEQUENCE},
        "offsets": {len(batch.query_start)},
        "samples": {len(getattr(batch, name)) for name in PER_SAMPLE},
        "events": {len(getattr(batch.outputs, name)) for name in PER_EVENT},
    }


def expected_lengths(batch, num_samples):
    return {
        "tokens": {batch.num_tokens},
        "sequences": {batch.num_seqs},
        "offsets": {batch.num_seqs + 1},
        "samples": {num_samples},
        "events": {len(batch.outputs)},
    }


def changing_load(num_steps=150):
    """Batches of a load whose members come and go; with each, the answers to the one before."""
    scheduler = make_scheduler(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=160, num_blocks=600, eos_token_ids=()
    )
    rng = np.random.default_rng(5)
    batch, answers = scheduler.step(), {}
    for step in range(num_steps):
        # Waves: at times many sequences fill a block in one step, at times none runs.
        for _ in range(rng.integers(0, 40) if step % 30 < 10 else 0):
            prompt = rng.integers(1, 90, rng.integers(1, 30))
            scheduler.submit(prompt, max_tokens=int(rng.integers(1, 20)))
        yield batch, answers
        request_of = dict(zip(batch.row_ids.tolist(), batch.request_ids.tolist(), strict=True))
        tokens = rng.integers(1, 90, len(batch.sample_index), dtype=np.int32)
        sampled = [request_of[row] for row in batch.sample_rows.tolist()]
        answers = dict(zip(sampled, tokens.tolist(), strict=True))
        batch = scheduler.step(tokens)


def test_arrays_have_the_lengths_and_contents_of_their_batch_while_members_come_and_go():
    mirror = np.full((MAX_NUM_SEQS, 16), -1, np.int32)
    num_updates, num_seqs = set(), set()
    for batch, answers in changing_load():
        assert lengths(batch) == expected_lengths(batch, len(batch.sample_index))
        events = dict(
            zip(batch.outputs.request_ids.tolist(), batch.outputs.token_ids.tolist(), strict=True)
        )
        assert events == answers
        starts = batch.query_start.tolist()
        assert (starts[0], starts[-1]) == (0, batch.num_tokens)
        rows, columns, start, ids = batch.block_table_updates
        for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
            run_ids = ids[start[i] : start[i + 1]]
            mirror[row, column : column + len(run_ids)] = run_ids
        num_updates.add(len(rows))
        num_seqs.add(batch.num_seqs)
        for i, (row, seq_len) in enumerate(zip(batch.row_ids, batch.seq_lens, strict=True)):
            num_blocks = -(-seq_len // 4)
            blocks = batch.block_tables[row, :num_blocks]
            np.testing.assert_array_equal(mirror[row, :num_blocks], blocks)
            positions = np.arange(seq_len - (starts[i + 1] - starts[i]), seq_len)
            mine = slice(starts[i], starts[i + 1])
            np.testing.assert_array_equal(batch.positions[mine], positions)
            slots = blocks[positions // 4] * 4 + positions % 4
            np.testing.assert_array_equal(batch.slot_mapping[mine], slots)
    assert len(num_seqs) > 20, "membership did not change"
    assert 0 in num_updates
    assert max(num_updates) > 1


def test_a_batch_kept_after_its_time_keeps_its_lengths_and_can_be_read():
    kept = []
    for batch, _ in changing_load(60):
        num_samples = len(batch.sample_index)
        updates = tuple(len(array) for array in batch.block_table_updates)
        copies = (batch.new_rows.copy(), batch.freed_rows.copy())
        kept.append((batch, expected_lengths(batch, num_samples), updates, copies))
    del batch
    gc.collect()
    for batch, expected, updates, (new_rows, freed_rows) in kept:
        assert lengths(batch) == expected
        assert tuple(len(array) for array in batch.block_table_updates) == updates
        assert all((array >= 0).all() for array in batch.block_table_updates)
        assert ((batch.token_ids >= 0) & (batch.token_ids < 100)).all()
        np.testing.assert_array_equal(batch.new_rows, new_rows)
        np.testing.assert_array_equal(batch.freed_rows, freed_rows)


@pytest.mark.parametrize("kept_name", [None, "token_ids", "block_tables", "temperature"])
def test_a_scheduler_and_its_memory_go_with_the_last_reference(kept_name):
    scheduler = make_scheduler()
    scheduler.submit(range(1, 8), max_tokens=20)
    batch = scheduler.step()
    for token in range(1, 12):
        batch = scheduler.step([token])
        assert len(batch.block_table_updates) == 4
    kept = kept_name and getattr(batch, kept_name)
    scheduler_ref, memory_ref = weakref.ref(scheduler), weakref.ref(batch.token_ids.base)
    del scheduler, batch
    # No cycle: nothing needs the garbage collector.
    assert scheduler_ref() is None
    assert (memory_ref() is None) == (kept_name is None)
    if kept_name is not None:
        kept.sum()
        del kept
        assert memory_ref() is None


def test_a_batch_outlives_its_scheduler():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2)
    batch = scheduler.step()
    del scheduler
    assert batch.token_ids.tolist() == [1, 2, 3]
    assert batch.outputs.started_num_cached_tokens.tolist() == [0]


def test_python_code_that_runs_when_a_view_goes_may_use_the_scheduler():
    scheduler = make_scheduler(eos_token_ids=())
    seen = []

    def look(_):
        scheduler.check_invariants()
        with pytest.raises(StepError, match="another thread is in step"):
            scheduler.step()
        seen.append(scheduler.stats()["num_running"])

    first = scheduler.submit([1, 2], max_tokens=9)
    batch = scheduler.step()
    refs = [weakref.ref(batch.row_ids, look)]
    del batch
    batch = scheduler.step([3])
    refs.append(weakref.ref(batch.row_ids, look))
    del batch
    scheduler.submit([4, 5], max_tokens=9)
    # The arrays get longer, so the views of before are dropped within these two steps.
    scheduler.step([6])
    scheduler.step([7, 7])
    assert seen == [2, 2]
    assert scheduler.cancel(first)
    run(scheduler, scheduler.step([7, 7]))
    assert_drained(scheduler)


def test_what_is_written_into_a_result_during_a_step_never_becomes_a_token_unchecked():
    scheduler = make_scheduler(
        eos_token_ids=(), queue_capacity=60_000, max_num_seqs=4, max_model_len=64
    )
    result = np.full(4, 5, np.int32)
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            result[:] = -1
            result[:] = 5

    writer = threading.Thread(target=write)
    writer.start()
    num_committed, batch = 0, scheduler.step()
    try:
        for _ in range(100):
            # So many arrivals make the step long: it runs without the GIL, beside the writer.
            for _ in range(520):
                scheduler.submit([1, 2], max_tokens=60)
            try:
                batch = scheduler.step(result[: len(batch.sample_index)])
            except StepError:
                continue
            assert set(batch.outputs.token_ids.tolist()) <= {5}
            num_committed += len(batch.outputs)
    finally:
        is_over.set()
        writer.join()
    assert num_committed > 0
    scheduler.close()
    scheduler.step()
    assert_drained(scheduler)


@pytest.mark.parametrize("num_seqs", [64, 65, 70])
def test_updates_of_many_sequences_in_one_step_are_told_whole(num_seqs):
    config = cbrs.SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=4 * num_seqs,
        num_blocks=8 * num_seqs,
        max_model_len=32,
        block_size=4,
    )
    scheduler = cbrs.Scheduler(config)
    for first in range(num_seqs):
        scheduler.submit([first, 1, 2, 3], max_tokens=20)
    batch = scheduler.step()
    mirror = np.full(batch.block_tables.shape, -1, np.int32)
    most = 0
    while batch.num_seqs:
        rows, columns, start, ids = batch.block_table_updates
        assert start[-1] == len(ids)
        for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
            mirror[row, column : column + start[i + 1] - start[i]] = ids[start[i] : start[i + 1]]
        for row, seq_len in zip(batch.row_ids, batch.seq_lens, strict=True):
            num_blocks = -(-seq_len // 4)
            expected = batch.block_tables[row, :num_blocks]
            np.testing.assert_array_equal(mirror[row, :num_blocks], expected)
        most = max(most, len(rows)) if batch.num_decodes else most
        batch = scheduler.step(np.zeros(len(batch.sample_index), np.int32))
    assert most == num_seqs
