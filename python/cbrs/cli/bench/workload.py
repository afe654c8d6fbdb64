"""The requests of a benchmark: random token ids, or prompts from a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cbrs.cli.common import InputError
from cbrs.errors import InvalidRequestError
from cbrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cbrs._core import Tokenizer
    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.prompts import PromptItem


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt as token ids, and how it is completed."""

    prompt: list[int]
    params: SamplingParams


class RandomWorkload:
    """Prompts of one length, drawn from the vocabulary without special tokens; greedy, no end."""

    def __init__(self, llm: AsyncLLM, *, input_len: int, output_len: int, seed: int) -> None:
        """Every prompt has `input_len` tokens, every output `output_len`.

        Raises:
            InputError: the two together are longer than the context.
        """
        limit = llm.config().max_model_len
        if input_len + output_len > limit:
            raise InputError(
                f"--input-len {input_len} and --output-len {output_len} make "
                f"{input_len + output_len} tokens, but the context holds {limit}"
            )
        self._ids = ordinary_ids(llm)
        self._input_len = input_len
        self._params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, output_kind="delta"
        )
        self._seed = seed

    def requests(self, num_requests: int, concurrency: int) -> list[BenchRequest]:
        """The same seed and concurrency give the same prompts; no two levels share one."""
        random = np.random.default_rng([self._seed, concurrency])
        prompts = random.choice(self._ids, size=(num_requests, self._input_len))
        return [BenchRequest(prompt.tolist(), self._params) for prompt in prompts]


class FileWorkload:
    """The prompts of a file, in order and again from the start; greedy unless a line says else."""

    def __init__(self, llm: AsyncLLM, items: list[PromptItem], *, output_len: int) -> None:
        """`output_len` bounds the output of a line that has no `max_tokens`.

        Raises:
            InputError: a line asks for more than one output.
        """
        base = SamplingParams(temperature=0.0, max_tokens=output_len)
        self._requests = []
        for item in items:
            params = replace(base, **{**item.sampling, "output_kind": "delta"})
            if params.n != 1:
                raise InputError(f"n is {params.n} in the file; a benchmark needs one output each")
            self._requests.append(BenchRequest(_to_token_ids(item, llm.tokenizer), params))

    def requests(self, num_requests: int, concurrency: int) -> list[BenchRequest]:
        """The first `num_requests`, whatever the concurrency."""
        return [self._requests[i % len(self._requests)] for i in range(num_requests)]


def ordinary_ids(llm: AsyncLLM) -> npt.NDArray[np.int32]:
    """Returns the ids of a model that stand for text: no special tokens, no padding."""
    try:
        tokenizer = llm.tokenizer
    except InvalidRequestError:  # it has none, so nothing says which ids are special
        size = llm.engine.scheduler.config.vocab_size
        ids = list(range(size or 1))
    else:
        # A special token is one whose text is left out.
        ids = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) != ""]
    return np.asarray(ids, dtype=np.int32)


def _to_token_ids(item: PromptItem, tokenizer: Tokenizer) -> list[int]:
    if isinstance(item.content, str):
        return tokenizer.encode(item.content)
    text = tokenizer.apply_chat_template(item.content)
    # The template writes the special tokens itself: encoding must not add them again.
    return tokenizer.encode(text, add_special_tokens=False)
