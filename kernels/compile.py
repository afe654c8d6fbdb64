"""Compile every row of the launch table, without a GPU: `python -m cbrs.kernels.compile`.

Prints a table of registers and spills (from the machine code, by the `cuobjdump` of the triton
wheel) and shared memory (from Triton). A row that does not compile, needs more shared memory than
its device has, or spills in a hot kernel is a fault, and the exit status is 1. With `--everywhere`
rows are compiled for newer devices that would use them, too, and not for their own alone.

A module of kernels takes part by standing in `MODULES` and having `EXAMPLES`: for each name of a
kernel in the launch table, a function from a `launch.Row` to the `launch.Example` to compile.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import launch

MODULES = ("paged_attention", "op_cases")
"""Modules of `cbrs.kernels` whose kernels stand in the launch table."""

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most shared memory of a block, by capability (CUDA programming guide, "Compute capabilities")."""

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a row came to: bytes of shared memory and of spills per thread, or what went wrong."""

    row: launch.Row
    name: str
    hot: bool
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def fault(self) -> str:
        """Why the row may not stay as it is; empty if it may."""
        limit = SHARED_BYTES[self.row.capability]
        if self.error:
            return self.error
        if self.shared_bytes > limit:
            return f"needs {self.shared_bytes} bytes of shared memory, the device has {limit}"
        if self.hot and self.spill_bytes:
            return f"spills {self.spill_bytes} bytes of registers"
        return ""


def compile_rows(
    rows: tuple[launch.Row, ...] | None = None, everywhere: bool = False
) -> list[Compiled]:
    """Compile rows, by default the whole table, each for its own capability.

    With `everywhere` hot rows also for newer devices that would use them.

    A kernel that no module knows is a `KeyError`.
    """
    rows = launch.read_rows() if rows is None else rows
    examples: dict[str, Callable[[launch.Row], launch.Example]] = {}
    for module in MODULES:
        examples |= importlib.import_module(f"{__package__}.{module}").EXAMPLES
    compiled = []
    for row in rows:
        example = examples[row.kernel](row)
        # of what need not be fast, one is enough: float32 takes longest to compile
        capabilities = targets(row, rows) if everywhere and example.hot else [row.capability]
        compiled += [compile_row(replace(row, capability=n), example) for n in capabilities]
    return compiled


def targets(row: launch.Row, rows: tuple[launch.Row, ...]) -> list[int]:
    """Return the capabilities of `SHARED_BYTES` whose devices use `row` for its shapes."""
    shape = {name: high for name, (_, high) in row.when.items()}
    return [
        number
        for number in SHARED_BYTES
        if row.capability <= number and launch.best(rows, row.kernel, number, shape) is row
    ]


def compile_row(row: launch.Row, example: launch.Example) -> Compiled:
    """Compile one row for its capability."""
    begin = time.perf_counter()
    function = example.function
    names = function.arg_names
    signature = {
        name: "constexpr" if name in example.constants else example.signature[name]
        for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in example.divisible}
    source = ASTSource(function, signature, example.constants, attributes)
    label = " ".join(str(value) for value in row.example.values())
    try:
        compiled = triton.compile(
            source, target=GPUTarget("cuda", row.capability, 32), options=row.launch.options
        )
    except Exception as error:  # whatever a compiler raises: this row's fault, others go on
        return Compiled(row, label, example.hot, error=f"{type(error).__name__}: {error}")
    registers, spill_bytes = resources(compiled.asm["cubin"])
    return Compiled(
        row,
        label,
        example.hot,
        registers,
        spill_bytes,
        compiled.metadata.shared,
        time.perf_counter() - begin,
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread of a kernel's machine code, and bytes that were spilt."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = _USAGE.search(text)
    if found is None:
        raise RuntimeError(f"{' '.join(command)} told no registers:\n{text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def main() -> int:
    """Print the table; return 1 if a row has a fault."""
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    compiled = compile_rows(everywhere="--everywhere" in sys.argv[1:])
    line = "{:<20} {:>5} {:<28} {:>5} {:>6} {:>9} {:>6} {:>7} {:>7}  {}"
    print(
        line.format(
            "kernel", "sm", "example", "warps", "stages", "registers", "spills", "shared", "s", ""
        )
    )
    for result in compiled:
        print(
            line.format(
                result.row.kernel,
                result.row.capability,
                result.name,
                result.row.launch.num_warps,
                result.row.launch.num_stages,
                result.registers,
                result.spill_bytes,
                result.shared_bytes,
                f"{result.seconds:.1f}",
                result.fault,
            )
        )
    seconds = sum(result.seconds for result in compiled)
    faults = sum(bool(result.fault) for result in compiled)
    print(
        f"{len(compiled)} rows in {seconds:.0f} s with Triton {triton.__version__}: {faults} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
