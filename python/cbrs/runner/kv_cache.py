"""The KV cache: one key and one value tensor a layer, cut into blocks of tokens."""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

import torch

from cbrs.kernels import reference

DEFAULT_MEMORY_FRACTION = 0.25
DEFAULT_MAX_BYTES = 4 * 1024**3

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""What `kv_cache_dtype` may say."""

_LARGE_BYTES = 16 * 1024**2
"""A tensor of so many bytes asks for large pages: blocks are read in any order, and with small
pages each of them is a miss of the address cache."""


def row_len(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of one head of one token: with its factor, if it has one."""
    return head_dim + (reference.SCALE_BYTES if dtype in reference.QUANTIZED else 0)


class KVCache:
    """Key and value tensors `[num_blocks, num_kv_heads, block_size, head_dim]` of every layer.

    Of int8 and fp8 the last dimension is `head_dim + 2`: in each block and head the numbers of all
    its tokens, then a bfloat16 factor for each token (`cbrs.kernels.reference`).

    `keys[layer]` and `values[layer]` are contiguous. Slot `s` of the scheduler is block
    `s // block_size`, token `s % block_size`. `poison=True` fills every slot with NaN, so that a
    read of a slot that was never written shows up; `fill` does the same for chosen blocks later.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
    ) -> None:
        """Allocate the tensors; on the CPU the system gives memory when it is first written."""
        shape = (num_blocks, num_kv_heads, block_size, row_len(head_dim, dtype))
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.keys = [cleared(shape, dtype, self.device) for _ in range(num_layers)]
        self.values = [cleared(shape, dtype, self.device) for _ in range(num_layers)]
        if poison:
            self.fill(float("nan"))

    def fill(self, number: float, blocks: slice = slice(None)) -> None:
        """Overwrite every slot of `blocks` with one number; for tests."""
        for tensor in (*self.keys, *self.values):
            if self.dtype in reference.QUANTIZED:
                reference.fill_quantized(tensor[blocks], number)
            else:
                tensor[blocks].fill_(number)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers together."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def cleared(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros; on the CPU of pages that take no memory until they are written.

    `torch.zeros` writes all of them at once: a second and a half for each GiB, before the first
    request.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    # A mapping of its own: what the C library gives may have been used before, and is written then.
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        message = f"no {num_bytes} bytes for a layer's keys or values: {error}"
        raise MemoryError(f"{message}; lower num_blocks or kv_cache_bytes") from error
    if num_bytes >= _LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages; it was only a hint
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # keeps the memory


def default_num_blocks(block_bytes: int, device: torch.device | str = "cpu") -> int:
    """Return how many blocks fit 25 % of the device's free memory, at most 4 GiB; at least 1."""
    budget = min(int(free_memory(device) * DEFAULT_MEMORY_FRACTION), DEFAULT_MAX_BYTES)
    return max(1, budget // block_bytes)


def free_memory(device: torch.device | str = "cpu") -> int:
    """Return the bytes that can still be allocated on `device`.

    For the CPU this is what the system calls available, or less if a control group (a container)
    allows less.
    """
    target = torch.device(device)
    if target.type == "cuda":
        return torch.cuda.mem_get_info(target)[0]
    return min(_available_memory(), _control_group_headroom(Path("/sys/fs/cgroup")))


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo does not tell MemAvailable; set num_blocks")


def _control_group_headroom(root: Path) -> int:
    """Return what the limit of this process's control group, version 2 or 1, leaves."""
    places = (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    )
    for limit_file, usage_file in places:
        try:
            limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            return max(0, int(limit) - int(usage))
    return 2**63 - 1
