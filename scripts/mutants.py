"""Plant each fault of `tests/mutants/*.toml` in turn and name the test that notices it.

Works on a copy of the sources, in `target/mutants/`. A fault is a text that occurs exactly once in
its file and what to put in its place; `test` narrows what is run. Exit status 1 if a fault survives
the tests, does not apply (its text has moved), or does not compile.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "target" / "mutants"
COPIED = ("Cargo.toml", "Cargo.lock", "rust", "tests/golden")
# A fault may make a test loop for ever; that is noticed, too.
TIMEOUT_S = 300
FAILED_TEST = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. FAILED$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Suite:
    """How the faults of one file are looked for."""

    test: str
    """Arguments of `cargo test` for a fault that names none."""
    variables: dict[str, str] = field(default_factory=dict)


# By the name of the file of faults; others are like `core`.
SUITES = {
    "core": Suite("-p cbrs-core --lib --tests"),
    "loom": Suite("-p cbrs-core --test loom", {"RUSTFLAGS": "--cfg loom"}),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault to plant."""

    id: str
    what: str
    """What goes wrong, in words."""
    file: str
    find: str
    replace: str
    test: str | None = None
    """Arguments of `cargo test`, if not those of the whole suite."""


def load_mutants(words: list[str]) -> list[tuple[str, Mutant]]:
    """Reads all lists, as (suite, fault); `words` keep the faults whose id contains one."""
    found = []
    for path in sorted((ROOT / "tests" / "mutants").glob("*.toml")):
        suite = path.stem if path.stem in SUITES else "core"
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
        found += [(suite, Mutant(**entry)) for entry in entries]
    return [item for item in found if not words or any(word in item[1].id for word in words)]


def copy_sources(tree: Path) -> None:
    """Makes a copy of what the tests need, with new times: an older build must not look current."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in COPIED:
        source = ROOT / name
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, tree / name, copy_function=shutil.copy)
        else:
            shutil.copy(source, tree / name)


def run_tests(suite: str, test: str, tree: Path) -> tuple[str, str]:
    """Runs tests over the copy; returns a verdict and what supports it."""
    env = {
        **os.environ,
        "CBRS_RANDOM_OPS": os.environ.get("CBRS_RANDOM_OPS", "100000"),
        **SUITES[suite].variables,
        "CARGO_TARGET_DIR": str(WORK / f"build-{suite}"),
    }
    # Options of cargo come first; what follows `--` goes to the tests.
    before, _, after = test.partition(" -- ")
    command = ["cargo", "test", "--locked", "--profile", "checked", *shlex.split(before)]
    built = subprocess.run(
        [*command, "--no-run"], cwd=tree, env=env, capture_output=True, text=True
    )
    if built.returncode != 0:
        return "does not compile", built.stderr[-2000:]
    try:
        # --no-fail-fast names every test that notices, not only those of the first binary.
        result = subprocess.run(
            [*command, "--no-fail-fast", "--", *shlex.split(after)],
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "killed", f"a test that did not end within {TIMEOUT_S} s"
    if result.returncode == 0:
        return "survived", ""
    names = sorted(set(FAILED_TEST.findall(result.stdout)))
    return "killed", ", ".join(names) or "an abort of the test process"


def try_mutant(suite: str, mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Plants one fault, runs its tests, and takes the fault out again."""
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    count = original.count(mutant.find)
    if count != 1:
        return "does not apply", f"its text occurs {count} times in {mutant.file}, expected 1"
    path.write_text(original.replace(mutant.find, mutant.replace), encoding="utf-8")
    try:
        return run_tests(suite, mutant.test or SUITES[suite].test, tree)
    finally:
        path.write_text(original, encoding="utf-8")


def main() -> int:
    """Runs all or the named faults and prints two lines each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only the faults whose id contains a word")
    mutants = load_mutants(parser.parse_args().words)
    tree = WORK / "tree"
    copy_sources(tree)
    for suite in sorted({suite for suite, _ in mutants}):
        verdict, detail = run_tests(suite, SUITES[suite].test, tree)
        if verdict != "survived":
            print(f"the suite {suite} fails without any fault: {detail}", file=sys.stderr)
            return 1
    num_unnoticed = 0
    for suite, mutant in mutants:
        started = time.monotonic()
        verdict, detail = try_mutant(suite, mutant, tree)
        num_unnoticed += verdict != "killed"
        print(f"{verdict:<9} {mutant.id}: {mutant.what}")
        print(f"{'':<9} {detail} [{time.monotonic() - started:.0f} s]", flush=True)
    print(f"{len(mutants) - num_unnoticed} of {len(mutants)} faults noticed")
    return 1 if num_unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
