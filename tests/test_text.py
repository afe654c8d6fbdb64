"""Detokenizing, stop strings and the output processor as Python sees them."""

import gc
import json
import os
import threading
import time
import weakref

import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbrs import Scheduler, SchedulerConfig
from cbrs._core import IncrementalDetokenizer, OutputProcessor, Tokenizer
from cbrs.errors import EngineClosedError, InvalidRequestError, PromptTooLongError

BYTE = Tokenizer(json.dumps(kit.byte_tokenizer()))
SPM = Tokenizer(json.dumps(kit.spm_tokenizer()))
TIMEOUT_S = 20.0


def byte_ids(text):
    """One token a byte: `kit.byte_tokenizer` has the bytes from id 2 on."""
    return [2 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def pieces(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def make_processor(tokenizer=BYTE, **options):
    defaults = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_blocks": 64,
        "max_model_len": 128,
        "vocab_size": kit.NUM_TOKENS,
        "eos_token_ids": (kit.EOS,),
    }
    scheduler = Scheduler(SchedulerConfig(**(defaults | options)))
    return scheduler, OutputProcessor(scheduler, tokenizer)


def run(scheduler, processor, script, num_requests=1):
    """Answers each sample with the script's token of its position until so many have finished."""
    finished = []
    batch = scheduler.step()
    deadline = time.monotonic() + TIMEOUT_S
    while len(finished) < num_requests:
        assert time.monotonic() < deadline, f"{len(finished)} of {num_requests} finished"
        positions = batch.sample_positions
        tokens = np.array([script[position % len(script)] for position in positions], np.int32)
        batch = scheduler.step(tokens if len(tokens) else None)
        finished += processor.wait_finished(0.0 if batch.num_seqs else 0.01)
    assert processor.num_live == 0
    return finished


def test_f01_nothing_of_a_stop_string_is_shown():
    ids = byte_ids("aDEFGh")
    detokenizer = IncrementalDetokenizer(BYTE, stop=["DEFG"])
    assert [detokenizer.push(token) for token in ids] == ["a", "", "", "", "", ""]
    assert detokenizer.stopped == "DEFG"
    assert detokenizer.finish() == ""
    assert pieces(BYTE, byte_ids("aDEFh"), stop=["DEFG"]) == ["a", "", "", "", "DEFh", ""]


def test_f05_words_and_then_split_syllables_of_another_script_come_whole():
    ids = SPM.encode("the the the the the the the the the the 안녕하세요 세계")
    assert len(ids) > 30, "the syllables are single bytes"
    assert "".join(pieces(SPM, ids)) == SPM.decode(ids)
    assert SPM.decode(ids).endswith("the 안녕하세요 세계")
    assert not any("\ufffd" in piece for piece in pieces(SPM, ids))


def test_f06_a_character_of_two_bytes_comes_once_and_whole():
    assert pieces(BYTE, byte_ids(b"\xc4\x8f")) == ["", "ď", ""]


def test_f08_plain_text_is_shown_token_by_token():
    text = "twelve busy cats sat down on a warm and quiet roof"
    assert pieces(BYTE, byte_ids(text)) == [*text, ""]


def test_f10_spaces_before_a_word_are_kept():
    ids = SPM.encode("the    king")
    assert "".join(pieces(SPM, ids)) == SPM.decode(ids) == "the    king"


def test_f17_added_tokens_outside_the_byte_alphabet_are_their_own_text():
    ids = [BYTE.token_to_id("‼"), BYTE.token_to_id("\n")]
    assert pieces(BYTE, ids) == ["‼", "\n", ""]


def test_a_prompt_makes_the_text_a_continuation():
    ids = SPM.encode("king")
    assert "".join(pieces(SPM, ids)) == "king"
    assert "".join(pieces(SPM, ids, prompt_token_ids=SPM.encode("the"))) == " king"


@settings(deadline=None)
@given(
    st.lists(st.integers(0, kit.NUM_TOKENS - 1), max_size=40),
    st.lists(st.text("ab é日\n", min_size=1, max_size=3), max_size=4),
    st.sampled_from([BYTE, SPM]),
)
def test_the_pieces_are_the_text_up_to_the_first_stop_string(ids, stop, tokenizer):
    text = tokenizer.decode(ids)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stop))]
    if ends:
        found = max((s for s in stop if text[: ends[0]].endswith(s)), key=len)
        text = text[: ends[0] - len(found)]
    assert "".join(pieces(tokenizer, ids, stop=stop)) == text


@pytest.mark.parametrize(
    ("stop", "match"),
    [
        (["x"] * 17, "stop has 17 entries, but at most 16"),
        ([""], "stop is 0 characters long, but must be 1 to 256"),
        (["é" * 257], "stop is 257 characters long"),
    ],
)
def test_stop_strings_out_of_bounds_are_refused_with_the_numbers(stop, match):
    scheduler, processor = make_processor()
    for refuse in (
        lambda: IncrementalDetokenizer(BYTE, stop=stop),
        lambda: processor.submit([2], stop=stop, index=0),
    ):
        with pytest.raises(InvalidRequestError, match=match) as caught:
            refuse()
        assert caught.value.param == "stop"
    assert scheduler.stats()["num_waiting"] == processor.num_live == 0


def test_a_result_has_text_ids_reasons_and_times():
    scheduler, processor = make_processor(clock="manual")
    prompt = np.array([5, 6, 7], np.int32)
    request = processor.submit(prompt, max_tokens=3, index=11)
    (result,) = run(scheduler, processor, byte_ids("né"))
    assert (result.request_id, result.index) == (request, 11)
    assert result.prompt_token_ids.tolist() == [5, 6, 7]
    assert (result.error, result.prompt_logprobs, result.num_cached_tokens) == (None, None, 0)
    assert result.arrival_time_s == result.first_token_time_s == result.finished_time_s == 0.0
    (output,) = result.outputs
    assert (output.index, output.text, output.token_ids.tolist()) == (0, "né", byte_ids("né"))
    assert output.token_ids.dtype == result.prompt_token_ids.dtype == np.int32
    assert (output.finish_reason, output.stop_reason, output.error) == ("length", None, None)
    assert output.first_token_time_s == 0.0
    assert output.inter_token_latencies_s.tolist() == [0.0, 0.0]
    assert output.logprobs is output.cumulative_logprob is output.num_logprobs is None
    assert "index=11" in repr(result)


@pytest.mark.parametrize(
    ("options", "text", "num_tokens", "reason"),
    [
        ({"stop": ["lo w"]}, "hel", 7, ("stop", "lo w")),
        ({"max_tokens": 7, "stop": ["lo w"]}, "hel", 7, ("stop", "lo w")),
        ({"stop_token_ids": byte_ids("w")}, "hello ", 7, ("stop", byte_ids("w")[0])),
        ({}, "hello world", 12, ("stop", None)),
        ({"max_tokens": 5}, "hello", 5, ("length", None)),
    ],
)
def test_how_an_output_ends(options, text, num_tokens, reason):
    scheduler, processor = make_processor()
    processor.submit_text("a", index=0, **options)
    (result,) = run(scheduler, processor, [*byte_ids("hello world"), kit.EOS])
    (output,) = result.outputs
    assert (output.text, len(output.token_ids)) == (text, num_tokens)
    assert (output.finish_reason, output.stop_reason) == reason


def test_e06_a_cancel_beside_a_stop_string_gives_exactly_one_end():
    scheduler, processor = make_processor()
    for round_number in range(200):
        request = processor.submit([2, 3], stop=["lo"], max_tokens=50, index=round_number)
        canceller = threading.Thread(target=scheduler.cancel, args=(request,))
        canceller.start()
        (result,) = run(scheduler, processor, byte_ids("hello "))
        canceller.join()
        (output,) = result.outputs
        assert output.finish_reason in ("stop", "cancelled")
        assert output.finish_reason == "cancelled" or output.text == "hel"
        assert processor.take_finished() == []


def test_e19_a_second_round_has_its_own_results():
    scheduler, processor = make_processor()
    for start in (0, 5):
        for index in range(start, start + 5):
            processor.submit([2, 3], max_tokens=index % 3 + 1, index=index)
        results = run(scheduler, processor, byte_ids("abc"), 5)
        texts = {result.index: result.outputs[0].text for result in results}
        assert texts == {index: "abc"[: index % 3 + 1] for index in range(start, start + 5)}


def test_refused_parameters_leave_nothing_behind():
    scheduler, processor = make_processor(None)
    with pytest.raises(PromptTooLongError):
        processor.submit([2], max_tokens=1000, index=0)
    with pytest.raises(InvalidRequestError, match="top_p is 2"):
        processor.submit([2], top_p=2.0, index=0)
    with pytest.raises(InvalidRequestError, match="stop strings need a tokenizer"):
        processor.submit([2], stop=["x"], index=0)
    with pytest.raises(InvalidRequestError, match="a text needs a tokenizer"):
        processor.submit_text("x", index=0)
    assert scheduler.stats()["num_waiting"] == processor.num_live == 0


def test_waiting_wakes_at_once_and_times_out():
    scheduler, processor = make_processor()
    start = time.monotonic()
    assert processor.wait_finished(0.05) == []
    assert 0.04 < time.monotonic() - start < 5.0
    processor.submit([2], max_tokens=1, index=0)
    waiting = []
    waiter = threading.Thread(target=lambda: waiting.extend(processor.wait_finished(TIMEOUT_S)))
    waiter.start()
    scheduler.step()
    scheduler.step(np.array([2], np.int32))
    waiter.join(TIMEOUT_S)
    assert [result.index for result in waiting] == [0]
    with pytest.raises(ValueError, match="NaN"):
        processor.wait_finished(float("nan"))


def test_closing_ends_the_thread_and_keeps_results():
    scheduler, processor = make_processor()
    processor.submit([2], max_tokens=1, index=0)
    processor.submit([2], max_tokens=50, index=1)
    scheduler.step()
    scheduler.step(np.array([2, 2], np.int32))
    processor.close()
    processor.close()
    assert [(r.index, r.outputs[0].finish_reason) for r in processor.take_finished(1)] == [
        (0, "length")
    ]
    assert [(r.index, r.outputs[0].finish_reason) for r in processor.take_finished()] == [
        (1, "cancelled")
    ]
    assert processor.wait_finished(TIMEOUT_S) == []
    with pytest.raises(EngineClosedError):
        processor.submit([2], index=2)


def test_closing_the_scheduler_ends_every_live_request_once():
    scheduler, processor = make_processor()
    for index in range(6):
        processor.submit([2], max_tokens=50, index=index)
    batch = scheduler.step()
    scheduler.close()
    scheduler.fail(batch.step_id, "closing")
    scheduler.step()
    results = []
    while len(results) < 6:
        more = processor.wait_finished(TIMEOUT_S)
        assert more, f"{len(results)} of 6 have ended"
        results += more
    assert sorted(result.index for result in results) == list(range(6))
    assert {result.outputs[0].finish_reason for result in results} == {"cancelled", "error"}
    assert processor.num_live == 0


def text_threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
                names.append(file.read().strip())
        except OSError:  # the thread has just ended
            continue
    return names.count("cbrs-text")


def test_e14_dropped_processors_leave_no_thread_and_no_object():
    gc.collect()
    before = text_threads()
    for _ in range(50):
        scheduler, processor = make_processor()
        processor.submit([2], index=0)
        gone = weakref.ref(processor)
        del scheduler, processor
        assert gone() is None
    assert text_threads() == before
