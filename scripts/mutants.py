#!/usr/bin/env python3
"""Apply each seeded fault in turn and see that a test notices it.

The faults stand in `tests/mutants/*.toml`. Each is applied to a copy of the tree, the suite runs
stage by stage, and the tests that failed are printed. Noticed means: a test failed, its process
was ended by a signal, or it found no end where it does without the fault. A fault that survives,
whose text is not found exactly once, or whose stage fails in any other way is an error (exit code
1), and so is a stage that fails without any fault.

    scripts/mutants.py                  all faults
    scripts/mutants.py salt-left-out    only these
    scripts/mutants.py --check          only whether each text is found exactly once
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "tests" / "mutants"
# Faults that every release must notice; each is seeded here or has a reason why it cannot be.
NUM_FAULTS = 24
# What is copied: everything that the Rust build needs.
SOURCES = ("Cargo.toml", "Cargo.lock", "rust", "benches", "tests/golden")
STAGE_TIMEOUT_S = 900
# Fast and telling stages first; the rest is there for what they miss.
STAGES = (
    "-p cbrs-core --test behaviour -- --skip shrink:: --skip model_based:: --skip exhaustive::",
    "-p cbrs-core --test behaviour -- model_based::",
    "-p cbrs-core --test behaviour -- exhaustive::",
    "-p cbrs-core --lib",
)
RANDOM_OPS = "200000"
HANGS = "hangs"
FAILED_TEST = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)
# Signals that a process brings on itself; SIGKILL is sent by others, when memory is short.
DEATH = re.compile(r"process didn't exit successfully: .*\(signal: (?:4|6|7|8|11), (SIG[A-Z]+)")


@dataclass(frozen=True)
class Mutant:
    """One seeded fault: `find` occurs once in `file` and is replaced."""

    id: str
    what: str
    file: str
    find: str
    replace: str
    stages: tuple[str, ...]

    def change(self, text: str) -> str:
        """Put the fault into the text of its file.

        Raises:
            ValueError: `find` does not occur exactly once.
        """
        found = text.count(self.find)
        if found != 1:
            raise ValueError(f"{self.id}: its text occurs {found} times in {self.file}, not once")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the tests that noticed it, if any did."""

    mutant: Mutant
    killed_by: list[str]
    seconds: float


@dataclass(frozen=True)
class CargoRun:
    """How a run of cargo ended, and what it printed."""

    failed: bool
    hung: bool
    text: str

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return self.text[-3000:]


def load() -> tuple[list[Mutant], list[str]]:
    """Read all faults, and a line for each that does not apply."""
    mutants, not_applicable, faults = [], [], set()
    for path in sorted(MUTANTS.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for entry in document.get("mutant", []):
            stages = (entry["test"],) if "test" in entry else STAGES
            texts = (entry[key] for key in ("id", "what", "file", "find", "replace"))
            mutants.append(Mutant(*texts, stages=stages))
            faults.add(entry.get("fault"))
        for entry in document.get("not_applicable", []):
            not_applicable.append(f"fault {entry['fault']}: {entry['what']}: {entry['reason']}")
            faults.add(entry["fault"])
    missing = sorted(set(range(1, NUM_FAULTS + 1)) - faults)
    if missing:
        raise ValueError(f"faults {missing} are neither seeded nor said not to apply")
    return mutants, not_applicable


def copy_sources(tree: Path) -> None:
    """Copy what the build needs, as new files: cargo must not take what an earlier fault left."""
    for name in SOURCES:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("target")
            shutil.copytree(source, target, ignore=ignored, copy_function=shutil.copyfile)
        elif source.exists():
            shutil.copyfile(source, target)


def cargo_test(stage: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `stage`, and its environment."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target" / "mutants"))
    environment = dict(os.environ, CBRS_RANDOM_OPS=RANDOM_OPS, RUST_BACKTRACE="0")
    if "--test loom" in stage:
        profile = "--release"
        environment["RUSTFLAGS"] = "--cfg loom"
        environment["CARGO_PROFILE_RELEASE_LTO"] = "off"
        environment["CARGO_PROFILE_RELEASE_CODEGEN_UNITS"] = "16"
        target = target / "loom"
    else:
        profile = "--profile=checked"
        # Each fault is compiled once and run for seconds.
        environment["CARGO_PROFILE_CHECKED_OPT_LEVEL"] = "1"
        environment["CARGO_PROFILE_CHECKED_INCREMENTAL"] = "true"
    environment["CARGO_TARGET_DIR"] = str(target)
    command = ["cargo", "test", "--locked", "--no-fail-fast", profile, *shlex.split(stage)]
    return command, environment


def run_stage(tree: Path, stage: str) -> list[str]:
    """Run one stage and return what noticed a fault; nothing if all its tests passed.

    Raises:
        ValueError: it could not be judged; above all, it does not compile.
    """
    command, environment = cargo_test(stage)
    # Built first and without a limit: a slow compiler is no test that hangs.
    output = run_cargo([*command[:2], "--no-run", *command[2:]], tree, environment, None)
    if output.failed:
        raise ValueError(f"`cargo test {stage}` cannot be built:\n{output.tail}")
    output = run_cargo(command, tree, environment, STAGE_TIMEOUT_S)
    return killers(stage, output)


def run_cargo(
    command: list[str], tree: Path, environment: dict[str, str], timeout_s: float | None
) -> CargoRun:
    """Run `command` in `tree`; past `timeout_s`, end it and all that it started."""
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    hung = False
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        # The group: the test binary would outlive cargo, and hold the pipe.
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        hung = isinstance(error, subprocess.TimeoutExpired)
        if not hung:
            raise
    return CargoRun(failed=process.returncode != 0, hung=hung, text=text)


def killers(stage: str, output: CargoRun) -> list[str]:
    """What noticed the fault: the tests that failed, or how their process died.

    Raises:
        ValueError: the run failed for none of these reasons, so that nothing is known.
    """
    names = FAILED_TEST.findall(output.text)
    if names or not output.failed:
        return names
    if output.hung:
        return [HANGS]
    died = DEATH.search(output.text)
    if died:
        return [f"the test process died of {died[1]}"]
    raise ValueError(f"`cargo test {stage}` failed, but no test did:\n{output.tail}")


def try_mutant(tree: Path, mutant: Mutant) -> Outcome:
    """Apply a fault, run its stages until one notices it, and take it back.

    Raises:
        ValueError: a stage could not be judged.
    """
    path = tree / mutant.file
    original = path.read_text()
    start = time.monotonic()
    killed_by: list[str] = []
    try:
        path.write_text(mutant.change(original))
        for stage in mutant.stages:
            killed_by = run_stage(tree, stage)
            if killed_by:
                break
    except ValueError as error:
        raise ValueError(f"{mutant.id}: {error}") from error
    finally:
        path.write_text(original)
    return Outcome(mutant, killed_by, time.monotonic() - start)


def describe(outcome: Outcome) -> str:
    """One line for an outcome."""
    if not outcome.killed_by:
        return f"SURVIVED  {outcome.mutant.id}: {outcome.mutant.what}"
    if outcome.killed_by == [HANGS]:
        return f"hangs     {outcome.mutant.id}: a test has no end within {STAGE_TIMEOUT_S} s"
    others = len(outcome.killed_by) - 1
    more = f" and {others} more" if others else ""
    by = f"{outcome.killed_by[0]}{more} ({outcome.seconds:.0f} s)"
    return f"killed    {outcome.mutant.id}: by {by}"


def check(mutants: list[Mutant]) -> list[str]:
    """Say which faults cannot be applied to the tree as it is."""
    problems = []
    for mutant in mutants:
        try:
            mutant.change((ROOT / mutant.file).read_text())
        except ValueError as error:
            problems.append(str(error))
    return problems


def run(mutants: list[Mutant]) -> list[Outcome]:
    """Try every mutant in a copy of the tree, which must be green without any.

    Raises:
        ValueError: it is not.
    """
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="cbrs-mutants-") as folder:
        tree = Path(folder)
        copy_sources(tree)
        for stage in dict.fromkeys(stage for mutant in mutants for stage in mutant.stages):
            failed = run_stage(tree, stage)
            if failed:
                raise ValueError(f"without any fault, `cargo test {stage}` fails: {failed}")
        for number, mutant in enumerate(mutants, 1):
            outcomes.append(try_mutant(tree, mutant))
            print(f"[{number}/{len(mutants)}] {describe(outcomes[-1])}", flush=True)
    return outcomes


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="ids of the faults to try (default: all)")
    parser.add_argument(
        "--check", action="store_true", help="only look whether each fault can be applied"
    )
    arguments = parser.parse_args()
    try:
        mutants, not_applicable = load()
        unknown = set(arguments.ids) - {mutant.id for mutant in mutants}
        if unknown:
            raise ValueError(f"no such fault: {', '.join(sorted(unknown))}")
        problems = check(mutants)
        if problems:
            raise ValueError("\n".join(problems))
        if arguments.check:
            return 0
        wanted = [mutant for mutant in mutants if not arguments.ids or mutant.id in arguments.ids]
        start = time.monotonic()
        outcomes = run(wanted)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    survivors = [outcome for outcome in outcomes if not outcome.killed_by]
    print("\n" + "\n".join(f"not applicable  {line}" for line in not_applicable))
    print("\n".join(describe(outcome) for outcome in survivors))
    killed = len(outcomes) - len(survivors)
    print(f"{killed} of {len(outcomes)} faults were noticed, in {time.monotonic() - start:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
