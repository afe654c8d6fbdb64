"""What rank 0 sends the other ranks: nothing is lost on the way, and nothing else is taken."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cbrs import LLM, Scheduler, SchedulerConfig
from cbrs.parallel.message import (
    HEADER_WORDS,
    StepReader,
    StepWriter,
    apply_updates,
    receive_json,
    send_json,
)

ARRAYS = (
    "slot_mapping",
    "token_ids",
    "positions",
    "query_start",
    "seq_lens",
    "row_ids",
    "logits_index",
)
NUMBERS = ("num_seqs", "num_decodes", "num_tokens", "max_query_len", "max_seq_len")


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_batches_of_the_scheduler_arrive_whole_and_tables_follow(ends):
    ours, theirs = ends
    random = np.random.default_rng(3)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=40,
            num_blocks=24,
            max_model_len=64,
            block_size=4,
            vocab_size=50,
        )
    )
    writer, reader = StepWriter(), StepReader(theirs)
    result, num_sent = None, 0
    for step in range(400):
        if random.random() < 0.3:
            prompt = random.integers(0, 3, random.integers(1, 40)).astype(np.int32)
            scheduler.submit(prompt, max_tokens=int(random.integers(1, 20)), ignore_eos=True)
        batch = scheduler.step(result)
        result = random.integers(0, 50, len(batch.sample_index)).astype(np.int32)
        if batch.num_seqs == 0:
            result = None
            continue
        if step % 7 == 0:  # a batch that is not run, and then is
            ours.sendall(writer.write_changes(batch))
            assert reader.read().num_seqs == 0
        ours.sendall(writer.write(batch))
        got = reader.read()
        num_sent += 1
        for name in NUMBERS:
            assert getattr(got, name) == getattr(batch, name)
        for name in ARRAYS:
            sent, received = getattr(batch, name), getattr(got, name)
            assert received.dtype == sent.dtype
            assert received.flags.writeable
            assert np.array_equal(received, sent)
        for sent, received in zip(batch.block_table_updates, got.block_table_updates, strict=True):
            assert np.array_equal(received, sent)
        for row, length in zip(batch.row_ids, batch.seq_lens, strict=True):
            blocks = -(-length // 4)
            tables = batch.block_tables[row, :blocks], got.block_tables[row, :blocks]
            assert np.array_equal(*tables)
    assert num_sent > 200
    assert scheduler.stats()["num_preemptions"] > 0
    scheduler.close()


def test_a_message_grows_with_its_batch(ends):
    ours, theirs = ends
    tokens = 30_000
    batch = SimpleNamespace(
        num_seqs=1,
        num_decodes=0,
        num_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        slot_mapping=np.arange(tokens, dtype=np.int64),
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32) + 1,
        query_start=np.array([0, tokens], np.int32),
        seq_lens=np.array([tokens], np.int32),
        row_ids=np.zeros(1, np.int32),
        logits_index=np.array([tokens - 1], np.int32),
        block_tables=np.zeros((2, 3), np.int32),
        block_table_updates=tuple(np.array(v, np.int32) for v in ([1], [1], [0, 2], [8, 9])),
    )
    # More than a socket holds: both sides work at once.
    message = StepWriter().write(batch)
    sender = threading.Thread(target=ours.sendall, args=(message,))
    sender.start()
    got = StepReader(theirs).read()
    sender.join()
    assert np.array_equal(got.positions, batch.positions)
    assert got.block_tables.tolist() == [[0, 0, 0], [0, 8, 9]]


def test_updates_are_written_run_by_run():
    random = np.random.default_rng(5)
    for _ in range(50):
        tables, expected = np.zeros((2, 5, 9), np.int32)
        lengths = random.integers(1, 4, random.integers(0, 5))
        rows = random.permutation(5)[: len(lengths)].astype(np.int32)
        columns = random.integers(0, 6, len(lengths)).astype(np.int32)
        start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = random.integers(1, 99, lengths.sum()).astype(np.int32)
        for i, (row, column) in enumerate(zip(rows, columns, strict=True)):
            expected[row, column : column + lengths[i]] = ids[start[i] : start[i + 1]]
        apply_updates(tables, (rows, columns, start, ids))
        assert np.array_equal(tables, expected)


def test_what_is_no_step_is_refused(ends):
    ours, theirs = ends
    ours.sendall(np.arange(HEADER_WORDS).tobytes())
    with pytest.raises(ValueError, match=r"no step begins with \[0, 1, 2"):
        StepReader(theirs).read()


@pytest.mark.parametrize("sent", [b"", b"\x05"])
def test_the_end_of_the_other_side_is_an_end_of_file(sent, ends):
    ours, theirs = ends
    ours.sendall(sent)
    ours.close()
    with pytest.raises(EOFError, match="gone"):
        StepReader(theirs).read()
    with pytest.raises(EOFError, match="gone"):
        receive_json(theirs)


def test_settings_arrive_and_nothing_longer_is_read(ends):
    ours, theirs = ends
    send_json(ours, {"a": [1, "ü"]})
    assert receive_json(theirs) == {"a": [1, "ü"]}
    ours.sendall((1 << 40).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="above the limit of 1048576"):
        receive_json(theirs)


def test_a_batch_that_an_interrupt_kept_from_running_is_told_to_the_ranks():
    with LLM("null", max_model_len=64) as llm:
        engine, skipped = llm.engine, []
        engine._runner.skip = skipped.append
        engine.scheduler.submit([1, 2, 3], max_tokens=2)
        batch = engine._schedule()  # and nothing after it
        assert batch.num_seqs == 1
        engine.step()
        assert [item.step_id for item in skipped] == [batch.step_id]
