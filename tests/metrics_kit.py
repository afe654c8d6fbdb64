"""Reads a server's page of metrics with Prometheus' own parser."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from server_kit import Client, serving, wait_until

from cbrs import AsyncLLM

PREFIX = "cbrs:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def page(client: Client) -> str:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    return response.text


@contextmanager
def short_of_memory() -> Iterator[tuple[AsyncLLM, Client, dict[str, Any]]]:
    """A server that had to preempt, and the answer to the request that made it."""
    # Two sequences of 90 tokens do not fit 8 blocks of 16.
    options: dict[str, Any] = {"num_blocks": 8, "max_num_seqs": 2, "max_model_len": 100}
    with serving(policy="fcfs", **options) as (llm, server):
        client = Client(server.url)
        answers: list[dict[str, Any]] = []
        prompts = [[1] * 30, [2] * 30]
        ask = threading.Thread(
            target=lambda: answers.append(client.complete(prompt=prompts, max_tokens=60))
        )
        # Both are there before one of them runs.
        scheduler = llm.engine.scheduler
        scheduler.pause()
        ask.start()
        wait_until(lambda: llm.stats()["num_waiting"] == 2)
        scheduler.resume()
        ask.join()
        assert llm.stats()["num_preemptions"] >= 1
        yield llm, client, answers[0]


class Figures:
    """One reading of all metrics, by their names without the prefix."""

    def __init__(self, client: Client) -> None:
        self.families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(page(client)):
            assert family.name.startswith(PREFIX)
            # The parser takes the end off a counter's name.
            end = "_total" if family.type == "counter" else ""
            name = family.name.removeprefix(PREFIX) + end
            assert name not in self.families, "each family comes once"
            self.families[name] = family

    def samples(self, name: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Values of a family by sample name and labels."""
        return {
            (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
            for sample in self.families[name].samples
        }

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample with these labels; `x_count` and `x_sum` of a histogram x."""
        family = name.removesuffix("_count").removesuffix("_sum")
        family = family if name not in self.families else name
        (value,) = (
            sample.value
            for sample in self.families[family].samples
            if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
        )
        return float(value)

    def counters(self) -> dict[Any, float]:
        """Everything that may only grow."""
        grows = {"counter", "histogram"}
        return {
            key: value
            for name, family in self.families.items()
            if family.type in grows
            for key, value in self.samples(name).items()
        }


class Watch:
    """What has changed since it was made."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.before = Figures(client)

    def changes(self) -> "Changes":
        return Changes(self.before, Figures(self.client))


class Changes:
    """The difference of two readings."""

    def __init__(self, before: Figures, after: Figures) -> None:
        self.before, self.after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return self.after.value(name, **labels) - self.before.value(name, **labels)
