"""`/metrics`: its form, and that each figure is what happened."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_kit import PREFIX, Changes, Figures, Watch, page, short_of_memory
from server_kit import MESSAGES, Client, serving, wait_until

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/completions"
# vLLM has these names with another prefix, with these types and labels besides `model_name`.
SHARED = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "prefix_cache_queries_total": ("counter", set()),
    "prefix_cache_hits_total": ("counter", set()),
    "num_preemptions_total": ("counter", set()),
    "prompt_tokens_total": ("counter", set()),
    "generation_tokens_total": ("counter", set()),
    "request_success_total": ("counter", {"finished_reason"}),
    "time_to_first_token_seconds": ("histogram", {"le"}),
    "inter_token_latency_seconds": ("histogram", {"le"}),
    "e2e_request_latency_seconds": ("histogram", {"le"}),
    "request_queue_time_seconds": ("histogram", {"le"}),
    "request_prefill_time_seconds": ("histogram", {"le"}),
    "request_decode_time_seconds": ("histogram", {"le"}),
    "request_prompt_tokens": ("histogram", {"le"}),
    "request_generation_tokens": ("histogram", {"le"}),
}


@pytest.fixture(scope="module")
def busy() -> Iterator[Client]:
    """A server of this module, whose counts nobody else changes."""
    with serving() as (_, server):
        yield Client(server.url)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "prompt": list(range(40)), "max_tokens": 4, **fields}


def test_names_types_and_labels_are_those_of_other_dashboards(client: Client) -> None:
    figures = Figures(client)
    for name, (kind, labels) in SHARED.items():
        family = figures.families[name]
        assert family.type == kind, name
        found = {label for sample in family.samples for label in sample.labels}
        assert found == labels | {"model_name"}, name
        assert {sample.labels["model_name"] for sample in family.samples} == {"null"}


def test_every_family_has_one_type_and_one_help(client: Client) -> None:
    text = page(client)
    names = Figures(client).families.keys()
    for kind in ("HELP", "TYPE"):
        found = re.findall(rf"^# {kind} {PREFIX}(\S+) \S", text, re.MULTILINE)
        assert sorted(found) == sorted(names)


def test_buckets_are_cumulative_and_end_with_the_count(busy: Client) -> None:
    busy.ok(PATH, **body())
    families = Figures(busy).families.values()
    histograms = [family for family in families if family.type == "histogram"]
    assert len(histograms) >= 8
    for family in histograms:
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        bounds = [float(sample.labels["le"]) for sample in buckets]
        assert bounds == sorted(set(bounds))
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        (count,) = (sample.value for sample in family.samples if sample.name.endswith("_count"))
        assert (bounds[-1], counts[-1]) == (float("inf"), count)
        (total,) = (sample.value for sample in family.samples if sample.name.endswith("_sum"))
        # No bucket holds less than its count times the bound before it.
        lower = itertools.pairwise([(0.0, 0.0), *zip(bounds, counts, strict=True)])
        least = sum((after[1] - before[1]) * before[0] for before, after in lower)
        assert total >= least


def test_counters_only_grow(busy: Client) -> None:
    before = Figures(busy).counters()
    for fields in ({}, {"n": 3}, {"stop": "fox"}, {"stream": True}, {"temperature": -1}):
        busy.post(PATH, body(max_tokens=12, **fields))
        after = Figures(busy).counters()
        assert after.keys() == before.keys()
        assert all(after[key] >= before[key] for key in before)
        assert after != before
        before = after


def assert_tokens(changes: Changes, *, requests: int, choices: int, tokens: int) -> None:
    """Requests with a token, their choices, and their tokens."""
    assert changes("generation_tokens_total") == tokens
    assert changes("time_to_first_token_seconds_count") == requests
    assert changes("request_prefill_time_seconds_count") == requests
    assert changes("inter_token_latency_seconds_count") == tokens - choices


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_as_they_are_told(busy: Client, stream: bool) -> None:
    watch = Watch(busy)
    prompts = [[7] * 20, [8] * 33]
    if stream:
        chunks = busy.chunks(PATH, prompt=prompts, n=2, max_tokens=5, cache_salt="stream")
        assert len(chunks) == 20
    else:
        answer = busy.complete(prompt=prompts, n=2, max_tokens=5, cache_salt="whole")
        assert answer["usage"]["completion_tokens"] == 20
    changes = watch.changes()
    assert_tokens(changes, requests=2, choices=4, tokens=20)
    assert changes("prompt_tokens_total") == 53
    assert changes("prefix_cache_queries_total") == 53
    assert changes("prefix_cache_hits_total") == 0
    assert changes("request_success_total", finished_reason="length") == 4
    assert changes("num_accepted_requests_total") == 2
    assert changes("request_queue_time_seconds_count") == 2
    assert changes("e2e_request_latency_seconds_count") == 2
    assert changes("request_decode_time_seconds_count") == 2
    assert (changes("request_prompt_tokens_count"), changes("request_prompt_tokens_sum")) == (2, 53)
    assert changes("request_generation_tokens_count") == 4
    assert changes("request_generation_tokens_sum") == 20


def test_cached_tokens_are_those_of_the_usage(busy: Client) -> None:
    fields = body(prompt=[3] * 50, cache_salt="cached")
    assert busy.ok(PATH, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    watch = Watch(busy)
    usage = busy.ok(PATH, **fields)["usage"]
    changes = watch.changes()
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48
    assert changes("prefix_cache_hits_total") == 48
    assert changes("prefix_cache_queries_total") == 50
    assert changes("num_scheduled_tokens_total") == 2 + 3, (
        "the prompt's rest, and all but one token"
    )


def test_a_stop_string_ends_the_count_where_it_ends_the_text(busy: Client) -> None:
    watch = Watch(busy)
    answer = busy.complete(prompt="One", max_tokens=200, stop=" fox")
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = answer["usage"]["completion_tokens"]
    assert tokens < 100
    changes = watch.changes()
    assert_tokens(changes, requests=1, choices=1, tokens=tokens)
    assert changes("request_success_total", finished_reason="stop") == 1
    assert changes("request_success_total", finished_reason="length") == 0


def test_responses_are_counted_by_status(busy: Client) -> None:
    watch = Watch(busy)
    busy.error(PATH, body(temperature=-1), 400)
    busy.error(PATH, body(temperature=-1), 400)
    busy.error(PATH, body(model="other"), 404)
    assert busy.get("/nowhere").status_code == 404
    assert busy.get(PATH).status_code == 405
    changes = watch.changes()
    statuses = ("400", "404", "405")
    found = [changes("http_responses_total", status=status) for status in statuses]
    assert found == [2, 2, 1]
    assert changes("http_responses_total", status="200") == 1, "the page before"
    assert changes("num_accepted_requests_total") == 0


def test_a_request_that_is_cancelled_is_an_abort() -> None:
    with serving("null:0.01") as (_, server):
        client = Client(server.url)
        watch = Watch(client)
        fields = {**body(max_tokens=400), "stream": True}
        with client.http.stream("POST", PATH, json=fields) as response:
            lines = response.iter_lines()  # dropping it would close the connection
            next(lines)
            running = Figures(Client(server.url))
            assert running.value("num_requests_running") == 1
            assert running.value("num_active_responses") == 1
            assert running.value("num_open_connections") >= 1
            assert 0 < running.value("kv_cache_usage_perc") < 1
        wait_until(lambda: watch.changes()("request_success_total", finished_reason="abort") == 1)
        changes = watch.changes()
        assert changes("time_to_first_token_seconds_count") == 1
        assert changes("e2e_request_latency_seconds_count") == 0, "it did not end by itself"
        assert changes.after.value("num_requests_running") == 0
        assert changes.after.value("kv_cache_usage_perc") == 0


def test_refusals_are_counted_by_class_and_reason() -> None:
    policy = {"policy": "fair", "tenants": {"slow": {"requests_per_min": 1}}}
    with serving(policy=policy) as (_, server):
        client = Client(server.url)
        assert client.post(PATH, body(tenant="slow", priority="batch")).status_code == 200
        watch = Watch(client)
        for _ in range(3):
            client.error(PATH, body(tenant="slow", priority="batch"), 429)
        changes = watch.changes()
        refusals = changes.after.samples("num_refusals_total")
        before = changes.before.samples("num_refusals_total")
        changed = {key[1]: value - before[key] for key, value in refusals.items()}
        labels = (("class", "batch"), ("model_name", "null"), ("reason", "tenant_rate"))
        assert changed.pop(labels) == 3
        assert set(changed.values()) == {0}
        assert changes("http_responses_total", status="429") == 3
        assert len(refusals) == 3 * 7


def test_preemptions_and_step_times_are_those_of_the_engine() -> None:
    with short_of_memory() as (llm, client, _):
        value, stats = Figures(client).value, llm.stats()
        assert value("num_preemptions_total") == stats["num_preemptions"]
        assert value("num_recomputed_tokens_total") == stats["num_recomputed_tokens"]
        assert value("generation_tokens_total") == 120
        assert value("num_steps_total") == stats["num_steps"]
        assert value("step_time_seconds_count") == stats["num_steps"]
        assert value("step_time_seconds_sum") > 0
        assert value("max_num_seqs") == 2


def test_h29_the_page_does_not_grow_with_requests(busy: Client) -> None:
    lines = page(busy).count("\n")
    for number in range(200):
        headers = {"x-request-id": f"name-{number}"}
        fields = body(max_tokens=1, tenant=f"tenant-{number}", user=f"user-{number}")
        assert busy.post(PATH, fields, **headers).status_code == 200
        busy.get(f"/nowhere/{number}")
    text = page(busy)
    assert text.count("\n") == lines
    assert not re.search(r"name-|tenant-\d|user-|nowhere", text)


def named(text: str) -> set[str]:
    """Families that a text names, by the names of their samples or their own."""
    return set(re.findall(rf"{PREFIX}([a-z0-9_]+)", text))


def test_the_dashboard_names_what_there_is(client: Client) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in dashboard["templating"]["list"]]
    families = Figures(client).families
    samples = {s.name.removeprefix(PREFIX) for f in families.values() for s in f.samples}
    wanted = named("\n".join(expressions + variables))
    assert wanted <= samples
    assert len(wanted) > 20
    # What an operator looks for is there.
    shown = {name.removesuffix("_bucket") for name in wanted}
    assert {*SHARED} - shown <= {name for name in SHARED if name.startswith("request_")}
    assert {"num_refusals_total", "step_time_seconds", "token_budget"} <= shown
    labels = set(re.findall(r"\b([a-z_]+)=", "\n".join(expressions)))
    assert labels == {"model_name", "state"}


def test_the_documentation_names_what_there_is(client: Client) -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    section = text.split("## Metrics and logs")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`cbrs:([a-z0-9_]+)`", row)}
    assert documented == set(Figures(client).families)


def test_chats_are_counted_too(busy: Client) -> None:
    watch = Watch(busy)
    usage = busy.chat(messages=MESSAGES, max_tokens=6)["usage"]
    changes = watch.changes()
    assert_tokens(changes, requests=1, choices=1, tokens=6)
    assert changes("prompt_tokens_total") == usage["prompt_tokens"]
