"""Weights in int8: native products against plain torch, and the models against float32."""

from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import TOKENS, load, logits_of
from test_golden import SMOLLM2, teacher_forced

import cbrs
from cbrs import LLM, SamplingParams
from cbrs._core import CpuKernels
from cbrs.loading import load_model
from cbrs.models.layers import Linear, to_array
from cbrs.models.quantization import rounded_inputs, rounded_weights

SHAPES = [(1, 1), (16, 32), (17, 33), (40, 95), (130, 576)]
MAX_MEAN_DIFFERENCE = 0.05
MAX_MEAN_DIFFERENCE_KV = 0.03
MARGIN = 0.5


def uneven(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return numbers of very different sizes, with groups of zeros and of equal signs."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator)
    numbers *= torch.randn(rows, columns, generator=generator).exp()
    numbers[0, :20] = 0.0
    numbers[-1] = numbers[-1].abs()
    return numbers


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_packed_weights_are_the_rounded_ones(out_features: int, in_features: int) -> None:
    weight = uneven(out_features, in_features, 1)
    packed = CpuKernels(2).pack(to_array(weight), int8=True)
    rows = np.full((out_features, in_features), np.nan, dtype=np.float32)
    packed.rows(rows, np.arange(out_features, dtype=np.int32))
    assert np.array_equal(rows, rounded_weights(weight).numpy())
    assert "int8" in repr(packed)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_rounded_numbers(
    num_tokens: int, out_features: int, in_features: int, bias: bool
) -> None:
    weight, inputs = uneven(out_features, in_features, 2), uneven(num_tokens, in_features, 3)
    offset = torch.randn(out_features) if bias else None
    exact = rounded_inputs(inputs).double() @ rounded_weights(weight).double().T
    if offset is not None:
        exact += offset
    for kernels in (CpuKernels(2), None):
        layer = Linear(weight, offset, kernels=kernels, quantization="int8")
        found = layer(inputs)
        assert float((found - exact).abs().max()) <= 3e-6 * float(exact.abs().max())
    # And they are near the products of the numbers themselves, but not equal.
    plain = F.linear(inputs, weight, offset)
    error = float((found - plain).abs().mean())
    assert error <= 0.1 * float(plain.abs().mean())
    assert error > 0 or in_features == 1


@pytest.mark.parametrize("name", kit.FAMILIES)
def test_every_family_is_what_torch_makes_of_rounded_numbers(name: str, tmp_path: Path) -> None:
    folder = kit.family(tmp_path / name, name)
    exact = logits_of(load(folder), TOKENS)
    packed = logits_of(load(folder, quantization="int8"), TOKENS, chunks=(100, 1, 1, 30))
    plain = logits_of(load(folder, quantization="int8", pack=False), TOKENS)
    effect = float((packed - exact).abs().mean())
    assert 0 < effect < 0.1 * float(exact.std())
    # Sums differ in their last bits, so that now and then a number between two integers is rounded
    # to the other one, which later layers see.
    assert float((packed - plain).abs().mean()) < 0.5 * effect


@pytest.mark.parametrize("tied", [True, False])
def test_a_sequence_has_the_same_logits_in_any_chunks(tied: bool, tmp_path: Path) -> None:
    folder = kit.tiny(tmp_path / "model", tie_word_embeddings=tied)
    loaded = load(folder, quantization="int8")
    whole = logits_of(loaded, TOKENS)
    assert torch.equal(whole, logits_of(loaded, TOKENS, chunks=(1, 90, 7, 1, 30)))


def test_the_type_of_everything_else_is_still_dtype(tiny_checkpoint: Path) -> None:
    loaded = load(tiny_checkpoint, dtype="bfloat16", quantization="int8")
    assert loaded.dtype == torch.bfloat16
    narrow = logits_of(loaded, TOKENS[:60])
    wide = logits_of(load(tiny_checkpoint, quantization="int8"), TOKENS[:60])
    # The same integers: they are made of the stored values, not of those in bfloat16.
    assert torch.equal(
        loaded.module.embedding(torch.arange(9, dtype=torch.int32)),
        load(tiny_checkpoint, quantization="int8").module.embedding(
            torch.arange(9, dtype=torch.int32)
        ),
    )
    assert 0 < float((narrow - wide).abs().mean()) < 0.03 * float(wide.std())


def test_smollm2_stays_near_float32(smollm2_gguf: Path) -> None:
    cases = SMOLLM2["cases"]
    exact = load_model(smollm2_gguf, dtype="float32", device="cpu")
    rounded = load_model(smollm2_gguf, dtype="float32", quantization="int8", device="cpu")
    differences = []
    both = zip(teacher_forced(exact, cases, 512), teacher_forced(rounded, cases, 512), strict=True)
    for case, (expected, found) in zip(cases, both, strict=True):
        steps = slice(len(case["prompt_ids"]) - 1, -1)
        ids = torch.tensor(case["output_ids_ignore_eos"]).unsqueeze(-1)
        own = expected[steps].gather(1, ids) - found[steps].gather(1, ids)
        differences += own.abs().flatten().tolist()
        best = expected.topk(2)
        changed = found.argmax(-1) != best.indices[:, 0]
        margin = best.values[:, 0] - best.values[:, 1]
        assert not bool((changed & (margin > MARGIN)).any()), case["name"]
    assert 1e-3 < float(np.mean(differences)) <= MAX_MEAN_DIFFERENCE


def test_smollm2_with_keys_and_values_in_int8_stays_near_itself(smollm2_gguf: Path) -> None:
    cases = SMOLLM2["cases"]
    loaded = load_model(smollm2_gguf, dtype="bfloat16", device="cpu")
    exact = teacher_forced(loaded, cases, 512)
    narrow = teacher_forced(loaded, cases, 512, torch.int8)
    differences = []
    for case, expected, found in zip(cases, exact, narrow, strict=True):
        steps = slice(len(case["prompt_ids"]) - 1, -1)
        ids = torch.tensor(case["output_ids_ignore_eos"]).unsqueeze(-1)
        own = expected[steps].gather(1, ids) - found[steps].gather(1, ids)
        differences += own.abs().flatten().tolist()
    mean = float(np.mean(differences))
    print(f"mean difference of log-probabilities with an int8 KV cache: {mean:.4f}")
    assert 1e-3 < mean <= MAX_MEAN_DIFFERENCE_KV


def test_an_engine_says_what_it_runs_and_takes_less_memory(smollm2_gguf: Path, caplog: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "num_blocks": 64}
    with caplog.at_level("INFO", logger="cbrs"):
        llm = LLM(str(smollm2_gguf), quantization="int8", **options)
    with llm, LLM(str(smollm2_gguf), **options) as wide:
        assert llm.config().quantization == "int8"
        assert wide.config().quantization is None
        assert "int8 weights, else bfloat16, on cpu" in caplog.text
        sizes = [engine.engine._runner.decoder.weight_bytes for engine in (llm, wide)]
        assert sizes[0] / sizes[1] == pytest.approx(17 / 32, rel=1e-3)
        question = [{"role": "user", "content": "Write one sentence about the sea."}]
        answer = llm.chat(question, params, use_tqdm=False)[0].outputs[0]
        assert answer.text.startswith("The sea is a vast")
        others = ["One, two, three,", "The sky is", "A"]
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in others]
        together = llm.generate(others, params, use_tqdm=False)
        for one, beside in zip(alone, together, strict=True):
            assert one.outputs[0].token_ids == beside.outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_have_a_type_of_their_own(make_llm: Any, tiny: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    num_blocks: dict[str, int] = {}
    for kv_cache_dtype in ("float32", "bfloat16", "int8", "auto"):
        llm = make_llm(tiny, dtype=dtype, kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=1 << 20)
        config = llm.config()
        assert config.kv_cache_dtype == (dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
        num_blocks[kv_cache_dtype] = config.num_blocks
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 6
    assert num_blocks["bfloat16"] == 2 * num_blocks["float32"]
    # 16 numbers of a head and two bytes of its factor.
    assert num_blocks["int8"] / num_blocks["bfloat16"] == pytest.approx(32 / 18, rel=0.01)
    assert num_blocks["auto"] == num_blocks[dtype]


@pytest.mark.parametrize("value", ["int4", "INT8", "", "none"])
def test_an_unknown_value_is_refused_with_what_to_give(value: Any, tiny_checkpoint: Path) -> None:
    expected = f"quantization is {value!r}; give 'int8', or leave it out"
    with pytest.raises(ValueError, match=expected):
        cbrs.EngineConfig(quantization=value)
    with pytest.raises(ValueError, match=expected):
        load_model(tiny_checkpoint, quantization=value)


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="runs on the CPU only, but the device is cuda"):
        load_model(tiny_checkpoint, device="cuda", quantization="int8")
