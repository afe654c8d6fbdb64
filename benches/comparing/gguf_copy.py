"""A GGUF file with the metadata of another and its weights in one type."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
import torch

from cbrs.models.llama import LlamaForCausalLM

from .checkpoint import Source, is_vector

TYPES = {
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
FILE_TYPES = {
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
}
QUANTIZED = ("q8_0", "q4_1")
# Written by the package itself, or about the source alone.
NOT_COPIED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write(source: Source, path: Path, kind: str) -> None:
    """Writes the file; `kind` is a key of `TYPES`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(FILE_TYPES[kind])
    for field in _reader(source.path).fields.values():
        if not field.name.startswith(NOT_COPIED):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for name in source.names:
        stored = LlamaForCausalLM.gguf_name(name)
        if is_vector(name):
            writer.add_tensor(stored, pairwise(source, name, source.tensor(name, "fp32")).numpy())
        elif kind in QUANTIZED:
            writer.add_tensor(stored, blocks(source, name, kind), raw_dtype=TYPES[kind])
        else:
            values = pairwise(source, name, source.tensor(name, kind))
            writer.add_tensor(stored, as_bytes(values), raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@cache
def _reader(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


def blocks(source: Source, name: str, kind: str) -> npt.NDArray[np.uint8]:
    """A matrix quantized by the package, row by row; as it is stored if that is its type."""
    stored = LlamaForCausalLM.gguf_name(name)
    for tensor in _reader(source.path).tensors:
        if tensor.name == stored and tensor.tensor_type == TYPES[kind]:
            return np.ascontiguousarray(tensor.data)
    values = pairwise(source, name, source.tensor(name, "fp32")).numpy()
    return gguf.quants.quantize(values, TYPES[kind])


def dequantized(source: Source, name: str, kind: str) -> npt.NDArray[np.float32]:
    """What the package makes of `blocks`, in the order of the file's rows."""
    return gguf.quants.dequantize(blocks(source, name, kind), TYPES[kind])


def pairwise(source: Source, name: str, values: torch.Tensor) -> torch.Tensor:
    """Rows of queries and keys with the two of a rotary pair side by side, as these files have."""
    heads = {"q_proj": source.config.num_heads, "k_proj": source.config.num_kv_heads}
    kind = name.split(".")[-2]
    if kind not in heads:
        return values
    split = values.unflatten(0, (heads[kind], 2, -1))
    return split.transpose(1, 2).reshape(values.shape)


def as_bytes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a matrix, row by row."""
    return values.contiguous().view(torch.uint8).numpy()
