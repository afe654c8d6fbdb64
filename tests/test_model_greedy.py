"""Greedy output of every architecture through the engine against transformers' own loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import pytest
from references import TOKENS, reference_greedy

from cbrs import LLM, SamplingParams

STEPS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)

# Around the window of 32 and across it; the last two share three blocks with the one before.
PROMPTS = [
    TOKENS[:5],
    TOKENS[10:41],
    TOKENS[20:53],
    TOKENS[60:140],
    TOKENS[60:108] + TOKENS[150:160],
    TOKENS[60:108],
]


def outputs_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_greedy_ids_equal_the_reference(
    name: str, tmp_path: Path, make_llm: Callable[..., Any]
) -> None:
    # Head and embedding differ, so that the output wanders; without a tokenizer every id counts.
    config = kit.tiny_config(**{**kit.FAMILIES[name], "tie_word_embeddings": False})
    folder = kit.write_folder(tmp_path, config, kit.tensors_of(config, seed=3))
    expected = reference_greedy(folder, PROMPTS, STEPS)
    assert min(len(set(tokens)) for tokens in expected) > 6

    llm = make_llm(folder, max_num_batched_tokens=48, max_prefill_chunk_tokens=16, max_num_seqs=5)
    assert outputs_of(llm, PROMPTS) == expected  # together, in chunks
    again = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in again] == expected  # from cached prefixes
    assert max(output.num_cached_tokens for output in again) >= 64
    llm.close()

    # Too few blocks for all: sequences are preempted and computed again.
    tight = make_llm(folder, max_num_batched_tokens=48, num_blocks=20, max_num_seqs=5)
    assert outputs_of(tight, PROMPTS) == expected
    assert tight.stats()["num_preemptions"] > 0
