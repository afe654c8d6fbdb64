"""`cbrs.Scheduler`: the contract as Python sees it; decisions are tested in `rust/core/tests`."""

import gc
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from scheduler_kit import VOCAB_SIZE, assert_drained, collect, make_scheduler, run

from cbrs import StepResult
from cbrs.errors import (
    EngineClosedError,
    OverloadedError,
    StepError,
)


def test_a_batch_has_the_arrays_of_the_contract():
    scheduler = make_scheduler()
    first = scheduler.submit(
        [1, 2, 3, 4, 5, 6], max_tokens=2, temperature=0.5, top_k=3, top_p=0.9, seed=11
    )
    batch = scheduler.step()
    second = scheduler.submit(np.array([9], np.int32), max_tokens=3, min_p=0.25)
    assert batch.outputs.started_request_ids.tolist() == [first]
    batch = scheduler.step(np.array([42], np.int32))
    assert (batch.num_seqs, batch.num_decodes, batch.num_tokens) == (2, 2, 2)
    assert (batch.max_query_len, batch.max_seq_len) == (1, 7)
    expected = {
        "token_ids": ("int32", [42, 9]),
        "positions": ("int32", [6, 0]),
        "query_start": ("int32", [0, 1, 2]),
        "seq_lens": ("int32", [7, 1]),
        "row_ids": ("int32", [0, 1]),
        "request_ids": ("uint64", [first, second]),
        "choice_ids": ("int32", [0, 0]),
        "logits_index": ("int32", [0, 1]),
        "sample_index": ("int32", [0, 1]),
        "sample_rows": ("int32", [0, 1]),
        "sample_positions": ("int32", [1, 0]),
        "new_rows": ("int32", [1]),
        "freed_rows": ("int32", []),
    }
    for name, (dtype, values) in expected.items():
        array = getattr(batch, name)
        assert (array.dtype, array.tolist()) == (np.dtype(dtype), values), name
    assert batch.block_tables.shape == (4, 16)
    assert batch.block_tables.dtype == np.int32
    blocks = batch.block_tables[[0, 1], [1, 0]]
    assert batch.slot_mapping.tolist() == [blocks[0] * 4 + 2, blocks[1] * 4]
    assert batch.slot_mapping.dtype == np.int64
    rows, columns, start, ids = batch.block_table_updates
    assert (rows.tolist(), columns.tolist(), start.tolist()) == ([1], [0], [0, 1])
    assert ids.tolist() == [blocks[1]]
    sampling = (
        batch.temperature[0],
        batch.top_k[0],
        batch.top_p[0],
        batch.seeds[0],
        batch.min_p[1],
    )
    assert sampling == (0.5, 3, np.float32(0.9), 11, 0.25)
    assert (batch.outputs.request_ids.tolist(), batch.outputs.token_ids.tolist()) == ([first], [42])
    assert (len(batch.outputs), batch.outputs.finish_reason(0)) == (1, None)
    run(scheduler, batch)
    assert_drained(scheduler)


def test_a_failed_step_ends_only_the_requests_it_touched():
    scheduler = make_scheduler(max_num_seqs=1)
    failed = scheduler.submit([1, 2, 3, 4, 5], max_tokens=4)
    waiting = scheduler.submit([1, 2, 3, 4, 5], max_tokens=1)
    batch = scheduler.step()
    scheduler.fail(batch.step_id, "out of luck")
    assert scheduler.stats()["num_used_blocks"] == scheduler.stats()["num_cached_blocks"] == 0
    batch = scheduler.step()
    outputs = batch.outputs
    assert (outputs.request_ids.tolist(), outputs.finish_reason(0)) == ([failed], "error")
    assert outputs.error(0) == "out of luck"
    assert outputs.stop_reason(0) is None
    assert outputs.started_num_cached_tokens.tolist() == [0], (
        "nothing of a failed step is published"
    )
    assert set(run(scheduler, batch)) == {failed, waiting}
    assert_drained(scheduler)


def test_a_row_without_usable_logits_fails_alone():
    scheduler = make_scheduler()
    first, second = scheduler.submit([1, 2], max_tokens=2), scheduler.submit([3], max_tokens=2)
    batch = scheduler.step()
    order = batch.request_ids.tolist()
    row_error = [request == second for request in order]
    batch = scheduler.step(
        StepResult(batch.step_id, [-1 if bad else 5 for bad in row_error], row_error=row_error)
    )
    outcome = {
        int(r): batch.outputs.finish_reason(i) for i, r in enumerate(batch.outputs.request_ids)
    }
    assert outcome == {first: None, second: "error"}
    run(scheduler, batch)
    assert_drained(scheduler)


def test_ends_say_why():
    scheduler = make_scheduler()
    by_eos = scheduler.submit([1], max_tokens=9)
    by_id = scheduler.submit([2], max_tokens=9, stop_token_ids=[0, 7], ignore_eos=True)
    by_text = scheduler.submit([3], max_tokens=9)
    cancelled = scheduler.submit([4], max_tokens=9)
    answers = {by_eos: 0, by_id: 7, by_text: 5, cancelled: 5}
    batch = scheduler.step()
    tokens = [answers[request] for request in batch.request_ids.tolist()]
    assert scheduler.cancel(cancelled)
    assert not scheduler.cancel(cancelled), "the second cancel does nothing"
    assert scheduler.finish(by_text, 0, 0, "END")
    outputs = scheduler.step(np.array(tokens, np.int32)).outputs
    ends = {
        int(request): (outputs.finish_reason(i), outputs.stop_reason(i))
        for i, request in enumerate(outputs.request_ids)
    }
    assert ends == {
        by_eos: ("stop", None),
        by_id: ("stop", 7),
        by_text: ("stop", "END"),
        cancelled: ("cancelled", None),
    }
    codes = {outputs.STOP, outputs.LENGTH, outputs.CANCELLED, outputs.ERROR, 0}
    assert len(codes) == 5
    assert set(outputs.finish_reasons.tolist()) == {outputs.STOP, outputs.CANCELLED}
    assert scheduler.stats()["num_output_tokens"] == 2, "a token dropped by finish() does not count"
    assert_drained(scheduler)


def test_e03_a_cancelled_waiter_leaves_no_trace():
    scheduler = make_scheduler(max_num_seqs=1)
    running = scheduler.submit([1], max_tokens=3)
    waiting = scheduler.submit([2], max_tokens=3)
    batch = scheduler.step()
    scheduler.cancel(waiting)
    batch = scheduler.step([5])
    ends = [
        (int(r), batch.outputs.finish_reason(i)) for i, r in enumerate(batch.outputs.request_ids)
    ]
    assert ends == [(waiting, "cancelled"), (running, None)]
    again = scheduler.submit([2], max_tokens=3)
    assert again not in (running, waiting)
    assert set(run(scheduler, batch)) == {running, waiting, again}
    assert_drained(scheduler)


def test_block_waits_for_a_submit_and_is_woken_by_it():
    scheduler = make_scheduler()
    delays = []
    for _ in range(10):
        submitted = []

        def submit_later(submitted=submitted):
            time.sleep(0.02)
            submitted.append((scheduler.submit([1, 2], max_tokens=1), time.monotonic()))

        thread = threading.Thread(target=submit_later)
        thread.start()
        batch = scheduler.step(block=True)
        delays.append(time.monotonic())
        thread.join()
        assert batch.request_ids.tolist() == [submitted[0][0]]
        delays[-1] -= submitted[0][1]
        scheduler.step([7])
    # A lost wake-up would be found by the look at signals after 100 ms, so 80 ms on average.
    assert min(delays) < 0.02, "it was woken, not timed out"


def test_block_does_not_wait_when_there_is_something_to_report():
    scheduler = make_scheduler()
    scheduler.submit([1], max_tokens=1)
    batch = scheduler.step(block=True)
    batch = scheduler.step([5], block=True)
    assert (batch.num_seqs, batch.outputs.finish_reason(0)) == (0, "length")


def test_block_ends_with_close_and_lets_other_threads_run():
    scheduler = make_scheduler()
    ticks = []

    def tick_then_close():
        for _ in range(20):
            ticks.append(time.monotonic())
            time.sleep(0.001)
        scheduler.close()

    thread = threading.Thread(target=tick_then_close)
    thread.start()
    with suppress(EngineClosedError):
        scheduler.step(block=True)
    thread.join()
    assert len(ticks) == 20, "the other thread had the GIL meanwhile"
    with pytest.raises(EngineClosedError):
        scheduler.step(block=True)


def test_a_signal_ends_a_wait_and_leaves_the_scheduler_usable():
    scheduler = make_scheduler()
    main = threading.main_thread().ident
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scheduler.step(block=True)
    assert time.monotonic() - started < 2
    scheduler.submit([1], max_tokens=1)
    assert len(run(scheduler)) == 1


def test_a_second_thread_in_step_is_refused():
    scheduler = make_scheduler()
    thread = threading.Thread(target=lambda: scheduler.step(block=True))
    thread.start()
    time.sleep(0.05)
    with pytest.raises(StepError, match="another thread"):
        scheduler.step()
    scheduler.submit([1])
    thread.join()


def test_close_ends_every_live_request_once():
    scheduler = make_scheduler(max_num_seqs=2)
    live = {scheduler.submit([1, 2], max_tokens=9) for _ in range(5)}
    scheduler.step()
    scheduler.close()
    with pytest.raises(EngineClosedError):
        scheduler.submit([1])
    batch = scheduler.step()
    assert batch.num_seqs == 0
    assert sorted(batch.outputs.request_ids.tolist()) == sorted(live)
    assert {batch.outputs.finish_reason(i) for i in range(5)} == {"cancelled"}
    with pytest.raises(EngineClosedError):
        scheduler.step()
    assert_drained(scheduler)


def test_a_view_kept_longer_than_its_scheduler_is_still_memory():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2)
    batch = scheduler.step()
    views = [
        batch.token_ids,
        batch.block_tables,
        batch.slot_mapping,
        batch.temperature,
        batch.outputs.request_ids,
    ]
    copies = [view.copy() for view in views]
    del scheduler, batch
    gc.collect()
    filler = [np.full(1000, 255, np.uint8) for _ in range(2000)]
    for view, copy in zip(views, copies, strict=True):
        np.testing.assert_array_equal(view, copy)
    del filler


def test_a_batch_stays_readable_until_its_commit_returns():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=3)
    first = scheduler.step()
    tokens = first.token_ids
    second = scheduler.step([4])
    assert tokens.tolist() == [1, 2, 3], "the arrays of two steps are apart"
    assert second.token_ids.tolist() == [4]


def test_the_manual_clock_shows_in_the_outputs():
    scheduler = make_scheduler(clock="manual")
    scheduler.submit([1], max_tokens=1)
    scheduler.set_time_ns(5_000)
    batch = scheduler.step()
    assert (batch.outputs.time_ns, scheduler.time_ns()) == (5_000, 5_000)
    with pytest.raises(ValueError, match="manual"):
        make_scheduler().set_time_ns(1)


def test_many_threads_submit_cancel_and_read_while_one_steps():
    scheduler = make_scheduler(queue_capacity=512)
    accepted, refused, stop = [], [], threading.Event()

    def produce(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            try:
                request = scheduler.submit(
                    rng.integers(1, VOCAB_SIZE, rng.integers(1, 12)), max_tokens=3
                )
            except OverloadedError:
                refused.append(1)
                time.sleep(0.001)
                continue
            accepted.append(request)
            if rng.random() < 0.3:
                scheduler.cancel(request)
            scheduler.stats()

    events = {}

    def drive():
        batch = scheduler.step()
        while batch.num_seqs or not stop.is_set():
            collect(batch.outputs, events)
            if batch.num_seqs == 0:
                time.sleep(0.0005)
            batch = scheduler.step([7] * len(batch.sample_index))
        collect(batch.outputs, events)

    driver = threading.Thread(target=drive)
    producers = [threading.Thread(target=produce, args=(seed,)) for seed in range(8)]
    for thread in [driver, *producers]:
        thread.start()
    for thread in producers:
        thread.join()
    stop.set()
    driver.join()
    for request, of_one in run(scheduler).items():
        events.setdefault(request, []).extend(of_one)
    assert len(accepted) + len(refused) == 8 * 300
    assert len(set(accepted)) == len(accepted)
    assert set(events) == set(accepted)
    for of_one in events.values():
        assert [reason for _, reason in of_one if reason] == [of_one[-1][1]], (
            "one end, and it is the last event"
        )
    assert_drained(scheduler)


def test_reset_forgets_cached_prefixes():
    scheduler = make_scheduler()
    prompt = list(range(1, 14))
    cached = []
    for reset in (False, False, True):
        if reset:
            scheduler.reset_prefix_cache()
        scheduler.submit(prompt, max_tokens=1)
        batch = scheduler.step()
        cached.append(int(batch.outputs.started_num_cached_tokens[0]))
        run(scheduler, batch)
    assert cached == [0, 12, 0]
    assert scheduler.stats()["num_cached_prompt_tokens"] == 12


def test_block_tables_are_read_only_because_the_scheduler_reads_them_again():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3])
    batch = scheduler.step()
    with pytest.raises(ValueError, match="read-only"):
        batch.block_tables[:] = -1
    assert batch.token_ids.flags.writeable, "torch.from_numpy takes the others without a warning"


def test_every_attribute_of_a_batch_can_be_read_again_and_again():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2, logprobs=1, prompt_logprobs=1)
    batch = scheduler.step()
    for owner in (batch, batch.outputs, batch.new_row_tables):
        names = [name for name in dir(owner) if not name.startswith("_")]
        for name in names:
            first, second = getattr(owner, name), getattr(owner, name)
            if isinstance(first, np.ndarray):
                np.testing.assert_array_equal(first, second)


def test_what_a_caller_writes_to_the_arrays_changes_no_check_of_the_result():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2, logprobs=0)
    scheduler.step().num_logprobs[:] = -1
    with pytest.raises(StepError, match="logprobs has 0 entries, but step 1 needs 1"):
        scheduler.step([5])
