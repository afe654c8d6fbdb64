"""`SamplingParams`: defaults, and that every value is checked by the core."""

import dataclasses
import math

import pytest

from cbrs import SamplingParams
from cbrs.errors import InvalidRequestError, PromptTooLongError

INVALID = {
    "temperature": [-0.1, math.nan, math.inf],
    "top_k": [-2],
    "top_p": [0.0, 1.5, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "max_tokens": [0, -1, 2**63, 2**64],
    "stop": [""],
    "stop_token_ids": [[-1], [2**31], [10**6]],
    "tenant": ["", "x" * 257],
    "cache_salt": ["", "x" * 257],
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


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="logit_bias"):
        SamplingParams(logit_bias={1: 5.0})  # type: ignore[call-arg]


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
    ],
)
def test_a_value_at_the_limit_is_accepted(llm, name, value):
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=3, **{name: value}))
    assert output.outputs[0].finish_reason == "length"


def test_without_max_tokens_the_output_fills_the_context(llm):
    (output,) = llm.generate([1, 2, 3])
    assert len(output.outputs[0].token_ids) == 256 - 3
    assert output.outputs[0].finish_reason == "length"
