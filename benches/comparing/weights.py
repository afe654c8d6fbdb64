"""How many bytes of weights a step reads."""

from __future__ import annotations

import math
from pathlib import Path

from cbrs._core import GgufFile
from cbrs.loading import resolve
from cbrs.models import config_from_gguf, config_from_hf, model_class
from cbrs.models.config import ModelConfig
from cbrs.models.fields import read_json
from cbrs.models.llama import EMBEDDING, HEAD

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def config_of(model: str) -> ModelConfig | None:
    """The shape of a model, as `cbrs` takes its name; None for `null`."""
    path = resolve(model)
    if isinstance(path, str):
        return None
    if path.is_dir():
        file = path / "config.json"
        return config_from_hf(read_json(file), file, None)
    return config_from_gguf(GgufFile(Path(path)), path)


def matrix_sizes(config: ModelConfig) -> tuple[int, int]:
    """Parameters of all matrices that a step reads but the head, and those of the head.

    An embedding that is not the head as well is looked up, not read.
    """
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    layers, of_head = 0, 0
    for name, shape in model_class(config.architecture).expected_tensors(config):
        if name == f"{head}.weight":
            of_head = math.prod(shape)
        elif len(shape) == 2 and name != f"{EMBEDDING}.weight":
            layers += math.prod(shape)
    return layers, of_head


def bytes_of_a_step(model: str, dtype: str) -> int:
    """Bytes of all matrices in `dtype`, the head once: what each step reads whatever its batch.

    0 for `null`.
    """
    config = config_of(model)
    return 0 if config is None else DTYPE_BYTES[dtype] * sum(matrix_sizes(config))
