"""From a model's name to a model that can run: resolve, check, read.

A name is a known model (`cbrs.hub.KNOWN_MODELS`), `null`, a folder in the Hugging Face layout, a
`.gguf` file, or a hub id. Whatever is wrong with a checkpoint is one `ModelLoadError` that names
the file and the field. Pickle files are never opened and no code from a checkpoint is run.
"""

import json
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cbrs import hub
from cbrs._core import CpuKernels, GgufFile, SafetensorsCheckpoint, Tokenizer
from cbrs.config import check_quantization
from cbrs.models import config_from_gguf, config_from_hf, model_class
from cbrs.models.config import ModelConfig
from cbrs.models.fields import load_error, read_json, read_text
from cbrs.models.layers import Group
from cbrs.models.llama import EMBEDDING, HEAD, LlamaForCausalLM
from cbrs.models.null import NullModel, is_null, null_config, parse_step_cost
from cbrs.parallel.split import Shard, check_split
from cbrs.runner.kv_cache import KV_DTYPES, row_len
from cbrs.weights import CheckpointWeights

logger = logging.getLogger("cbrs")

_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth", ".pkl", ".ckpt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_NULL_TOKENIZER = "smollm2-135m-instruct"  # used if it has been fetched
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights and its tokenizer.

    `vocab_size` is the number of ids that may be sampled: the tokenizer's, which can be smaller
    than the padded `config.vocab_size`. `tokenizer` is None for a folder that has none; such a
    model takes and gives token ids only. `path` is None for `null`. `kernels` are the native ones
    that the weights are packed for, with their threads; None where the weights are plain.
    """

    name: str
    path: Path | None
    config: ModelConfig
    module: nn.Module
    tokenizer: Tokenizer | None
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    kernels: CpuKernels | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self.config.eos_token_ids

    @property
    def is_null(self) -> bool:
        """Whether this is the model without weights."""
        return isinstance(self.module, NullModel)

    def kv_dtype(self, kv_cache_dtype: str) -> torch.dtype:
        """Return the torch type that `kv_cache_dtype` means for this model."""
        return self.dtype if kv_cache_dtype == "auto" else KV_DTYPES[kv_cache_dtype]

    def kv_bytes_per_block(self, block_size: int, kv_dtype: torch.dtype | None = None) -> int:
        """Return the bytes of one KV block over all layers; 0 for a model without a KV cache."""
        shape, kv_dtype = self.config, kv_dtype or self.dtype
        row_bytes = row_len(shape.head_dim, kv_dtype) * kv_dtype.itemsize
        return 2 * shape.num_layers * shape.num_kv_heads * block_size * row_bytes


def resolve(name_or_path: str | os.PathLike[str]) -> Path | str:
    """Return where the model lies, fetching a known model or a hub id first; "null" for `null`.

    Raises:
        ModelLoadError: there is no such name, file or folder.
        ImportError: a hub id without the extra `hub`.
    """
    name = os.fspath(name_or_path)
    if is_null(name):
        return "null"
    if name in hub.KNOWN_MODELS:
        return hub.pull(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.lower().endswith(_FILE_SUFFIXES) or not _HUB_ID.fullmatch(name):
        known = ", ".join([*hub.KNOWN_MODELS, "null"])
        raise load_error(
            name, "model", f"no such file or folder, and not a known name; known names: {known}"
        )
    return hub.pull_from_hub(name)


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "auto",
    num_threads: int | None = None,
    pack: bool = True,
    tokenizer: str | os.PathLike[str] | None = None,
    group: Group | None = None,
) -> LoadedModel:
    """Load a model to run on `device` in `dtype`, with its tokenizer or the one of `tokenizer`.

    A `device` of `auto` is the first CUDA device if there is one. For `auto` as `dtype` see
    `choose_dtype`. With `quantization="int8"` matrices and embeddings are rounded to 8 bits, from
    the values that the file stands for. `num_threads` is for the native kernels, None one per core
    that this process may use; it also sets torch's CPU threads, which the process shares.
    `pack=False` keeps the plain weights and runs them with torch, as a reference for the packed
    ones. With `group` only this rank's part of the model is read, plain, and `LoadedModel.config`
    is the shape of that part.

    Raises:
        ModelLoadError: no such model, or a checkpoint that is malformed or not supported.
        ValueError: a dtype, device, quantization or number of ranks that cannot be used here.
    """
    check_quantization(quantization)
    target = choose_device(device)
    if quantization is not None and target.type != "cpu":
        raise ValueError(
            f"quantization {quantization!r} runs on the CPU only, but the device is {target}; "
            "give device='cpu' or leave quantization out"
        )
    choose_dtype(dtype, target)  # what cannot be is refused before anything is fetched
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    name = os.fspath(name_or_path)
    path = resolve(name)
    if _samples_nothing(group):
        tokenizer = None
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if isinstance(path, str):
        if group is not None:
            raise ValueError(
                f"tensor_parallel_size is {group.size}, but {name} has no weights to split; give 1"
            )
        return _load_null(name, choose_dtype(dtype, target), target, given)
    kernels = None
    if pack and group is None and target.type == "cpu":
        kernels = CpuKernels(num_threads or len(os.sched_getaffinity(0)))
    if path.is_dir():
        return _load_folder(name, path, dtype, target, kernels, quantization, given, group)
    return _load_gguf(name, path, dtype, target, kernels, quantization, given, group)


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer and chat template of a known model, a folder or a `.gguf` file.

    Raises:
        ModelLoadError: there is none, or it is malformed.
    """
    name = os.fspath(name_or_path)
    path = hub.pull(name) if name in hub.KNOWN_MODELS else Path(name).expanduser()
    if not path.exists():
        known = ", ".join(hub.KNOWN_MODELS)
        raise load_error(name, "tokenizer", f"no such folder or .gguf file; known names: {known}")
    if not path.is_dir():
        return _gguf_tokenizer(GgufFile(str(path)), path)
    tokenizer = _folder_tokenizer(path)
    if tokenizer is None:
        raise load_error(path, "tokenizer.json", "missing")
    return tokenizer


def choose_device(device: str) -> torch.device:
    """Return the device that `device` names; `auto` is CUDA if there is a usable one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; give 'auto', 'cpu' or 'cuda'") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch finds no CUDA device; give 'cpu'")
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; give 'auto', 'cpu' or 'cuda'")
    return target


def choose_dtype(dtype: str, device: torch.device, is_stored_in_full: bool = True) -> torch.dtype:
    """Return the torch type that `dtype` means on `device`.

    On the CPU `auto` is float32 for a checkpoint that is stored in full, that is in float32, and
    bfloat16 for every other one: half the bytes, and no slower without bfloat16 instructions. On a
    GPU it is bfloat16 where that computes in it, else float32.
    """
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32 if is_stored_in_full else torch.bfloat16
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; give one of auto, {', '.join(_DTYPES)}")
    if dtype == "float16" and device.type == "cpu":
        raise ValueError("dtype float16 needs a GPU; give 'bfloat16' or 'float32' on the CPU")
    return _DTYPES[dtype]


def _is_stored_in_full(
    names: list[str], shape: Callable[[str], tuple[int, ...]], kind: Callable[[str], str]
) -> bool:
    """Say whether most values of a checkpoint's matrices are stored in float32."""
    sizes = {True: 0, False: 0}
    for name in names:
        if len(shape(name)) > 1:
            sizes[kind(name) == "F32"] += math.prod(shape(name))
    return sizes[True] > sizes[False]


def _load_null(
    name: str, dtype: torch.dtype, device: torch.device, tokenizer: Tokenizer | None
) -> LoadedModel:
    cost = parse_step_cost(name)
    if tokenizer is None:
        cached = hub.cached(_NULL_TOKENIZER)
        tokenizer = None if cached is None else _gguf_tokenizer(GgufFile(str(cached)), cached)
        used = "one of single bytes" if cached is None else f"the one of {_NULL_TOKENIZER}"
        logger.info("null: the tokenizer is %s", used)
    module = NullModel(tokenizer, cost)
    return LoadedModel(
        name=name,
        path=None,
        config=null_config(module.vocab_size),
        module=module,
        tokenizer=module.tokenizer,
        vocab_size=module.vocab_size,
        dtype=dtype,
        device=device,
    )


def _load_gguf(
    name: str,
    path: Path,
    dtype: str,
    device: torch.device,
    kernels: CpuKernels | None,
    quantization: str | None,
    given: Tokenizer | None,
    group: Group | None,
) -> LoadedModel:
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        raise load_error(path, "model", "give the folder with config.json, or a .gguf file")
    source = GgufFile(str(path))
    config = config_from_gguf(source, path)
    shard = _shard(config, group)
    family = model_class(config.architecture)
    tokenizer = None if _samples_nothing(group) else given or _gguf_tokenizer(source, path)
    vocab_size = _sampled_vocab(family, config, tokenizer, path)
    convert = partial(family.convert_gguf, config)
    full = _is_stored_in_full(source.tensor_names, source.tensor_shape, source.tensor_type)
    chosen = choose_dtype(dtype, device, full)
    weights = CheckpointWeights(
        source,
        path,
        convert,
        dtype=chosen,
        device=device,
        kernels=kernels,
        quantization=quantization,
        shard=shard,
    )
    tensors = family.expected_tensors(config)
    expected = ((name, family.gguf_name(name), shape) for name, shape in tensors)
    weights.check(expected, optional=family.gguf_factors)
    local = config if shard is None else shard.local_config
    module = family(local, weights)
    return LoadedModel(name, path, local, module, tokenizer, vocab_size, chosen, device, kernels)


def _load_folder(
    name: str,
    path: Path,
    dtype: str,
    device: torch.device,
    kernels: CpuKernels | None,
    quantization: str | None,
    given: Tokenizer | None,
    group: Group | None,
) -> LoadedModel:
    values = read_json(path / "config.json")
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else None
    config = config_from_hf(values, path / "config.json", generation)
    shard = _shard(config, group)
    family = model_class(config.architecture)
    if not any(path.glob("*.safetensors")) and not (path / "model.safetensors.index.json").exists():
        raise load_error(path, "model.safetensors", _no_weights(path))
    source = SafetensorsCheckpoint(str(path))
    tokenizer = None if _samples_nothing(group) else given or _folder_tokenizer(path)
    vocab_size = _sampled_vocab(family, config, tokenizer, path / "tokenizer.json")
    convert = partial(family.convert_hf, config)
    full = _is_stored_in_full(source.tensor_names, source.tensor_shape, source.tensor_dtype)
    chosen = choose_dtype(dtype, device, full)
    weights = CheckpointWeights(
        source,
        path,
        convert,
        dtype=chosen,
        device=device,
        kernels=kernels,
        quantization=quantization,
        shard=shard,
    )
    stored_head = f"{HEAD}.weight"
    tied = config.tie_word_embeddings and stored_head in source.tensor_names
    expected = ((name, name, shape) for name, shape in family.expected_tensors(config))
    weights.check(expected, optional=[stored_head] if tied else [])
    if tied and not _samples_nothing(group):  # once: it reads all of both
        weights.require_equal(f"{EMBEDDING}.weight", stored_head)
    local = config if shard is None else shard.local_config
    module = family(local, weights)
    return LoadedModel(name, path, local, module, tokenizer, vocab_size, chosen, device, kernels)


def _shard(config: ModelConfig, group: Group | None) -> Shard | None:
    """Return this rank's part of a model, which must be one that can be divided so."""
    if group is None:
        return None
    check_split(config, group.size)
    return Shard(config, group)


def _samples_nothing(group: Group | None) -> bool:
    """Say whether this process is a rank without text: all of that is rank 0's."""
    return group is not None and group.rank > 0


def _no_weights(path: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return f"missing; {pickles[0]} is a pickle, which is never opened: convert to safetensors"
    return "missing; the folder holds no safetensors file"


def _sampled_vocab(
    family: type[LlamaForCausalLM], config: ModelConfig, tokenizer: Tokenizer | None, file: Path
) -> int:
    if tokenizer is None:
        return config.vocab_size
    if tokenizer.vocab_size > config.vocab_size + family.tokens_without_embedding:
        detail = f"{tokenizer.vocab_size} tokens, but the model has {config.vocab_size} embeddings"
        raise load_error(file, "vocabulary", detail)
    return min(tokenizer.vocab_size, config.vocab_size)


def _gguf_tokenizer(source: GgufFile, path: Path) -> Tokenizer:
    text = source.tokenizer_json()
    special = source.special_token_ids
    contents = {token["id"]: token["content"] for token in json.loads(text)["added_tokens"]}
    options: dict[str, Any] = {
        "chat_template": source.chat_template,
        "bos_token": contents.get(special.get("bos")),
        "eos_token": contents.get(special.get("eos")),
        "add_bos_token": source.add_bos_token,
    }
    return _make_tokenizer(text, path, options)


def _folder_tokenizer(path: Path) -> Tokenizer | None:
    file = path / "tokenizer.json"
    if not file.exists():
        if (path / "tokenizer.model").exists():
            detail = "missing; tokenizer.model alone is not supported: convert to tokenizer.json"
            raise load_error(path, "tokenizer.json", detail)
        return None
    settings_file = path / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    options: dict[str, Any] = {
        "chat_template": _chat_template(path, settings, settings_file),
        "bos_token": _special_token(settings, "bos_token", settings_file),
        "eos_token": _special_token(settings, "eos_token", settings_file),
        "add_bos_token": settings.get("add_bos_token") is True,
    }
    return _make_tokenizer(read_text(file, _MAX_TOKENIZER_BYTES), file, options)


def _make_tokenizer(text: str, file: Path, options: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer(text, **options)
    except ValueError as error:
        raise load_error(file, "tokenizer", str(error)) from None


def _chat_template(path: Path, settings: dict[str, Any], settings_file: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file, _MAX_TEMPLATE_BYTES)
    value = settings.get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise load_error(settings_file, "chat_template", f"a {type(value).__name__}, not a string")
    return value


def _special_token(settings: dict[str, Any], key: str, file: Path) -> str | None:
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise load_error(file, key, f"a {type(value).__name__}, not a string")
    return value
