"""The real models against the reference's golden outputs (`tests/golden/README.md`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import Chunk, Tables

from cbrs.loading import LoadedModel, load_model
from cbrs.runner.model_runner import make_runner

GOLDEN = Path(__file__).parent / "golden"
SMOLLM2 = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
STORIES = json.loads((GOLDEN / "stories260k_greedy.json").read_text())

Case = dict[str, Any]


def case_names(golden: dict[str, Any]) -> list[str]:
    return [case["name"] for case in golden["cases"]]


def case_of(golden: dict[str, Any], name: str) -> Case:
    return next(case for case in golden["cases"] if case["name"] == name)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> LoadedModel:
    return load_model(smollm2_gguf, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def smollm2_bfloat16(smollm2_gguf: Path) -> LoadedModel:
    return load_model(smollm2_gguf, dtype="bfloat16", device="cpu")


def teacher_forced(
    loaded: LoadedModel, cases: list[Case], chunk: int, kv_dtype: torch.dtype | None = None
) -> Iterator[torch.Tensor]:
    """Yield each case's log probabilities, float64 `[prompt + output, vocab]`.

    All cases run in the same steps, `chunk` tokens of each at a time.
    """
    texts = [case["prompt_ids"] + case["output_ids_ignore_eos"] for case in cases]
    longest = max(map(len, texts))
    tables = Tables(len(texts), longest)
    runner, _ = make_runner(
        loaded,
        num_blocks=tables.num_blocks,
        block_size=tables.block_size,
        kv_dtype=kv_dtype,
    )
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for start in range(0, longest, chunk):
        chunks = [
            Chunk(row, text[start : start + chunk], start)
            for row, text in enumerate(texts)
            if start < len(text)
        ]
        batch = tables.batch(chunks)
        logits = runner.forward(batch)
        for index, row in enumerate(batch.row_ids):
            first, last = batch.query_start[index : index + 2]
            parts[row].append(logits[first:last])
    for logits in parts:
        yield torch.cat(logits).double().log_softmax(-1)


def assert_exact(loaded: LoadedModel, cases: list[Case], chunk: int) -> None:
    for case, found in zip(cases, teacher_forced(loaded, cases, chunk), strict=True):
        prompt, output = case["prompt_ids"], case["output_ids_ignore_eos"]
        steps = found[len(prompt) - 1 : -1]
        assert steps.argmax(-1).tolist() == output, case["name"]
        for step, best in enumerate(case["top5_logprobs"]):
            for token, logprob in best:
                assert abs(float(steps[step, token]) - logprob) <= 1e-3, case["name"]
        for position, logprob in enumerate(case["prompt_logprobs"]):
            if position > 0:
                own = float(found[position - 1, prompt[position]])
                assert abs(own - logprob) <= 1e-3, case["name"]


@pytest.mark.parametrize("chunk", [64, 512])
def test_smollm2_logprobs_equal_the_reference(smollm2: LoadedModel, chunk: int) -> None:
    assert_exact(smollm2, SMOLLM2["cases"], chunk)


def test_smollm2_prompts_give_the_reference_ids(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    for case in SMOLLM2["cases"]:
        assert smollm2.tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
        assert smollm2.tokenizer.decode(case["output_ids"]) == case["text"], case["name"]
        if case["messages"]:
            rendered = smollm2.tokenizer.apply_chat_template(case["messages"])
            assert rendered == case["prompt"], case["name"]


def test_smollm2_is_what_the_file_says(smollm2: LoadedModel) -> None:
    shape = SMOLLM2["model"]["config"]
    config = smollm2.config
    assert config.num_layers == shape["num_hidden_layers"]
    theta = shape["rope_parameters"]["rope_theta"]
    assert [rotary.theta for rotary in config.rotary] == [theta] * config.num_layers
    assert config.rms_norm_eps == pytest.approx(shape["rms_norm_eps"])
    assert config.tie_word_embeddings
    assert smollm2.vocab_size == shape["vocab_size"]
    assert smollm2.eos_token_ids == (2,)


def test_smollm2_in_bfloat16_stays_near_the_reference(smollm2_bfloat16: LoadedModel) -> None:
    cases = SMOLLM2["cases"]
    differences = []
    for case, found in zip(cases, teacher_forced(smollm2_bfloat16, cases, 512), strict=True):
        steps = found[len(case["prompt_ids"]) - 1 : -1]
        for step, best in enumerate(case["top5_logprobs"]):
            token, logprob = best[0]
            differences.append(abs(float(steps[step, token]) - logprob))
    assert max(differences) <= 0.25
    assert float(np.mean(differences)) <= 0.03
    assert max(differences) > 1e-3  # it did run in bfloat16


@pytest.mark.parametrize("file", ["", "stories260K.gguf"])
@pytest.mark.parametrize("chunk", [16, 512])
def test_stories260k_logprobs_equal_the_reference(cbrs_data: Path, file: str, chunk: int) -> None:
    folder = cbrs_data / "models" / "stories260K"
    loaded = load_model(folder / file if file else folder, dtype="float32", device="cpu")
    assert_exact(loaded, STORIES["cases"], chunk)


@pytest.mark.parametrize("file", ["", "stories260K.gguf"])
def test_stories260k_prompts_give_the_reference_ids(cbrs_data: Path, file: str) -> None:
    folder = cbrs_data / "models" / "stories260K"
    loaded = load_model(folder / file if file else folder, dtype="float32", device="cpu")
    assert loaded.tokenizer is not None
    for case in STORIES["cases"]:
        assert loaded.tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]


def test_stories260k_folder_stops_at_both_ids(cbrs_data: Path) -> None:
    loaded = load_model(cbrs_data / "models" / "stories260K", device="cpu")
    assert loaded.eos_token_ids == (1, 2)
