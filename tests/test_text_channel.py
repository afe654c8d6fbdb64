"""Output as it comes: what channels bring, when they wake their reader, and how they end."""

import asyncio
import gc
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import kit
import numpy as np
import pytest
from stream_kit import BYTE, TIMEOUT_S, Rig, byte_ids, text_of

from cbrs._core import OutputChannel
from cbrs.errors import EngineClosedError


def test_f01_nothing_of_a_stop_string_is_streamed():
    rig = Rig(byte_ids("ABCDEFGH"))
    rig.submit(stop=["DEFG"])
    updates = rig.run()
    assert [update.text for update in updates if update.token_ids] == [*"ABC", "", "", "", ""]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "DEFG")
    rig.submit(stop="DEFX", max_tokens=8)
    assert text_of(rig.run()) == "ABCDEFGH"


def test_f06_a_character_of_two_tokens_is_one_delta():
    rig = Rig(byte_ids(b"\xc4\x8f"))
    rig.submit(max_tokens=2)
    assert [update.text for update in rig.run()] == ["", "\u010f"]


def test_f08_every_token_of_plain_text_is_one_update_of_its_step():
    text = "twelve busy cats sat down on a warm and quiet roof"
    rig = Rig([*byte_ids(text), kit.EOS], clock="manual")
    rig.submit()
    steps, deadline = [], time.monotonic() + TIMEOUT_S
    while not steps or not steps[-1][-1].is_last:
        rig.step()
        rig.scheduler.set_time_ns(rig.scheduler.time_ns() + 1_000_000)
        if rig.batch.outputs.request_ids.size:
            assert select.select([rig.channel.fileno()], [], [], TIMEOUT_S)[0]
            steps.append(rig.channel.take())
        assert time.monotonic() < deadline
    assert [len(step) for step in steps] == [1] * 51
    assert [step[0].text for step in steps] == [*text, ""]
    times = [step[0].time_s for step in steps]
    assert np.allclose(np.diff(times), 1e-3)
    assert [step[0].finish_reason for step in steps] == [None] * 50 + ["stop"]
    assert steps[-1][0].token_ids == [kit.EOS]


def test_f10_spaces_before_a_word_are_streamed():
    rig = Rig(byte_ids("x    word"))
    rig.submit(max_tokens=9)
    assert text_of(rig.run()) == "x    word"


def test_f17_tokens_outside_the_byte_alphabet_are_streamed_as_they_are():
    rig = Rig([BYTE.token_to_id("\n"), BYTE.token_to_id("‼")])
    rig.submit(max_tokens=2)
    assert [update.text for update in rig.run()] == ["\n", "‼"]


def test_c03_the_first_update_of_a_chunked_prompt_carries_a_real_token():
    rig = Rig(byte_ids("abc"), max_num_batched_tokens=16)
    rig.submit(prompt=[2] * 70, max_tokens=3)
    num_steps = 0
    while not rig.batch.sample_rows.size:
        rig.step()
        num_steps += 1
        assert select.select([rig.channel.fileno()], [], [], 0.005)[0] == []
    assert num_steps == 5
    updates = rig.run()
    assert [update.token_ids for update in updates] == [[token] for token in byte_ids("abc")]
    assert updates[0].time_s >= updates[0].first_scheduled_time_s >= updates[0].arrival_time_s
    assert updates[0].prompt_token_ids.tolist() == [2] * 70


def test_updates_joined_are_the_result_also_with_logprobs():
    rig = Rig(byte_ids("né wörld"))
    parameters = {"max_tokens": 30, "stop": ["wör"], "logprobs": 1}
    rig.submit(index=3, **parameters)
    updates = rig.run()
    rig.processor.submit([2, 3], index=4, **parameters)
    rig.settle()
    (result,) = rig.processor.take_finished()
    (output,) = result.outputs
    assert text_of(updates) == output.text == "né "
    tokens = [token for update in updates for token in update.token_ids]
    assert tokens == output.token_ids.tolist() == byte_ids("né wör")
    assert (output.num_logprobs, len(output.logprobs)) == (1, len(tokens))
    assert output.cumulative_logprob == -sum(tokens)
    assert output.logprobs.start.tolist() == list(range(0, 2 * len(tokens) + 1, 2))
    for name in ("token_ids", "values", "ranks"):
        parts = [getattr(update.logprobs, name) for update in updates]
        assert np.concatenate(parts).tolist() == getattr(output.logprobs, name).tolist()
    assert output.logprobs.token_ids[::2].tolist() == tokens
    assert output.logprobs.ranks.tolist() == [token + 1 for token in tokens]
    assert {update.index for update in updates} == {3}
    assert "choice=0" in repr(updates[0])


def test_one_wake_up_announces_everything_that_is_unread():
    rig = Rig(byte_ids("abcdefgh"))
    for index in range(4):
        rig.submit(index=index, max_tokens=8)
    rig.settle()
    assert os.read(rig.channel.fileno(), 100) == b"\x01", "eight steps of four streams"
    updates = rig.channel.take()
    assert len(updates) == 32
    assert rig.channel.take() == []
    rig.submit(max_tokens=1)
    rig.settle()
    assert select.select([rig.channel.fileno()], [], [], TIMEOUT_S)[0]
    assert len(rig.channel.take()) == 1
    assert select.select([rig.channel.fileno()], [], [], 0)[0] == []


def test_an_event_loop_reads_many_streams_while_another_thread_drives():
    rig = Rig(byte_ids("one two three four "), max_num_seqs=8, num_blocks=256)
    texts = [""] * 24

    async def read():
        loop, num_left = asyncio.get_running_loop(), len(texts)
        done = loop.create_future()

        def on_readable():
            nonlocal num_left
            for update in rig.channel.take():
                texts[update.index] += update.text
                num_left -= update.is_last
            if num_left == 0 and not done.done():
                done.set_result(None)

        loop.add_reader(rig.channel.fileno(), on_readable)
        for index in range(len(texts)):
            rig.submit(index=index, max_tokens=index + 1)
            await asyncio.sleep(0)
        await asyncio.wait_for(done, TIMEOUT_S)
        loop.remove_reader(rig.channel.fileno())

    is_done = threading.Event()

    def drive():
        while not is_done.is_set():
            if not rig.step():
                time.sleep(0.001)

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        asyncio.run(read())
    finally:
        is_done.set()
        driver.join(TIMEOUT_S)
    assert texts == [("one two three four " * 2)[: index + 1] for index in range(len(texts))]


def test_a_closed_channel_cancels_its_requests_and_takes_no_more():
    rig = Rig(byte_ids("abc"))
    for _ in range(6):
        rig.submit(max_tokens=100)
    rig.step()
    rig.step()
    rig.channel.close()
    rig.channel.close()
    assert rig.channel.is_closed
    assert rig.channel.take() == []
    with pytest.raises(ValueError, match="the channel is closed"):
        rig.channel.fileno()
    with pytest.raises(EngineClosedError):
        rig.submit()
    rig.settle()
    stats = rig.scheduler.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0
    assert rig.processor.take_finished() == []


def test_a_dropped_channel_is_closed_and_leaves_no_descriptor():
    rig = Rig(byte_ids("abc"))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        channel = OutputChannel()
        rig.processor.submit([2], index=0, channel=channel, max_tokens=100)
        gone = weakref.ref(channel)
        del channel
        assert gone() is None
    assert len(os.listdir("/proc/self/fd")) == before
    rig.settle()
    assert rig.scheduler.stats()["num_running"] == 0


def test_streams_end_when_the_processor_is_closed():
    rig = Rig(byte_ids("abc"))
    for index in range(3):
        rig.submit(index=index, max_tokens=100)
    rig.step()
    rig.step()
    rig.processor.close()
    ends = [update for update in rig.channel.take() if update.is_last]
    assert [(end.index, end.finish_reason) for end in ends] == [
        (0, "cancelled"),
        (1, "cancelled"),
        (2, "cancelled"),
    ]


FORK = textwrap.dedent("""
    import os, sys, warnings
    from cbrs import Scheduler, SchedulerConfig
    from cbrs._core import OutputChannel, OutputProcessor
    warnings.simplefilter("ignore")
    scheduler = Scheduler(SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=8, num_blocks=4, max_model_len=16))
    processor = OutputProcessor(scheduler, None)
    channel = OutputChannel()
    processor.submit([1], index=0, channel=channel, max_tokens=2)
    scheduler.step()
    child = os.fork()
    if child == 0:
        try:
            channel.fileno()
        except ValueError:
            ok = channel.is_closed and channel.take() == []
            channel.close()
            os._exit(0 if ok else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    scheduler.step([5])
    scheduler.step([6])
    processor.close()
    assert [update.token_ids for update in channel.take()] == [[5], [6]]
    print("fine")
""")


def test_a_forked_child_has_a_closed_channel_and_its_parent_an_open_one():
    result = subprocess.run(
        [sys.executable, "-c", FORK],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr
