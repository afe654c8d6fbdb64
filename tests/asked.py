"""Random requests with every kind of parameter, and what counts as the same answer to one."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from cbrs import SamplingParams

LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Asked:
    """A prompt and the arguments of its `SamplingParams`."""

    prompt: list[int]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """The parameters as an object."""
        return SamplingParams(**self.arguments)

    def but(self, **changes: Any) -> "Asked":
        """The same with other arguments."""
        return replace(self, arguments={**self.arguments, **changes})


class RequestMaker:
    """Draws requests whose prompts share heads, so that the prefix cache has something to find."""

    def __init__(self, seed: int, *, num_token_ids: int, max_prompt: int, max_tokens: int) -> None:
        self.choose = random.Random(seed)
        self._first_id = 2
        self._num_token_ids = num_token_ids
        self._max_prompt = max_prompt
        self._max_tokens = max_tokens
        self._heads = [self._ids(length) for length in (0, 16, 33, 48)]

    def request(self) -> Asked:
        """The next request; its draws depend on its own seed only."""
        choose = self.choose
        head = choose.choice(self._heads)
        prompt = head + self._ids(choose.randint(1, self._max_prompt - len(head)))
        arguments = {"max_tokens": choose.randint(1, self._max_tokens)}
        if choose.random() < 0.6:
            arguments |= {
                "temperature": choose.choice([0.5, 1.0, 1.7]),
                "seed": choose.getrandbits(63),
            }
            arguments |= self._some(
                top_k=choose.randint(1, 40),
                top_p=choose.uniform(0.1, 1.0),
                min_p=choose.uniform(0, 0.3),
            )
        else:
            arguments |= {"temperature": 0.0}
        arguments |= self._some(
            n=choose.randint(2, 4),
            presence_penalty=choose.uniform(-2, 2),
            frequency_penalty=choose.uniform(-2, 2),
            repetition_penalty=choose.uniform(0.5, 2.0),
            logit_bias={token: choose.uniform(-20, 5) for token in self._ids(5)},
            min_tokens=choose.randint(1, arguments["max_tokens"]),
            ignore_eos=True,
            stop_token_ids=self._ids(6),
            logprobs=choose.randint(0, 4),
            prompt_logprobs=choose.randint(0, 3),
        )
        return Asked(prompt, arguments)

    def stop_in(self, text: str) -> str | None:
        """A piece of `text` to stop at; None if there is nothing in it."""
        if not text:
            return None
        start = self.choose.randrange(len(text))
        return text[start : start + self.choose.randint(1, 4)]

    def _ids(self, count: int) -> list[int]:
        return [self.choose.randrange(self._first_id, self._num_token_ids) for _ in range(count)]

    def _some(self, **arguments: Any) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if self.choose.random() < 0.25}


def assert_same_answer(found: Any, expected: Any) -> None:
    """Ids, texts and ends of two `RequestOutput`s are equal, log-probabilities nearly so."""
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.error == expected.error
    assert len(found.outputs) == len(expected.outputs)
    for own, other in zip(found.outputs, expected.outputs, strict=True):
        assert own.token_ids == other.token_ids
        assert own.text == other.text
        assert (own.finish_reason, own.stop_reason) == (other.finish_reason, other.stop_reason)
        assert_same_logprobs(own.logprobs, other.logprobs)
    assert_same_logprobs(found.prompt_logprobs, expected.prompt_logprobs)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    """Two lists of `{id: Logprob}` say the same, whichever of nearly equal ids come last."""
    if expected is None:
        assert found is None
        return
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        if other is None:
            assert own is None
            continue
        first = next(iter(other))
        assert next(iter(own)) == first, "the token itself comes first"
        assert own[first].rank == other[first].rank
        for mine, its in zip(own.values(), other.values(), strict=True):
            assert abs(mine.logprob - its.logprob) <= LOGPROB_TOLERANCE
