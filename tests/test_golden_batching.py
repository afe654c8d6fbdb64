"""The golden answers under continuous batching: alone, together, in any order, under any pressure.

The reference ran each prompt by itself. Here the same prompts share steps, prefill in chunks, reuse
each other's blocks and are preempted, and every id must stay the same and every log-probability
within 1e-3 (float32). The latter are those of the logits that the tokens were sampled from.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cbrs import LLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden"
SMOLLM2 = json.loads((GOLDEN / "smollm2_greedy.json").read_text())["cases"]
STORIES = json.loads((GOLDEN / "stories260k_greedy.json").read_text())["cases"]

Case = dict[str, Any]
Logprobs = dict[tuple[int, int], torch.Tensor]
"""By request and position of the output token: the log-probability of every token."""

TOLERANCE = 1e-3

TIGHT_BLOCKS = 24
"""Of 16 tokens: what the longest case needs alone. The prompts of the seven others fit together
(19 blocks), with their outputs (34) they do not, so that somebody has to give way."""


def open_llm(model: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "max_num_seqs": 16, "num_blocks": 512}
    return LLM(model, **{**defaults, **options})


def forced(case: Case) -> SamplingParams:
    length = len(case["output_ids_ignore_eos"])
    return SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)


class RecordingRunner:
    """Forwards to `runner` and keeps the log-probabilities of each sample, told by its request."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.logprobs: Logprobs = {}

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self.runner.forward(batch)
        requests = dict(zip(batch.row_ids.tolist(), batch.request_ids.tolist(), strict=True))
        sampled = logits[batch.sample_index.tolist()].log_softmax(-1)
        rows, positions = batch.sample_rows.tolist(), batch.sample_positions.tolist()
        for row, position, logprobs in zip(rows, positions, sampled, strict=True):
            key = (requests[row], position)
            assert key not in self.logprobs, "a token was sampled twice"
            self.logprobs[key] = logprobs
        return logits


@contextmanager
def recorded_logprobs(llm: LLM) -> Iterator[Logprobs]:
    runner = llm.engine._runner
    recording = RecordingRunner(runner)
    llm.engine._runner = recording
    try:
        yield recording.logprobs
    finally:
        llm.engine._runner = runner


def assert_golden_logprobs(logprobs: Logprobs, request: int, case: Case) -> None:
    """Compare the log-probabilities of the reference's five best tokens at every position."""
    best = torch.tensor(case["top5_logprobs"], dtype=torch.float64)
    assert len(best) == len(case["output_ids_ignore_eos"])
    own = torch.stack([logprobs[request, position] for position in range(len(best))])
    difference = (own.gather(1, best[..., 0].long()) - best[..., 1]).abs().max().item()
    assert difference <= TOLERANCE, case["name"]


def assert_golden(llm: LLM, cases: list[Case]) -> None:
    """Run `cases` in one call and compare every id and its log-probabilities."""
    with recorded_logprobs(llm) as logprobs:
        outputs = llm.generate(
            [case["prompt_ids"] for case in cases], [forced(case) for case in cases], use_tqdm=False
        )
    assert len(logprobs) == sum(len(case["output_ids_ignore_eos"]) for case in cases)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["output_ids_ignore_eos"], case["name"]
        assert output.outputs[0].finish_reason == "length"
        assert_golden_logprobs(logprobs, int(output.request_id), case)


def shuffled(cases: list[Case], seed: int) -> list[Case]:
    return random.Random(seed).sample(cases, len(cases))


@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 8192])
def test_smollm2_is_golden_together(
    smollm2_gguf: Path, max_num_batched_tokens: int, enable_prefix_caching: bool
) -> None:
    with open_llm(
        smollm2_gguf,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        assert_golden(llm, shuffled(SMOLLM2, max_num_batched_tokens + enable_prefix_caching))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LLM]:
    with open_llm(smollm2_gguf) as llm:
        yield llm


@pytest.mark.parametrize("name", [case["name"] for case in SMOLLM2])
def test_smollm2_is_golden_alone(smollm2: LLM, name: str) -> None:
    assert_golden(smollm2, [case for case in SMOLLM2 if case["name"] == name])


def test_smollm2_is_golden_again_from_cached_blocks(smollm2: LLM) -> None:
    assert_golden(smollm2, SMOLLM2)
    before = smollm2.stats()["num_cached_prompt_tokens"]
    assert_golden(smollm2, shuffled(SMOLLM2, 1))
    full_blocks = sum((len(case["prompt_ids"]) - 1) // 16 * 16 for case in SMOLLM2)
    assert smollm2.stats()["num_cached_prompt_tokens"] - before == full_blocks


def test_smollm2_stops_where_the_reference_stops(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    outputs = smollm2.generate([case["prompt"] for case in SMOLLM2], params, use_tqdm=False)
    for case, output in zip(SMOLLM2, outputs, strict=True):
        ending = [2] if case["finish_reason"] == "stop" else []
        assert list(output.prompt_token_ids) == case["prompt_ids"], case["name"]
        assert list(output.outputs[0].token_ids) == case["output_ids"] + ending, case["name"]
        assert output.outputs[0].text == case["text"], case["name"]
        assert output.outputs[0].finish_reason == case["finish_reason"], case["name"]


@pytest.mark.parametrize("enable_prefix_caching", [True, False], ids=["cache", "no_cache"])
def test_smollm2_is_golden_through_preemptions(
    smollm2_gguf: Path, enable_prefix_caching: bool
) -> None:
    cases = sorted(SMOLLM2, key=lambda case: case["name"] == "long_300")
    with open_llm(
        smollm2_gguf, num_blocks=TIGHT_BLOCKS, enable_prefix_caching=enable_prefix_caching
    ) as llm:
        assert_golden(llm, cases)
        assert llm.stats()["num_preemptions"] > 0
        assert llm.stats()["num_recomputed_tokens"] > 0


@pytest.mark.parametrize("num_blocks", [256, 24])
@pytest.mark.parametrize("max_num_batched_tokens", [16, 64, 8192])
def test_stories260k_is_golden_together(
    cbrs_data: Path, max_num_batched_tokens: int, num_blocks: int
) -> None:
    with open_llm(
        cbrs_data / "models" / "stories260K",
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
    ) as llm:
        assert_golden(llm, shuffled(STORIES, max_num_batched_tokens))
        if num_blocks == 24:
            assert llm.stats()["num_preemptions"] > 0
