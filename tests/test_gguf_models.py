"""GGUF files as models: the logits of the same checkpoint as a folder, or a clear refusal."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from gguf_kit import assert_same, write_gguf

from cbrs.errors import ModelLoadError
from cbrs.loading import load_model
from cbrs.models.rope import Rotary, inverse_frequencies

Tensors = dict[str, np.ndarray]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_theta": 500000.0},
        {"num_key_value_heads": 4},
    ],
    ids=lambda changes: "_".join(changes) or "plain",
)
def test_gguf_gives_the_logits_of_the_folder(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same(tmp_path, **changes)


@pytest.mark.parametrize("window", [0, 8])
def test_window_of_a_gguf_file_is_applied(window: int, tmp_path: Path) -> None:
    changes = {**kit.FAMILIES["mistral"], "sliding_window": window or None}
    if window == 0:
        changes |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert_same(tmp_path, {"llama.attention.sliding_window": window}, **changes)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_i06_rope_scaling_of_a_gguf_file_is_applied(kind: str, tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    assert_same(tmp_path, metadata, rope_scaling=kit.ROPE_SCALINGS[kind])


def test_i06_rope_factors_of_a_gguf_file_are_applied(tmp_path: Path) -> None:
    scaling = kit.ROPE_SCALINGS["llama3"]
    wavelengths = 2 * math.pi / inverse_frequencies(Rotary(10000.0, 16)).astype(np.float64)
    ratio = scaling["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((ratio - 1.0) / 3.0, 0.0, 1.0)
    factors = 1.0 / (smooth + (1.0 - smooth) / scaling["factor"])
    extra = {"rope_freqs.weight": factors.astype(np.float32)}
    assert_same(tmp_path, extra=extra, rope_scaling=scaling)


def test_gguf_tokenizer_may_be_smaller_than_the_embedding(tmp_path: Path) -> None:
    config = kit.tiny_config()
    file = write_gguf(tmp_path / "model.gguf", config, kit.tensors_of(config))
    loaded = load_model(file, device="cpu")
    assert loaded.tokenizer is not None
    assert loaded.vocab_size == loaded.tokenizer.vocab_size < loaded.config.vocab_size
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello 日本")) == "hello 日本"
    assert loaded.eos_token_ids == (kit.EOS,)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # name: (metadata, field that is named)
    "architecture_is_unknown": ({"general.architecture": "bloom"}, "general.architecture"),
    "layers_are_absurd": ({"llama.block_count": 10**9}, "llama.block_count"),
    "layers_are_missing": ({"llama.block_count": None}, "llama.block_count"),
    "layer_is_missing": ({"llama.block_count": 3}, "blk.2."),
    "layer_is_left_over": ({"llama.block_count": 1}, "blk.1."),
    "width_is_zero": ({"llama.embedding_length": 0}, "llama.embedding_length"),
    "heads_are_zero": ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
    "heads_do_not_divide": ({"llama.attention.head_count": 5}, "llama.attention.head_count"),
    "kv_heads_do_not_divide": (
        {"llama.attention.head_count_kv": 3},
        "llama.attention.head_count_kv",
    ),
    "key_length_differs": ({"llama.attention.key_length": 32}, "llama.rope.dimension_count"),
    "value_length_differs": (
        {"llama.attention.value_length": 8},
        "llama.attention.value_length",
    ),
    "rope_is_partial": ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
    "rope_type_is_unknown": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
    "rope_factor_is_missing": (
        {"llama.rope.scaling.type": "linear"},
        "llama.rope.scaling.factor",
    ),
    "theta_is_nan": ({"llama.rope.freq_base": math.nan}, "llama.rope.freq_base"),
    "epsilon_is_infinite": (
        {"llama.attention.layer_norm_rms_epsilon": math.inf},
        "llama.attention.layer_norm_rms_epsilon",
    ),
    "window_is_negative": (
        {"llama.attention.sliding_window": -1},
        "llama.attention.sliding_window",
    ),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count"),
    "vocabulary_differs": ({"llama.vocab_size": 300}, "llama.vocab_size"),
    "context_is_a_string": ({"llama.context_length": "long"}, "llama.context_length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gguf_with_bad_metadata_is_one_error_naming_the_key(case: str, tmp_path: Path) -> None:
    metadata, field = REFUSED[case]
    config = kit.tiny_config()
    file = write_gguf(tmp_path / "model.gguf", config, kit.tensors_of(config), metadata)
    started = time.monotonic()
    with pytest.raises(ModelLoadError) as caught:
        load_model(file)
    assert time.monotonic() - started < 2.0
    assert caught.value.file == str(file)
    assert caught.value.field.startswith(field)


def broken_factors(values: list[float]) -> dict[str, np.ndarray]:
    return {"rope_freqs.weight": np.array(values, dtype=np.float32)}


@pytest.mark.parametrize(
    ("edit", "extra", "field"),
    [
        (lambda t: t.pop("model.norm.weight"), {}, "output_norm.weight"),
        (lambda t: t, {"blk.0.attn_rot.weight": np.ones(4, np.float32)}, "blk.0.attn_rot.weight"),
        (lambda t: t, broken_factors([1.0] * 7), "rope_freqs.weight"),
        (lambda t: t, broken_factors([0.0] * 8), "rope_freqs.weight"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)}),
            {},
            "output_norm.weight",
        ),
    ],
    ids=["missing", "unknown", "too_few_factors", "zero_factor", "wrong_shape"],
)
def test_gguf_with_bad_tensors_is_one_error_naming_the_tensor(
    edit: Callable[[Tensors], Any], extra: Tensors, field: str, tmp_path: Path
) -> None:
    config = kit.tiny_config()
    tensors = kit.tensors_of(config)
    edit(tensors)
    file = write_gguf(tmp_path / "model.gguf", config, tensors, extra=extra)
    with pytest.raises(ModelLoadError) as caught:
        load_model(file)
    assert caught.value.file == str(file)
    assert caught.value.field == field


def test_single_safetensors_file_is_pointed_to_its_folder(tiny_checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"give the folder with config\.json"):
        load_model(tiny_checkpoint / "model.safetensors")
