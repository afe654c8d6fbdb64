"""What the text parameters of a request do, and how wrong ones are refused."""

import kit
import numpy as np
import pytest
from stream_kit import BYTE, Rig, byte_ids, text_of

from cbrs.errors import InvalidRequestError


def test_g08_a_stop_string_does_not_end_the_output_before_min_tokens():
    rig = Rig(byte_ids("\nab"))
    rig.submit(stop=["\n"], min_tokens=8, max_tokens=30)
    updates = rig.run()
    num_tokens = sum(len(update.token_ids) for update in updates)
    assert (num_tokens, text_of(updates)) == (10, "\nab\nab\nab")
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "\n")


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
        ({"stop": "x", "detokenize": False}, "stop strings need the text that detokenize=False"),
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
