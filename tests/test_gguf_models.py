"""GGUF files as models: the logits of the same checkpoint as a folder, or a clear refusal."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import kit
import numpy as np
import pytest
import torch
from batches import Chunk, Tables

from cbrs.errors import ModelLoadError
from cbrs.loading import load_model
from cbrs.models.llama import gguf_name
from cbrs.models.rope import inverse_frequencies
from cbrs.runner.model_runner import make_runner

TOKENS = [int(t) for t in np.random.default_rng(5).integers(2, kit.NUM_TOKENS, 210)]

Tensors = dict[str, np.ndarray]


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GGUF keys that say what `config` says."""
    keys = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": kit.BOS,
        "tokenizer.ggml.eos_token_id": kit.EOS,
    }
    if "sliding_window" in config:
        keys["llama.attention.sliding_window"] = config["sliding_window"]
    return keys


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Put query or key rows into the pairwise rotary order of GGUF files."""
    split = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a checkpoint as GGUF; a metadata value of None leaves the key out."""
    writer = gguf.GGUFWriter(path, "llama")
    add: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in {**metadata_of(config), **(metadata or {})}.items():
        if value is not None:
            (writer.add_int32 if value == -1 else add[type(value)])(key, value)
    model = kit.byte_tokenizer()["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges(model["merges"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in tensors.items():
        kind = name.split(".")[-2]
        stored = interleaved(values, heads[kind]) if kind in heads else values
        writer.add_tensor(gguf_name(name), stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(path: Path) -> torch.Tensor:
    loaded = load_model(path, dtype="float32", device="cpu")
    tables = Tables(1, len(TOKENS))
    runner, _ = make_runner(loaded, num_blocks=tables.num_blocks, block_size=16, num_threads=1)
    return runner.forward(tables.batch([Chunk(0, TOKENS)]))


def assert_same(
    tmp_path: Path,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> None:
    """Compare the folder of a config with its GGUF form, which also gets `metadata`."""
    config = kit.tiny_config(**changes)
    tensors = kit.tensors_of(config)
    folder = kit.write_folder(tmp_path / "folder", config, tensors)
    file = write_gguf(tmp_path / "model.gguf", config, tensors, metadata, extra)
    difference = (logits_of(folder) - logits_of(file)).abs().max()
    assert float(difference) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_theta": 500000.0},
        {"sliding_window": 8},
        {"num_key_value_heads": 4},
    ],
    ids=lambda changes: "_".join(changes) or "plain",
)
def test_gguf_gives_the_logits_of_the_folder(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same(tmp_path, **changes)


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
    wavelengths = 2 * math.pi / inverse_frequencies(10000.0, 16, None).astype(np.float64)
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
