"""`benches/guard/run.py`: ceilings by compiler, and exit codes. Counts themselves need valgrind."""

import importlib.util
import json
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).resolve().parent.parent / "benches" / "guard" / "run.py"
KEY = "1.0.0 x86_64-unknown-linux-gnu"
STEPS = {"steady-256": [90, 110], "steady-1024": [400, 400], "mixed": [300, 700, 500]}
FIGURES = {
    "steady_256_mean": 100,
    "steady_1024_mean": 400,
    "mixed_mean": 500,
    "mixed_worst": 700,
}


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with counts that need no valgrind and ceilings that can be written."""
    spec = importlib.util.spec_from_file_location("bench_guard", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CEILINGS = tmp_path / "ceilings.toml"
    module.CEILINGS.write_text("")
    monkeypatch.setattr(module, "measure", lambda: (KEY, module.summarize(STEPS)))
    return module


def run(guard: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["run.py", *arguments])
    return int(guard.main())


def test_figures_are_means_and_the_worst_step(guard: ModuleType) -> None:
    assert guard.summarize(STEPS) == FIGURES


def test_another_compiler_is_reported_and_never_fails(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guard.CEILINGS.write_text('["0.9.0 x86_64-unknown-linux-gnu"]\nmixed_worst = 1\n')
    assert run(guard, monkeypatch, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["figures"], result["ceilings"], result["above"]) == (FIGURES, {}, [])


def test_a_count_above_its_ceiling_fails_and_one_at_it_does_not(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guard.CEILINGS.write_text(f'["{KEY}"]\nmixed_mean = 500\nmixed_worst = 699\n')
    assert run(guard, monkeypatch) == 1
    assert "above the ceiling: mixed_worst." in capsys.readouterr().err
    guard.CEILINGS.write_text(f'["{KEY}"]\nmixed_mean = 500\nmixed_worst = 700\n')
    assert run(guard, monkeypatch) == 0


def test_update_sets_ceilings_above_the_counts_and_keeps_other_compilers(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"reason": "older", "mixed_worst": 5}
    guard.CEILINGS.write_text('["0.9.0 other"]\nreason = "older"\nmixed_worst = 5\n')
    assert run(guard, monkeypatch, "--update", 'it "does" more') == 0
    ceilings = {
        "reason": 'it "does" more',
        "steady_256_mean": 105,
        "steady_1024_mean": 420,
        "mixed_mean": 525,
        "mixed_worst": 735,
    }
    assert tomllib.loads(guard.CEILINGS.read_text()) == {"0.9.0 other": other, KEY: ceilings}
    assert run(guard, monkeypatch) == 0


def test_without_valgrind_it_says_how_to_install_it(
    guard: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run(guard, monkeypatch) == 2
    assert "apt-get install valgrind" in capsys.readouterr().err


def test_the_ceilings_in_the_tree_name_every_figure(guard: ModuleType) -> None:
    tables = tomllib.loads((RUN.parent / "ceilings.toml").read_text())
    assert tables
    for table in tables.values():
        assert table["reason"]
        assert set(table) - {"reason"} == set(guard.FIGURES)
