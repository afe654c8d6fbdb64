"""Transformers as the reference for models, and ours run by hand on the same tokens."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kit
import numpy as np
import torch
from batches import Chunk, Tables

from cbrs.loading import LoadedModel, load_model
from cbrs.runner.model_runner import make_runner

LENGTH = 224
TOKENS = [int(t) for t in np.random.default_rng(11).integers(2, kit.NUM_TOKENS, LENGTH)]


def load(folder: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    """Load a checkpoint on one CPU thread."""
    return load_model(folder, dtype=dtype, device="cpu", num_threads=1, **options)


def logits_of(loaded: LoadedModel, tokens: Sequence[int], chunks: Sequence[int] = ()) -> Any:
    """Return the logits of every position, float32 `[len(tokens), vocab]`, run in `chunks`."""
    tables = Tables(3, LENGTH + 64)
    runner, _ = make_runner(
        loaded, num_blocks=tables.num_blocks, block_size=tables.block_size, num_threads=1
    )
    sizes = [*chunks, len(tokens) - sum(chunks)]
    parts, start = [], 0
    for size in sizes:
        piece = list(tokens[start : start + size])
        parts.append(runner.forward(tables.batch([Chunk(1, piece, start)])))
        start += size
    return torch.cat(parts)


def reference_model(folder: Path) -> Any:
    """Return the checkpoint in transformers, float32; it must have a place for every tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(report.values()), report
    return model


def reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return what transformers computes in one full pass, `[len(tokens), vocab]`."""
    model = reference_model(folder)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        return model(torch.tensor([list(tokens)])).logits[0]


def reference_greedy(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the `count` tokens that transformers' own greedy loop gives after each prompt."""
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    outputs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for prompt in prompts:
            tokens = torch.tensor([list(prompt)])
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=count,
            )
            outputs.append(made[0, len(prompt) :].tolist())
    return outputs


def assert_equals_reference(folder: Path, **load_options: Any) -> None:
    loaded = load(folder, **load_options)
    expected = reference_logits(folder, TOKENS)
    found = logits_of(loaded, TOKENS, chunks=(100, 1, 1, 30))
    assert found.dtype == torch.float32
    difference = (found - expected).abs().amax(-1)
    assert float(difference[200]) < 1e-4
    assert float(difference.max()) < 1e-4
    assert float(expected.std()) > 0.5  # a reference that says something
