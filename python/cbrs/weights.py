"""Tensors of a checkpoint file, checked against what a model expects and read one at a time.

All names and shapes are compared before the first tensor is read, so a checkpoint that does not fit
is refused at once and no half-built model is left behind.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbrs._core import CpuKernels
from cbrs.models.fields import load_error
from cbrs.parallel.split import Shard

if TYPE_CHECKING:
    from cbrs.models.layers import Group

_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Older checkpoints store the rotary frequencies, which follow from the config."""


Values = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""A tensor as a file gives it: float32, or the bits of bfloat16."""


class TensorFile(Protocol):
    """A GGUF file or a safetensors checkpoint, as `cbrs._core` opens it."""

    @property
    def tensor_names(self) -> list[str]:
        """Names of all tensors."""

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, `(out_features, in_features)` for a matrix."""

    def tensor(self, name: str, dtype: str, part: tuple[int, int, int] | None = None) -> Values:
        """Return the values as float32, or as the bits of bfloat16 in uint16.

        `part` is a dimension, and its first index and that behind its last.
        """


class CheckpointWeights:
    """Reads tensors by Hugging Face name, converted to the type that the model runs in."""

    def __init__(
        self,
        source: TensorFile,
        path: Path,
        convert: Callable[[str, Values], Values],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None = None,
        quantization: str | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Read from `source`, which was opened at `path`.

        `kernels` and `quantization` are as in `models.layers.Weights`. With `shard` only that part
        of each tensor is read.

        `convert` gets the Hugging Face name and the stored values of a tensor and returns those
        that the model uses.
        """
        self.dtype = dtype
        self.device = device
        self.kernels = kernels
        self.quantization = quantization
        self._shard = shard
        self._source = source
        self._path = path
        self._convert = convert
        self._names: dict[str, str] = {}

    @property
    def group(self) -> "Group | None":
        """The ranks that the model is split among; None if this process has all of it."""
        return None if self._shard is None else self._shard.group

    def check(
        self,
        expected: Iterable[tuple[str, str, tuple[int, ...]]],
        optional: Iterable[str] = (),
    ) -> None:
        """Compare all tensors with `expected`: (name, name in the file, shape).

        A missing tensor, a wrong shape and a tensor that is neither expected nor in `optional`
        raise `ModelLoadError`.
        """
        present = set(self._source.tensor_names)
        self._names = {}
        for name, stored, shape in expected:
            if stored not in present:
                raise load_error(self._path, stored, "missing tensor")
            found = tuple(self._source.tensor_shape(stored))
            if found != shape:
                raise load_error(
                    self._path, stored, f"shape {list(found)}, but the config asks {list(shape)}"
                )
            self._names[name] = stored
        known = {*self._names.values(), *optional}
        for stored in _unknown(present, known):
            raise load_error(self._path, stored, "unknown tensor; this model has no place for it")

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one tensor, which the caller owns; `dtype` overrides the type it runs in."""
        wanted = self.dtype if dtype is None else dtype
        bits = wanted == torch.bfloat16
        values = self._values(name, "bfloat16" if bits else "float32")
        if not values.flags.writeable:
            values = values.copy()  # torch takes no read-only memory
        tensor = torch.from_numpy(values)
        if bits:
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(device=self.device, dtype=wanted)

    def _values(self, name: str, dtype: str) -> Values:
        """Return what this process has of a tensor, as the model uses it."""
        stored = self._names[name]
        parts = []
        if self._shard is not None:
            parts = self._shard.parts(name, tuple(self._source.tensor_shape(stored)))
        if not parts:
            return self._convert(name, self._source.tensor(stored, dtype))
        # A part is whole heads wherever rows are put into another order.
        read: list[Any] = [
            self._convert(name, self._source.tensor(stored, dtype, part)) for part in parts
        ]
        values: Values = read[0] if len(read) == 1 else np.concatenate(read, parts[0].dimension)
        return values

    def require_equal(self, name: str, stored: str) -> None:
        """Refuse a checkpoint whose tensor `stored` is not bit for bit the tensor `name`."""
        other = self._source.tensor(stored, "float32")
        if not np.array_equal(self._source.tensor(self._names[name], "float32"), other):
            raise load_error(
                self._path, stored, f"differs from {name}, although the config ties the two"
            )


def _unknown(present: set[str], known: set[str]) -> Iterator[str]:
    return (name for name in sorted(present - known) if not name.endswith(_IGNORED_SUFFIX))
