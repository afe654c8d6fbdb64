"""`SamplingParams`: defaults, and that every value is checked by the core."""

import dataclasses
import math

import pytest

from cbrs import SamplingParams
from cbrs.errors import InvalidRequestError, PromptTooLongError

INVALID = {
    "n": [0, -1, 129, 2**40],
    "min_tokens": [-1, 300, 2**40],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "repetition_penalty": [0.0, -1.0, math.nan, math.inf],
    "logit_bias": [
        {-1: 1.0},
        {10**6: 1.0},
        {1: 101.0},
        {1: math.nan},
        dict.fromkeys(range(1025), 1),
    ],
    "bad_words": [[""], ["x" * 257], ["x"] * 257],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "truncate_prompt_tokens": [0, -2],
    "temperature": [-0.1, math.nan, math.inf],
    "top_k": [-2],
    "top_p": [0.0, 1.5, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "max_tokens": [0, -1, 2**63, 2**64],
    "stop": [""],
    "stop_token_ids": [[-1], [2**31], [10**6]],
    "tenant": ["", "x" * 257],
    "cache_salt": ["", "x" * 257],
    "priority": ["urgent", ""],
    "ttft_deadline_ms": [0, -1.0, math.nan, math.inf],
    "deadline_ms": [0, -1.0, math.nan, 1e10],
    "target_itl_ms": [0, -1.0, math.nan, 1e10],
}


@pytest.fixture(scope="module")
def llm():
    from cbrs import LLM

    with LLM("null", max_model_len=256, max_num_seqs=4) as llm:
        yield llm


def test_the_defaults_are_those_of_the_documentation():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.seed is None
    assert params.max_tokens is None


@pytest.mark.parametrize("name", ["best_of", "cache_key_extra", "bad_words_token_ids"])
def test_an_unknown_parameter_is_a_type_error(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", "two"),
        ("n", 1.5),
        ("temperature", "hot"),
        ("top_k", 0.5),
        ("seed", "x"),
        ("max_tokens", 2.5),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"a": 1.0}),
        ("stop", 5),
        ("stop", [5]),
        ("bad_words", [b"x"]),
        ("stop_token_ids", "ab"),
        ("logprobs", "all"),
        ("ignore_eos", "yes"),
        ("detokenize", 1),
        ("tenant", 5),
        ("priority", 1),
        ("deadline_ms", "soon"),
        ("target_itl_ms", True),
    ],
)
def test_a_value_of_another_type_is_a_type_error_that_names_it(llm, name, value):
    with pytest.raises(TypeError, match=name):
        llm.generate("Hello", SamplingParams(**{name: value}))


def test_an_unknown_kind_of_output_is_refused_at_once():
    with pytest.raises(InvalidRequestError, match=r"output_kind is 'all'.*final_only") as caught:
        SamplingParams(output_kind="all")
    assert caught.value.param == "output_kind"


def test_only_what_differs_from_the_default_is_submitted():
    assert SamplingParams().to_submit_arguments() == {}
    params = SamplingParams(n=2, stop="x", output_kind="delta", seed=0, detokenize=False)
    assert params.to_submit_arguments() == {"n": 2, "stop": "x", "seed": 0, "detokenize": False}


def test_every_field_reaches_the_core_under_its_name(llm):
    """A field that no entrance reads would be an unknown name there."""
    given = {
        "n": 1,
        "logit_bias": {1: 0.5},
        "bad_words": ["zzz"],
        "logprobs": 1,
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 5,
        "stop": ["zzz"],
        "stop_token_ids": [3],
        "seed": 1,
        "max_tokens": 2,
        "tenant": "a",
        "cache_salt": "b",
        "priority": "batch",
        "ttft_deadline_ms": 60_000.0,
        "deadline_ms": 60_000.0,
        "target_itl_ms": 50.0,
    }
    for field in dataclasses.fields(SamplingParams):
        value = given.get(field.name, field.default)
        params = SamplingParams(**{"max_tokens": 2, field.name: value})
        (output,) = llm.generate("Hello", params)
        assert output.error is None, field.name
        if field.name != "output_kind":
            llm.engine.processor.submit([1], index=0, **{"max_tokens": 1, field.name: value})
    while llm.engine.processor.num_live:
        llm.engine.step()
    llm.engine.processor.take_finished()


def test_parameters_cannot_be_changed_behind_a_running_request():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID.items() for value in values]
)
def test_an_invalid_value_is_refused_by_name(llm, name, value):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        llm.generate("Hello", SamplingParams(**{name: value}))
    if name == "max_tokens" and value > 0:
        assert isinstance(caught.value, PromptTooLongError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("n", 128),
        ("min_tokens", 3),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 1e-3),
        ("repetition_penalty", 1e3),
        ("logit_bias", {0: -100.0, 9: 100.0}),
        ("logit_bias", dict.fromkeys(range(1024), 1.0)),
        ("logit_bias", {}),
        ("bad_words", "x" * 256),
        ("bad_words", []),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
        ("truncate_prompt_tokens", 1),
        ("truncate_prompt_tokens", -1),
        ("truncate_prompt_tokens", 10**9),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("detokenize", False),
        ("output_kind", "delta"),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**6),
        ("temperature", 0.0),
        ("temperature", 1e-12),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("stop", "nothing"),
        ("stop", ["nothing", "ever"]),
        ("stop_token_ids", []),
        ("tenant", "x" * 256),
        ("priority", "interactive"),
        ("ttft_deadline_ms", 1e9),
        ("deadline_ms", 60_000),
        ("target_itl_ms", 0.001),
    ],
)
def test_a_value_at_the_limit_is_accepted(llm, name, value):
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=3, **{name: value}))
    assert output.outputs[0].finish_reason == "length"


def test_without_max_tokens_the_output_fills_the_context(llm):
    (output,) = llm.generate([1, 2, 3])
    assert len(output.outputs[0].token_ids) == 256 - 3
    assert output.outputs[0].finish_reason == "length"
