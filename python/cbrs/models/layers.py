"""Building blocks that decoder architectures share.

Everything here is for inference: weights are read once, straight into the type they run in, and
the layers are called with the tokens of a whole batch, `[num_tokens, width]`.
"""

import importlib
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cbrs._core import CpuKernels, PackedLinear
from cbrs.models.quantization import rounded_inputs, rounded_weights
from cbrs.models.rope import Rotary, inverse_frequencies

_UPCAST_FROM_TOKENS = 4
"""From this many tokens on, a bfloat16 product without hardware support runs in float32."""


class Group(Protocol):
    """The ranks that a model is split among, as its layers use them."""

    @property
    def rank(self) -> int:
        """Number of this one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum of all ranks'."""

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Return every rank's `tensor`, None but on rank 0."""


class Weights(Protocol):
    """Where a model reads its tensors from, by their Hugging Face names."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that the model runs in; `read` converts to it."""

    @property
    def device(self) -> torch.device:
        """Device that the model runs on."""

    @property
    def kernels(self) -> CpuKernels | None:
        """Native kernels that linear layers pack their weights for; None keeps them plain."""

    @property
    def quantization(self) -> str | None:
        """ "int8" if matrices and embeddings are to be rounded to that, else None."""

    @property
    def group(self) -> Group | None:
        """The ranks that the model is split among, of which `read` gives this one's part."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one tensor, which the caller owns; `dtype` overrides the type it runs in."""


def read_matrix(weights: Weights, name: str) -> Tensor:
    """Return the matrix `name` in the type that it is packed from.

    Not in bfloat16 if it is rounded to int8, which would round it twice.
    """
    return weights.read(name, None if weights.quantization is None else torch.float32)


class Linear(nn.Module):
    """`x W^T + b`, where W may hold several projections of the same input, one after the other.

    On the CPU the matrix is packed once for the native kernels and the plain copy dropped. Without
    kernels the plain matrix is used, which is also the reference that the packed path is tested
    against.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        kernels: CpuKernels | None = None,
        num_parts: int = 1,
        quantization: str | None = None,
    ) -> None:
        """Take `weight` `[out_features, in_features]` and `bias` `[out_features]`.

        `num_parts=2` is for gate and up projection, which the kernels can combine. With
        `quantization="int8"` the weights are rounded here and the inputs in each product.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels
        self._rounds_inputs = quantization is not None and kernels is None
        self._packed = (
            None
            if kernels is None
            else kernels.pack(to_array(weight), num_parts, quantization is not None)
        )
        self._plain = None
        if self._packed is None:
            self._plain = rounded_weights(weight) if self._rounds_inputs else weight
        float_bias = self._packed is not None or self._rounds_inputs
        self.bias = bias.float() if float_bias and bias is not None else bias
        self._upcast = (
            self._packed is None
            and not self._rounds_inputs
            and weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and not native_bfloat16()
        )

    @classmethod
    def read(
        cls,
        weights: Weights,
        prefixes: Sequence[str],
        bias: bool,
        num_parts: int = 1,
        *,
        splits_inputs: bool = False,
    ) -> "Linear":
        """Read the projections called `prefixes` into one matrix, without a second copy of it.

        Among ranks, one that `splits_inputs` multiplies those that this rank has, and gives the
        whole result to all; others give this rank's outputs.
        """
        matrix = _join([read_matrix(weights, f"{prefix}.weight") for prefix in prefixes])
        offset = _join([weights.read(f"{prefix}.bias") for prefix in prefixes]) if bias else None
        if splits_inputs and weights.group is not None:
            return SummedLinear(matrix, offset, weights.group)
        return cls(
            matrix,
            offset,
            kernels=weights.kernels,
            num_parts=num_parts,
            quantization=weights.quantization,
        )

    @property
    def packed(self) -> PackedLinear | None:
        """The weights as the native kernels read them, if they are packed."""
        return self._packed

    @property
    def parts(self) -> tuple[PackedLinear, npt.NDArray[np.float32] | None]:
        """Packed weights and bias, for a native decoder."""
        if self._packed is None:
            raise RuntimeError("the layer's weights are not packed")
        return self._packed, None if self.bias is None else self.bias.numpy()

    def forward(self, inputs: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `[num_tokens, out_features]`, plus `residual` of that shape if given.

        The product has the type of `inputs`; a float32 `residual` makes the sum float32.
        """
        out = self._product(inputs)
        return out if residual is None else residual + out

    def _product(self, inputs: Tensor) -> Tensor:
        if self._packed is not None and self._kernels is not None:
            out = torch.empty((inputs.shape[0], self.out_features), dtype=torch.float32)
            weight, bias = self.parts
            values = inputs.float().contiguous().numpy()
            self._kernels.linear(out.numpy(), values, weight, bias)
            return out.to(inputs.dtype)
        plain = self._plain
        if plain is None:
            raise RuntimeError("a linear layer without weights")
        if self._rounds_inputs:
            return F.linear(rounded_inputs(inputs), plain, self.bias).to(inputs.dtype)
        if self._upcast and inputs.shape[0] >= _UPCAST_FROM_TOKENS:
            offset = None if self.bias is None else self.bias.float()
            return F.linear(inputs.float(), plain.float(), offset).to(inputs.dtype)
        return F.linear(inputs, plain, self.bias)


class Embedding(nn.Module):
    """The rows of a table by token, packed like a linear layer's weights or plain."""

    def __init__(
        self,
        table: Tensor,
        *,
        kernels: CpuKernels | None = None,
        quantization: str | None = None,
    ) -> None:
        """Take `table` `[vocab_size, hidden_size]`; `quantization` as for a linear layer."""
        super().__init__()
        is_int8 = quantization is not None
        self.packed = None if kernels is None else kernels.pack(to_array(table), int8=is_int8)
        self._plain = None
        if self.packed is None:
            self._plain = rounded_weights(table) if is_int8 else table
        self.dtype = table.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return float32 `[num_tokens, hidden_size]` for int32 ids."""
        if self.packed is not None:
            out = torch.empty((len(token_ids), self.packed.in_features), dtype=torch.float32)
            self.packed.rows(out.numpy(), token_ids.numpy())
            return out
        return F.embedding(token_ids, self.plain).float()

    @property
    def plain(self) -> Tensor:
        """The table, if it is not packed."""
        if self._plain is None:
            raise RuntimeError("the table is packed")
        return self._plain


class SummedLinear(Linear):
    """One rank's inputs of a product, which is the sum of all ranks' and the same on each."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Group) -> None:
        """Take `weight` `[out_features, own_inputs]` and the whole `bias` `[out_features]`."""
        super().__init__(weight)
        self._whole_bias = bias
        self._group = group

    def _product(self, inputs: Tensor) -> Tensor:
        out = super()._product(inputs)
        self._group.sum(out)
        return out if self._whole_bias is None else out + self._whole_bias


class SplitHead(Linear):
    """One rank's rows of the head. Rank 0 gets the logits of all; on the others there are none."""

    def __init__(self, weight: Tensor, num_rows: int, vocab_size: int, group: Group) -> None:
        """Take `weight` `[own_rows, hidden_size]`, which is filled up to `num_rows`, as all are."""
        missing = num_rows - len(weight)
        super().__init__(F.pad(weight, (0, 0, 0, missing)) if missing else weight)
        self._vocab_size = vocab_size
        self._group = group

    def forward(self, inputs: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `[num_tokens, vocab_size]` on rank 0, else `[0, vocab_size]`."""
        gathered = self._group.gather(super().forward(inputs, residual))
        if gathered is None:
            return inputs.new_empty((0, self._vocab_size))
        return torch.cat(gathered, dim=-1)[:, : self._vocab_size]


class TiedHead(Linear):
    """A head that is the packed embedding, so that it takes no memory of its own."""

    def __init__(self, embedding: Embedding, kernels: CpuKernels) -> None:
        """Multiply with the rows of `embedding`."""
        nn.Module.__init__(self)
        if embedding.packed is None:
            raise RuntimeError("the embedding is not packed")
        self.out_features = embedding.packed.out_features
        self.in_features = embedding.packed.in_features
        self._kernels, self._packed, self._plain = kernels, embedding.packed, None
        self.bias, self._upcast, self._rounds_inputs = None, False, False


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension, then scale by a learned weight."""

    def __init__(
        self, weights: Weights, name: str, eps: float, dtype: torch.dtype | None = None
    ) -> None:
        """Read the weight `name` `[width]`; `dtype` is the result's, by default the model's."""
        super().__init__()
        self.weight = weights.read(name, torch.float32)
        self.dtype = weights.dtype if dtype is None else dtype
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the norm of float32 `hidden`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps).to(self.dtype)


class HeadNorm(nn.Module):
    """RMSNorm of every query and key head by itself, in float32."""

    def __init__(
        self, weights: Weights, prefix: str, eps: float, num_heads: int, num_kv_heads: int
    ) -> None:
        """Read `q_norm` and `k_norm` `[head_dim]` under `prefix`."""
        super().__init__()
        query = weights.read(f"{prefix}.q_norm.weight", torch.float32)
        key = weights.read(f"{prefix}.k_norm.weight", torch.float32)
        self.query, self.key = query, key
        # One row a head, so that queries and keys are scaled by one product.
        self.weight = torch.cat([query.expand(num_heads, -1), key.expand(num_kv_heads, -1)])
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """Return the norm of float32 `[num_tokens, num_heads + num_kv_heads, head_dim]`."""
        return F.rms_norm(heads, heads.shape[-1:], None, self.eps).mul_(self.weight)


class RotaryEmbedding(nn.Module):
    """Rotary positions in the half-split layout: dimension i turns together with i + dim / 2.

    The angles are computed from the positions of each batch, in float32, once for all layers. There
    is no table, so a long context costs no memory.
    """

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        """Compute the frequencies of `rotary`."""
        super().__init__()
        self.frequencies = torch.from_numpy(inverse_frequencies(rotary)).to(device)
        self.magnitude = 1.0 if rotary.scaling is None else rotary.scaling.attention_factor

    def forward(self, positions: Tensor) -> "Angles":
        """Return the angles of int32 positions `[num_tokens]`."""
        angles = torch.outer(positions.float(), self.frequencies).unsqueeze(1)
        cosine, sine = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cosine.mul_(self.magnitude)
            sine.mul_(self.magnitude)
        return cosine, sine


Angles = tuple[Tensor, Tensor]
"""Cosine and sine, float32 `[num_tokens, 1, dim / 2]`."""


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turn float32 `[num_tokens, num_heads, head_dim]`; dimensions without an angle stay."""
    cosine, sine = angles
    half = cosine.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(first, cosine, out=out[..., :half]).addcmul_(second, sine, value=-1.0)
    torch.mul(second, cosine, out=out[..., half : 2 * half]).addcmul_(first, sine)
    if 2 * half < heads.shape[-1]:
        out[..., 2 * half :] = heads[..., 2 * half :]
    return out


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that `ModelConfig.hidden_act` names."""
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
    }
    return known[name]


@cache
def native_bfloat16() -> bool:
    """Say whether this CPU multiplies bfloat16 in hardware."""
    if platform.machine() == "aarch64":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # On x86 that operator is also true for CPUs that only emulate bfloat16. Through the module's
    # name, because torch gives these functions no types.
    cpu: Any = importlib.import_module("torch.cpu")
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def _join(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].device.type != "cpu":
        return torch.cat(parts)
    # A plain copy: torch would start threads of its own for it, which then spin beside the kernels'
    # and made loading a small model take half as long again.
    joined = torch.from_numpy(np.concatenate([to_array(part) for part in parts]))
    return joined.view(parts[0].dtype) if joined.dtype == torch.uint16 else joined


def to_array(tensor: Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """Return a CPU tensor's memory as the native kernels take it; bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        bits: npt.NDArray[np.uint16] = tensor.contiguous().view(torch.uint16).numpy()
        return bits
    numbers: npt.NDArray[np.float32] = tensor.float().contiguous().numpy()
    return numbers
