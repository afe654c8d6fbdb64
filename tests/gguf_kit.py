"""GGUF files of the kit's checkpoints, written by the `gguf` package with its names of tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import kit
import numpy as np
import torch
from batches import Chunk, Tables

from cbrs.loading import load_model
from cbrs.runner.model_runner import make_runner

TOKENS = [int(t) for t in np.random.default_rng(5).integers(2, kit.NUM_TOKENS, 210)]

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""What GGUF files call a model type, where it is not the same."""

PAIRWISE = ("llama", "smollm3")
"""Architectures that store the two rows of a rotary pair side by side."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the value of `general.architecture`."""
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GGUF keys that say what `config` says, all but windows and rotary scalings."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    prefix = architecture_of(config)
    return {f"{prefix}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": kit.BOS,
        "tokenizer.ggml.eos_token_id": kit.EOS,
    }


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Put query or key rows into the pairwise rotary order of GGUF files."""
    split = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def stored(config: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """Return what a GGUF file stores for a tensor of a Hugging Face checkpoint."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = name.split(".")[-2]
    if architecture_of(config) in PAIRWISE and kind in heads:
        return interleaved(values, heads[kind])
    if architecture_of(config) == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1.0)
    return values


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a checkpoint as GGUF; a metadata value of None leaves the key out."""
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
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
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    for name, values in tensors.items():
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written is not None, name
        writer.add_tensor(written, stored(config, name, values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(path: Path) -> torch.Tensor:
    loaded = load_model(path, dtype="float32", device="cpu", num_threads=1)
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
