"""How many bytes of weights a step reads."""

from __future__ import annotations

import math
from pathlib import Path

from cbrs._core import GgufFile
from cbrs.loading import resolve
from cbrs.models import config_from_gguf, config_from_hf, model_class
from cbrs.models.fields import read_json
from cbrs.models.llama import EMBEDDING

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def bytes_of_a_step(model: str, dtype: str) -> int:
    """Bytes of all matrices in `dtype`, the head once: what each step reads whatever its batch.

    An embedding that is not the head as well is looked up, not read. 0 for `null`.
    """
    path = resolve(model)
    if isinstance(path, str):
        return 0
    if path.is_dir():
        file = path / "config.json"
        config = config_from_hf(read_json(file), file, None)
    else:
        config = config_from_gguf(GgufFile(Path(path)), path)
    skipped = None if config.tie_word_embeddings else f"{EMBEDDING}.weight"
    tensors = model_class(config.architecture).expected_tensors(config)
    sizes = (math.prod(shape) for name, shape in tensors if len(shape) == 2 and name != skipped)
    return DTYPE_BYTES[dtype] * sum(sizes)
