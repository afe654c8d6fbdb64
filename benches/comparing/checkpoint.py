"""A GGUF file dequantised by the loader of cbrs, and the Hugging Face folder that it makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from cbrs._core import GgufFile, SafetensorsCheckpoint
from cbrs.models import config_from_gguf
from cbrs.models.config import ModelConfig
from cbrs.models.llama import LlamaForCausalLM

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "f16": torch.float16}
CORE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Source:
    """A GGUF file of the llama architecture, tensors under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        """Opens it; `ValueError` if its layers have anything that is not copied."""
        self.path = path
        self.file = GgufFile(path)
        self.config = config_from_gguf(self.file, path)
        if self.config.architecture != "LlamaForCausalLM":
            raise ValueError(f"{self.config.architecture} is not copied; LlamaForCausalLM is")
        rotary = self.config.rotary[0]
        if rotary is None or rotary.scaling is not None or any(self.config.sliding_windows):
            raise ValueError("rotary scalings and sliding windows are not copied")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return [name for name, _ in LlamaForCausalLM.expected_tensors(self.config)]

    def tensor(self, name: str, form: str) -> torch.Tensor:
        """The values in the type of a form, rounded once from the dequantised ones."""
        stored = LlamaForCausalLM.gguf_name(name)
        if form == "bf16":
            bits = self.file.tensor(stored, CORE_DTYPES[form])
            return torch.from_numpy(bits).view(torch.bfloat16)
        return torch.from_numpy(self.file.tensor(stored)).to(DTYPES[form])


def write_folder(source: Source, folder: Path, form: str) -> None:
    """Writes config, weights, tokenizer and generation config."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": config_json(source.config, form),
        "generation_config.json": special_ids(source.config),
        "tokenizer_config.json": tokenizer_config(source.file),
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(source.file.tokenizer_json(), encoding="utf-8")
    tensors = {name: source.tensor(name, form) for name in source.names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_json(config: ModelConfig, form: str) -> dict[str, Any]:
    """What `config.json` says."""
    rotary = config.rotary[0]
    assert rotary is not None, "refused when the source was opened"
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rotary.theta,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": CORE_DTYPES[form],
        **special_ids(config),
    }


def special_ids(config: ModelConfig) -> dict[str, Any]:
    """First and last token of a sequence."""
    ends = config.eos_token_ids
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
    }
    return {name: value for name, value in ids.items() if value is not None}


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """What goes with `tokenizer.json`."""
    added = json.loads(file.tokenizer_json())["added_tokens"]
    contents = {token["id"]: token["content"] for token in added}
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": file.add_bos_token,
        "chat_template": file.chat_template,
    }
    for kind in ("bos", "eos", "unk", "pad"):
        values[f"{kind}_token"] = contents.get(file.special_token_ids.get(kind, -1))
    return {name: value for name, value in values.items() if value is not None}


def different_tensors(source: Source, path: Path, form: str) -> list[str]:
    """Reads a written checkpoint; the names of tensors that are not what the source makes of it.

    Raises what the loader raises if it is no checkpoint.
    """
    return [name for name, is_equal in _compare(source, path, form) if not is_equal]


def _compare(source: Source, path: Path, form: str) -> Iterator[tuple[str, bool]]:
    from . import gguf_copy  # which needs a package that folders do not

    is_gguf = path.suffix == ".gguf"
    written = GgufFile(path) if is_gguf else SafetensorsCheckpoint(path)
    kind = form.removesuffix(".gguf")
    expected = {LlamaForCausalLM.gguf_name(name) if is_gguf else name for name in source.names}
    for name in expected ^ set(written.tensor_names):
        yield name, False
    for name in source.names:
        stored = LlamaForCausalLM.gguf_name(name) if is_gguf else name
        if kind not in CORE_DTYPES | DTYPES and not is_vector(name):
            found = torch.from_numpy(written.tensor(stored))
            expected_values = gguf_copy.dequantized(source, name, kind)
            in_file_order = gguf_copy.pairwise(source, name, found).numpy()
            yield name, np.array_equal(in_file_order, expected_values)
            continue
        values = source.tensor(name, "fp32" if is_gguf and is_vector(name) else kind)
        yield name, np.array_equal(written.tensor(stored), values.float().numpy())


def is_vector(name: str) -> bool:
    """Whether it is a norm or a bias."""
    return name.endswith((".bias", "norm.weight"))
