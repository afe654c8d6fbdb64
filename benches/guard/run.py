#!/usr/bin/env python3
"""Counts the instructions of `Scheduler::step` and holds them against their ceilings.

Callgrind runs the loads of `benches/guard/main.rs`, counts inside `measured_step` only, and dumps
after every call, so that each step has its own count. The loads are the same in every run and so
are the counts: no clock is read, and a busy machine does not matter.

`ceilings.toml` holds the most instructions for each rustc and target, since another compiler makes
other code. One that is not in the file is reported and never fails. Exit codes: 0 within the
ceilings, 1 above one, 2 not measured.

    benches/guard/run.py                    counts, and compares
    benches/guard/run.py --json             the same as one JSON line
    benches/guard/run.py --update REASON    counts, and sets this compiler's ceilings 5 % above
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CEILINGS = HERE / "ceilings.toml"
# What --update leaves above the count of today.
MARGIN = 0.05
MEASURED = "guard::measured_step"
INSTALL = "install it: `apt-get install valgrind`, `dnf install valgrind` or `pacman -S valgrind`"
# One way of copying memory on every processor: which one glibc takes depends on what it finds.
TUNABLES = "glibc.cpu.hwcaps=-AVX512VL,-AVX512F,-AVX2,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM"
# Ceilings by name: the load, and what of its steps counts.
FIGURES = {
    "steady_256_mean": ("steady-256", "mean"),
    "steady_1024_mean": ("steady-1024", "mean"),
    "mixed_mean": ("mixed", "mean"),
    "mixed_worst": ("mixed", "worst"),
}
HEADER = """\
# Most instructions of one `Scheduler::step`, by rustc and target: `make bench-guard`.
# Written by `benches/guard/run.py --update REASON`; a ceiling is raised with its reason in
# docs/benchmarks.md only.
"""


class NotMeasuredError(Exception):
    """Why there are no counts."""


def output_of(*command: str | Path, **settings: object) -> str:
    """Standard output of a command; its failure, with what it said, is `NotMeasuredError`."""
    result = subprocess.run(command, capture_output=True, text=True, **settings)  # type: ignore[call-overload]
    if result.returncode:
        said = (result.stderr.strip() or result.stdout.strip())[-2000:]
        name = Path(command[0]).name
        raise NotMeasuredError(f"{name} failed (exit code {result.returncode}):\n{said}")
    return str(result.stdout)


def compiler() -> str:
    """Release and target of the rustc in use, as the tables of `ceilings.toml` are named."""
    facts = dict(re.findall(r"^(\w+): (.+)$", output_of("rustc", "-vV", cwd=ROOT), re.MULTILINE))
    return f"{facts['release']} {facts['host']}"


def build() -> Path:
    """Builds the guard in release mode, whatever RUSTFLAGS says, and gives its path."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target" / "benches")).absolute()
    environment = {name: value for name, value in os.environ.items() if "RUSTFLAGS" not in name}
    environment["CARGO_TARGET_DIR"] = str(target)
    manifest = ROOT / "benches" / "Cargo.toml"
    command = ("cargo", "build", "--quiet", "--locked", "--release", "--bin", "guard")
    output_of(*command, "--manifest-path", manifest, cwd=ROOT, env=environment)
    return target / "release" / "guard"


def count_steps(guard: Path, load: str) -> list[int]:
    """Instructions of each measured step of `load`, in order."""
    with tempfile.TemporaryDirectory(prefix="cbrs-guard-") as folder:
        said = output_of(
            "valgrind",
            "--tool=callgrind",
            f"--toggle-collect={MEASURED}",
            f"--dump-after={MEASURED}",
            "--callgrind-out-file=steps",
            guard,
            load,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "GLIBC_TUNABLES": TUNABLES},
        )
        # steps.1, steps.2, ...; the one without a number is what is left at the end.
        dumps = sorted(Path(folder).glob("steps.*"), key=lambda path: int(path.suffix[1:]))
        counts = [read_total(path.read_text()) for path in dumps]
    if len(counts) != int(said) or min(counts, default=0) == 0:
        raise NotMeasuredError(
            f"{load}: {said.strip()} steps, but {len(counts)} counts; callgrind must see {MEASURED}"
        )
    return counts


def read_total(dump: str) -> int:
    """The instructions that a callgrind dump counts."""
    found = re.search(r"^totals: (\d+)$", dump, re.MULTILINE)
    if found is None:
        raise NotMeasuredError("a callgrind dump has no totals")
    return int(found[1])


def summarize(steps: dict[str, list[int]]) -> dict[str, int]:
    """The guarded figures from the counts of each load's steps."""
    summaries = {"mean": lambda counts: round(sum(counts) / len(counts)), "worst": max}
    return {name: summaries[what](steps[load]) for name, (load, what) in FIGURES.items()}


def is_above(count: int, ceiling: int | None) -> bool:
    """Whether a figure is above its ceiling; without one nothing is."""
    return ceiling is not None and count > ceiling


def update(text: str, key: str, figures: dict[str, int], reason: str) -> str:
    """The text of `ceilings.toml` with new ceilings for compiler `key`."""
    tables = tomllib.loads(text)
    ceilings = {name: int(count * (1 + MARGIN)) for name, count in figures.items()}
    tables[key] = {"reason": reason, **ceilings}
    blocks = [HEADER]
    for name, table in sorted(tables.items()):
        lines = [f"{field} = {json.dumps(value)}" for field, value in table.items()]
        blocks.append("\n".join([f"[{json.dumps(name)}]", *lines, ""]))
    return "\n".join(blocks)


def print_table(key: str, figures: dict[str, int], ceilings: dict[str, int]) -> None:
    """Shows every figure beside its ceiling."""
    print(f"instructions of one Scheduler::step, rustc {key}")
    for name, count in figures.items():
        line = f"  {name:<18}{count:>12,}"
        if ceiling := ceilings.get(name):
            line += f"  ceiling {ceiling:>12,}  {count / ceiling:>7.1%}"
            line += "  ABOVE" if is_above(count, ceiling) else ""
        print(line)
    if not ceilings:
        print(f"no ceilings for this compiler in {CEILINGS.name}: reported only")


def measure() -> tuple[str, dict[str, int]]:
    """The compiler in use and the figures of what it makes."""
    if shutil.which("valgrind") is None:
        raise NotMeasuredError(f"valgrind is not installed; {INSTALL}")
    key, guard = compiler(), build()
    loads = dict.fromkeys(load for load, _ in FIGURES.values())
    return key, summarize({load: count_steps(guard, load) for load in loads})


def main() -> int:
    """Measures, compares or updates, and gives the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only one JSON line")
    parser.add_argument("--update", metavar="REASON", help="set this compiler's ceilings")
    options = parser.parse_args()
    try:
        key, figures = measure()
    except NotMeasuredError as error:
        print(f"bench-guard: {error}", file=sys.stderr)
        return 2
    if options.update:
        CEILINGS.write_text(update(CEILINGS.read_text(), key, figures, options.update))
    ceilings = tomllib.loads(CEILINGS.read_text()).get(key, {})
    above = [name for name, count in figures.items() if is_above(count, ceilings.get(name))]
    if options.json:
        result = {"compiler": key, "figures": figures, "ceilings": ceilings, "above": above}
        print(json.dumps({"bench": "guard", **result}))
    else:
        print_table(key, figures, ceilings)
    if above:
        print(
            f"bench-guard: above the ceiling: {', '.join(above)}. Find what got slower, or raise "
            "it with `benches/guard/run.py --update REASON` and the reason in docs/benchmarks.md",
            file=sys.stderr,
        )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
