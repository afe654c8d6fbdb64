"""Fixtures that several test modules share."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests are imported by path (importlib mode), so the helpers beside them need to be found by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return the real small model's file, fetching it into the cache if it is not there."""
    from cbrs import hub

    return hub.pull("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def cbrs_data() -> Path:
    """Return the folder of shared test data that `CBRS_DATA` names."""
    value = os.environ.get("CBRS_DATA")
    if not value:
        pytest.skip("CBRS_DATA is not set: the shared test data is not here")
    return Path(value)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama-shaped checkpoint with a padded vocabulary."""
    import kit

    return kit.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random checkpoint whose greedy output wanders: head and embedding differ."""
    import kit

    return kit.tiny(tmp_path_factory.mktemp("wandering"), seed=7, tie_word_embeddings=False)


DEFAULTS = {"dtype": "float32", "num_threads": 1, "max_model_len": 512, "max_num_seqs": 16}


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Let torch work on one thread: small tensors gain nothing from more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_llm() -> Iterator[Callable[..., Any]]:
    """Make `LLM`s in float32 on one thread; at the end each is closed and must be drained."""
    from cbrs import LLM

    made: list[Any] = []

    def make(model: Any, **options: Any) -> Any:
        made.append(LLM(model, **{**DEFAULTS, **options}))
        return made[-1]

    yield make
    for llm in made:
        if not llm.is_closed:
            check_drained(llm)
            llm.close()


@pytest.fixture
def make_async_llm() -> Iterator[Callable[..., Any]]:
    """Make `AsyncLLM`s as `make_llm` does; at the end each must become drained, and is closed."""
    from cbrs import AsyncLLM

    made: list[Any] = []

    def make(model: Any, **options: Any) -> Any:
        made.append(AsyncLLM(model, **{**DEFAULTS, **options}))
        return made[-1]

    yield make
    for llm in made:
        if not llm.is_closed:
            wait_until_drained(llm)
            asyncio.run(llm.aclose())


def wait_until_drained(llm: Any, timeout_s: float = 30.0) -> None:
    """Wait until an `AsyncLLM` has nothing left, and check that nothing has leaked."""
    deadline = time.monotonic() + timeout_s
    while any(llm.stats()[name] for name in ("num_running", "num_waiting")):
        assert time.monotonic() < deadline, llm.stats()
        time.sleep(0.001)
    check_drained(llm)


def check_drained(llm: Any) -> None:
    """Nothing waits, runs or holds a block, and every block is free or cached."""
    llm.engine.scheduler.check_invariants()
    stats = llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == llm.config().num_blocks
