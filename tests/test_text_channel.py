"""Output as it comes: channels, their wake-ups, and the text parameters of a request."""

import asyncio
import gc
import json
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

from cbrs import Scheduler, SchedulerConfig
from cbrs._core import OutputChannel, OutputProcessor, StepResult, Tokenizer
from cbrs.errors import EngineClosedError, InvalidRequestError

BYTE = Tokenizer(json.dumps(kit.byte_tokenizer()))
TIMEOUT_S = 20.0


def byte_ids(text):
    """One token a byte: `kit.byte_tokenizer` has the bytes from id 2 on."""
    return [2 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


class Rig:
    """A scheduler whose model says `script`, by output position, to every request."""

    def __init__(self, script, **options):
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "num_blocks": 64,
            "max_model_len": 128,
            "vocab_size": kit.NUM_TOKENS,
            "eos_token_ids": (kit.EOS,),
        }
        self.script = script
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | options)))
        self.processor = OutputProcessor(self.scheduler, BYTE)
        self.channel = OutputChannel()
        self.batch = self.scheduler.step()

    def submit(self, prompt=(2, 3), index=0, **parameters):
        return self.processor.submit(list(prompt), index=index, channel=self.channel, **parameters)

    def step(self):
        """Answers the batch; the logprob of token t is -t, and -9 that of token 7 beside it."""
        positions = self.batch.sample_positions
        tokens = np.array([self.script[i % len(self.script)] for i in positions], np.int32)
        others = np.full_like(tokens, 7)
        logprobs = (
            np.stack([tokens, others], axis=1),
            np.stack([-tokens.astype(np.float32), np.full(len(tokens), -9, np.float32)], axis=1),
            tokens + 1,
        )
        self.batch = self.scheduler.step(
            StepResult(self.batch.step_id, tokens, logprobs=logprobs) if len(tokens) else None
        )
        return self.batch.num_seqs > 0

    def run(self, num_requests=1):
        """Steps until so many streams have ended; returns all updates."""
        updates = self.channel.take()
        deadline = time.monotonic() + TIMEOUT_S
        while sum(update.is_last for update in updates) < num_requests:
            assert time.monotonic() < deadline, updates
            if not self.step():
                select.select([self.channel.fileno()], [], [], 0.01)
            updates += self.channel.take()
        return updates

    def settle(self):
        """Steps until everything has ended and the text thread has read it."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.processor.num_live:
            assert time.monotonic() < deadline
            self.step()


def text_of(updates):
    return "".join(update.text for update in updates)


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


def test_g08_a_stop_string_does_not_end_the_output_before_min_tokens():
    rig = Rig(byte_ids("\nab"))
    rig.submit(stop=["\n"], min_tokens=8, max_tokens=30)
    updates = rig.run()
    num_tokens = sum(len(update.token_ids) for update in updates)
    assert (num_tokens, text_of(updates)) == (10, "\nab\nab\nab")
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "\n")


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


@pytest.mark.parametrize(
    ("parameters", "text", "num_tokens"),
    [
        ({"stop": ["cd"], "include_stop_str_in_output": True}, "abcd", 4),
        ({"stop": "cd"}, "ab", 4),
        ({"max_tokens": 3, "detokenize": False}, "", 3),
        ({"max_tokens": 7, "skip_special_tokens": False}, "abcd<s>ab", 7),
        ({"max_tokens": 7, "skip_special_tokens": None}, "abcdab", 7),
    ],
)
def test_text_parameters_have_their_effect(parameters, text, num_tokens):
    rig = Rig([*byte_ids("abcd"), kit.BOS])
    rig.submit(**parameters)
    updates = rig.run()
    assert text_of(updates) == text
    assert sum(len(update.token_ids) for update in updates) == num_tokens


def test_bad_words_reach_the_sampler_as_token_sequences():
    rig = Rig(byte_ids("ab"))
    # " the" is one token, "the" is three.
    rig.submit(bad_words=["the", "hello"], bad_words_token_ids=[[9, 8]], max_tokens=2)
    rig.step()
    tables = rig.batch.new_row_tables
    words = np.split(tables.bad_word_ids, tables.bad_word_start[1:-1])
    expected = [[9, 8], BYTE.encode("the"), BYTE.encode(" the"), BYTE.encode("hello")]
    assert len(expected[2]) == 1
    assert [word.tolist() for word in words] == [*expected, BYTE.encode(" hello")]
    rig.settle()


def test_the_result_of_a_truncated_prompt_has_the_tokens_that_were_run():
    rig = Rig(byte_ids("ab"))
    rig.submit(prompt=range(2, 12), truncate_prompt_tokens=4, max_tokens=1)
    (update,) = rig.run()
    assert update.prompt_token_ids.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"bad_words": ["x"] * 257}, "bad_words has 257 entries, but at most 256"),
        ({"bad_words": [""]}, "bad_words is 0 characters long, but must be 1 to 256"),
        ({"stop": "x", "detokenize": False}, "stop needs the text that detokenize=False"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ],
)
def test_wrong_text_parameters_are_refused_and_leave_nothing_behind(parameters, match):
    rig = Rig(byte_ids("a"))
    with pytest.raises(InvalidRequestError, match=match):
        rig.submit(**parameters)
    assert rig.processor.num_live == rig.scheduler.stats()["num_waiting"] == 0


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"stpo": ["x"]}, "stpo"),
        ({"stop": 5}, "stop"),
        ({"skip_special_tokens": "yes"}, "skip_special_tokens"),
        ({"bad_words": [5]}, "bad_words"),
        ({"channel": "mine"}, "channel"),
    ],
)
def test_parameters_of_the_wrong_kind_are_named(parameters, match):
    rig = Rig(byte_ids("a"))
    with pytest.raises(TypeError, match=match):
        rig.processor.submit([2], index=0, **parameters)
    assert rig.processor.num_live == 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"stop": ["x"]},
        {"bad_words": ["x"]},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"detokenize": False},
    ],
)
def test_a_scheduler_alone_refuses_text_parameters_by_name(parameters):
    rig = Rig(byte_ids("a"))
    (name,) = parameters
    with pytest.raises(TypeError, match=f"{name} is about text"):
        rig.scheduler.submit([2], **parameters)
