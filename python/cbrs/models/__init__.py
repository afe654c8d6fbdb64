"""Model architectures: the registry from a checkpoint's architecture name to its class.

An architecture is one file of this package with one class. The class reads its own configuration,
names the tensors that it needs, and is the module that runs them; `docs/models.md` says how to add
one. The files load torch, so they are imported when a checkpoint asks for them.
"""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbrs.models.config import ModelConfig
from cbrs.models.fields import Fields
from cbrs.models.gguf import GgufFields, GgufSource

if TYPE_CHECKING:
    from cbrs.models.llama import LlamaForCausalLM

logger = logging.getLogger("cbrs")

_FILES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_GGUF = {
    "llama": "LlamaForCausalLM",  # Mistral too is written as llama
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}

ARCHITECTURES = tuple(_FILES)
"""Hugging Face architecture names that can be loaded."""

GGUF_ARCHITECTURES = tuple(_GGUF)
"""Values of `general.architecture` that can be loaded."""


def model_class(architecture: str) -> "type[LlamaForCausalLM]":
    """Return the class that runs `architecture`, one of `ARCHITECTURES`."""
    module = importlib.import_module(f"cbrs.models.{_FILES[architecture]}")
    found: type[LlamaForCausalLM] = getattr(module, architecture)
    return found


def config_from_hf(
    values: Mapping[str, Any], file: str | Path, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read the object of a `config.json`; `generation` is `generation_config.json` if any.

    The end tokens of `generation` replace those of `values`, as they do in the reference.
    """
    fields = Fields(values, file)
    config = model_class(_hf_architecture(fields)).config_from_hf(fields)
    stops = Fields(generation or {}, Path(file).with_name("generation_config.json"))
    eos = stops.token_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_token_ids=eos or config.eos_token_ids)


def config_from_gguf(source: GgufSource, file: str | Path) -> ModelConfig:
    """Read the metadata of the GGUF file `source`, which was opened at `file`."""
    fields = GgufFields(source, file)
    if fields.architecture not in _GGUF:
        supported = ", ".join(_GGUF)
        detail = f"{fields.architecture!r} is not supported; only {supported}"
        raise Fields({}, file, "general.").error("architecture", detail)
    return model_class(_GGUF[fields.architecture]).config_from_gguf(fields)


def _hf_architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None and fields.text("model_type", "") in _MODEL_TYPES:
        names = [_MODEL_TYPES[fields.text("model_type")]]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", f"{names!r} is not a list of names")
    if names[0] == "Gemma3ForConditionalGeneration":
        detail = "the multimodal Gemma 3 is not supported; only its text model, Gemma3ForCausalLM"
        raise fields.error("architectures", detail)
    if names[0] not in _FILES:
        supported = ", ".join(_FILES)
        raise fields.error("architectures", f"{names[0]!r} is not supported; only {supported}")
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized safetensors are not supported")
    if fields.get("auto_map") is not None:
        logger.warning(
            "%s: auto_map names code of the checkpoint's own; cbrs never runs such code and uses "
            "its own %s",
            fields.file,
            names[0],
        )
    return names[0]
