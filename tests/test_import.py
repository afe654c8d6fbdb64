"""What `import cbrs` loads, and what it says without torch (its time: `benches/startup.py`)."""

import json
import subprocess
import sys
import textwrap

import pytest

import cbrs


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter and returns its stdout."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_neither_numpy_nor_torch():
    loaded = run_python("import cbrs, sys, json; print(json.dumps(sorted(sys.modules)))")
    assert not {"numpy", "torch", "tqdm", "cbrs.llm"} & set(json.loads(loaded))


def test_a_scheduler_needs_no_torch():
    loaded = run_python("""
        import json, sys
        import cbrs
        config = cbrs.SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, num_blocks=64, max_model_len=128
        )
        cbrs.Scheduler(config).submit([1, 2, 3])
        print(json.dumps(sorted(sys.modules)))
    """)
    assert "torch" not in json.loads(loaded)


def test_every_public_name_is_there():
    for name in cbrs.__all__:
        assert getattr(cbrs, name) is not None, name
    assert set(cbrs.__all__) <= set(dir(cbrs))


def test_every_error_derives_from_one_base():
    for name in cbrs.errors.__all__:
        assert issubclass(getattr(cbrs.errors, name), cbrs.errors.CbrsError)
    assert issubclass(cbrs.errors.InvalidRequestError, ValueError)
    assert issubclass(cbrs.errors.PromptTooLongError, cbrs.errors.InvalidRequestError)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cbrs.nothing


def test_llm_without_torch_names_the_extra():
    code = """
        import sys
        sys.modules["torch"] = None  # what a missing package looks like to an import
        import cbrs
        cbrs.Scheduler
        try:
            cbrs.LLM
        except ImportError as error:
            print(error)
    """
    assert 'pip install "cbrs[engine]"' in run_python(code)


def test_import_changes_no_signal_handler_and_adds_no_log_handler():
    code = """
        import logging, signal
        handler = lambda *_: None
        signal.signal(signal.SIGINT, handler)
        import cbrs
        cbrs.Scheduler
        print(signal.getsignal(signal.SIGINT) is handler, logging.getLogger("cbrs").handlers)
    """
    assert run_python(code) == "True []"
