"""One server for all tests of a module that leave it as it was."""

from collections.abc import Iterator

import pytest
from server_kit import Client, serving

from cbrs import AsyncLLM


@pytest.fixture(scope="module", autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    Client.close_all()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[AsyncLLM, Client]]:
    with serving() as (llm, server):
        yield llm, Client(server.url)


@pytest.fixture
def client(served: tuple[AsyncLLM, Client]) -> Client:
    return served[1]


@pytest.fixture
def llm(served: tuple[AsyncLLM, Client]) -> AsyncLLM:
    return served[0]
