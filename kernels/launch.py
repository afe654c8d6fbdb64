"""The launch table: how a kernel runs on a device, by kernel, capability and shape. No autotuning.

Rows are data, in `tables/*.json`, so that a script that measures on a device can write them. A row
has `kernel`, `capability` (the least one it is for, as 10 * major + minor), `when` (inclusive
bounds `[low, high]` of shape numbers; one that is left out holds for any), `num_warps`,
`num_stages`, `constants` of the kernel, and `example`: what `compile.py` builds it with. Of the
rows of a kernel that hold, the greatest capability wins, then the one with most conditions, then
the first. A row without `when` at the least capability is the default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

MAX_ROWS = 40
"""Most rows of all tables together: each is compiled ahead of time in the tests."""

_TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Launch:
    """How one launch runs: warps per program, stages of its loops, constants of the kernel."""

    num_warps: int
    num_stages: int
    constants: dict[str, int]

    @property
    def options(self) -> dict[str, int]:
        """What Triton takes beside the kernel's own arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table; see the module."""

    kernel: str
    capability: int
    launch: Launch
    when: dict[str, tuple[int, int]] = field(default_factory=dict)
    example: dict[str, Any] = field(default_factory=dict)

    def holds(self, capability: int, shape: dict[str, int]) -> bool:
        """Whether the row is for a device of `capability` and this shape."""
        return self.capability <= capability and all(
            name in shape and low <= shape[name] <= high for name, (low, high) in self.when.items()
        )


@dataclass(frozen=True, slots=True)
class Example:
    """One specialization of a kernel, to compile ahead of time.

    `signature` has Triton's name of the type of every argument that is no constant, by name;
    `divisible` are the arguments that are multiples of 16 (pointers as addresses). A `hot` kernel
    may not spill registers.
    """

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    hot: bool = True


@dataclass(frozen=True, slots=True)
class Device:
    """What launches depend on. A device that only interprets kernels looks like a small Hopper."""

    capability: tuple[int, int]
    num_processors: int


INTERPRETED = Device((9, 0), 4)
"""What a tensor in the computer's own memory stands for: only Triton's interpreter takes it."""


def read_rows(folder: Path = _TABLES) -> tuple[Row, ...]:
    """Read all `*.json` of `folder`, in order of name; ValueError names a file that is no table."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        try:
            rows += [_row(entry) for entry in json.loads(path.read_text())]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a launch table: {error!r}") from error
    if len(rows) > MAX_ROWS:
        raise ValueError(f"{folder} has {len(rows)} rows, {MAX_ROWS} are allowed: drop some")
    return tuple(rows)


def choose(kernel: str, device_capability: tuple[int, int], **shape: int) -> Launch:
    """Return how `kernel` runs on a device of (major, minor) for this shape.

    `shape` are the numbers that the rows of this kernel name in `when`. ValueError if no row holds.
    """
    return _choose(kernel, device_capability, tuple(shape.items()))


@lru_cache(maxsize=4096)
def _choose(kernel: str, capability: tuple[int, int], shape: tuple[tuple[str, int], ...]) -> Launch:
    number, numbers = 10 * capability[0] + capability[1], dict(shape)
    row = best(_rows(), kernel, number, numbers)
    if row is None:
        raise ValueError(
            f"no launch of {kernel} for capability {capability[0]}.{capability[1]} and {numbers}: "
            "give its table in kernels/tables a row without conditions"
        )
    return row.launch


def best(rows: tuple[Row, ...], kernel: str, capability: int, shape: dict[str, int]) -> Row | None:
    """Return the row of a table that a device of `capability` uses; None if none holds."""
    held = [row for row in rows if row.kernel == kernel and row.holds(capability, shape)]
    return max(
        held, key=lambda row: (row.capability, len(row.when)), default=None
    )  # first of equals


@lru_cache(maxsize=1)
def _rows() -> tuple[Row, ...]:
    return read_rows()


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Return what launches on `device` depend on; asks the driver once."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count)


def _row(entry: dict[str, Any]) -> Row:
    unknown = entry.keys() - {
        "kernel",
        "capability",
        "when",
        "num_warps",
        "num_stages",
        "constants",
        "example",
    }
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    when = {name: (int(low), int(high)) for name, (low, high) in entry.get("when", {}).items()}
    constants = {name: int(number) for name, number in entry.get("constants", {}).items()}
    launch = Launch(int(entry["num_warps"]), int(entry["num_stages"]), constants)
    return Row(
        entry["kernel"], int(entry["capability"]), launch, when, dict(entry.get("example", {}))
    )
