"""Faults that other engines had, seen over HTTP; each test is named after its report."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import kit
import pytest
from server_kit import MESSAGES, Client, is_idle, parse_events, serving, wait_until

from cbrs import AsyncLLM

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server on a model with real weights that after "a" says "bcdefgh" and ends."""
    ids = [2 + byte for byte in b"abcdefgh"]
    follows = dict(zip(ids, [*ids[1:], kit.EOS], strict=True))
    folder = kit.chain(tmp_path_factory.mktemp("chain"), follows)
    with serving(str(folder), dtype="float32", num_threads=1) as (_, server):
        yield Client(server.url)


@pytest.fixture(scope="module")
def random(tiny: Path) -> Iterator[Client]:
    """A server on random weights, whose output wanders through bytes of all kinds."""
    with serving(str(tiny), dtype="float32", num_threads=1) as (_, server):
        yield Client(server.url)


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A request for either endpoint."""
    return {"messages": MESSAGES, **fields} if path == CHATS else {"prompt": "One", **fields}


def text_of(path: str, choice: dict[str, Any]) -> str:
    """The text of a choice of an answer or of a chunk."""
    message = choice.get("delta") or choice.get("message") or {}
    text: str = (message.get("content") or "") if path == CHATS else choice["text"]
    return text


def is_alive(client: Client) -> bool:
    """Whether the next ordinary request succeeds."""
    healthy = client.get("/health").status_code == 200
    return healthy and bool(client.complete(prompt="One", max_tokens=1)["choices"])


def test_c05_an_internal_flag_is_refused_and_a_chunked_prompt_takes_only_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(max_num_batched_tokens=16) as (llm, server):
        client, fields = Client(server.url), {"prompt": list(range(100)), "max_tokens": 8}
        for flag in ("no_cache", "skip_prefix_cache", "draft_token_ids", "cache_key_extra"):
            error = client.error(COMPLETIONS, {"model": "null", **fields, flag: True})
            assert error["param"] == flag
        assert llm.stats()["num_accepted_requests"] == 0
        runner, num_used = llm.engine._runner, []
        forward = runner.forward

        def counted(batch: Any) -> Any:
            num_used.append(llm.engine.scheduler.stats()["num_used_blocks"])
            return forward(batch)

        monkeypatch.setattr(runner, "forward", counted)
        assert len(client.chunks(COMPLETIONS, **fields)) == 8
        assert len(num_used) >= math.ceil(100 / 16) + 7, "the prompt was chunked"
        assert 0 < max(num_used) <= math.ceil((100 + 8) / BLOCK_SIZE)


def test_d21_a_prompt_longer_than_the_pool_is_refused_and_blocks_nobody() -> None:
    with serving(num_blocks=8) as (llm, server):
        client = Client(server.url)
        fields = {"model": "null", "prompt": [1] * (8 * BLOCK_SIZE + 1), "max_tokens": 1}
        error = client.error(COMPLETIONS, fields)
        assert error["code"] == "context_length_exceeded"
        assert str(8 * BLOCK_SIZE) in error["message"]
        assert llm.stats()["num_waiting"] == 0
        assert client.complete(prompt=[1] * 20, max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_f12_the_deltas_of_30_tokens_joined_are_the_whole_text(random: Client, path: str) -> None:
    # Random bytes: some are whole characters, some halves that the next token completes or breaks.
    for seed in range(2):
        fields = body(path, max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True)
        (whole,) = random.ok(path, **fields)["choices"]
        pieces = [text_of(path, chunk["choices"][0]) for chunk in random.chunks(path, **fields)]
        assert "".join(pieces) == text_of(path, whole)
        assert sum(map(bool, pieces)) > 5


@pytest.mark.parametrize("stream", [False, True])
def test_f15_a_chat_ends_before_its_stop_string(client: Client, stream: bool) -> None:
    whole = client.chat(max_tokens=60)["choices"][0]["message"]["content"]
    assert "x" in whole
    fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 60, "stop": ["x"]}
    if stream:
        choices = [chunk["choices"][0] for chunk in client.chunks(CHATS, **fields)]
        text = "".join(text_of(CHATS, choice) for choice in choices)
        reason = choices[-1]["finish_reason"]
    else:
        (choice,) = client.ok(CHATS, **fields)["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == (whole[: whole.index("x")], "stop")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("key", ["99999999", "-1", "x", "300", "9223372036854775808"])
def test_g10_a_bias_for_no_token_is_refused(random: Client, path: str, key: str) -> None:
    # 300 to 319 are rows of the head that no token of the tokenizer has.
    fields = {"model": "null", "max_tokens": 1, **body(path, logit_bias={key: 5})}
    assert random.error(path, fields)["param"] == "logit_bias"
    assert is_alive(random)


@pytest.mark.parametrize("stream", [False, True])
def test_g19_every_logprob_is_a_finite_number(random: Client, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": "hello\nthe end", "max_tokens": 8, "temperature": 1.0}
    fields |= {"echo": True, "logprobs": 5, "top_k": 1, "seed": 3, "ignore_eos": True}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in random.chunks(COMPLETIONS, **fields)]
    else:
        parts = [random.complete(**fields)["choices"][0]["logprobs"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    tops = [top for part in parts for top in part["top_logprobs"]]
    assert values[0] is tops[0] is None, "nothing comes before the first token"
    numbers = values[1:] + [value for top in tops[1:] for value in top.values()]
    assert all(isinstance(value, int | float) for value in numbers)
    assert all(-9999.0 <= value <= 0.0 for value in numbers)
    assert len(values) > 8


def test_g22_without_best_of_all_choices_are_returned(client: Client) -> None:
    choices = client.complete(prompt="One", n=3, max_tokens=2)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    choices = client.complete(prompt="One", n=3, best_of=3, max_tokens=2)["choices"]
    assert len(choices) == 3, "as many candidates as choices is what happens anyway"
    for stream in (False, True):
        fields = {"model": "null", "prompt": "One", "n": 1, "best_of": 3, "seed": 1}
        error = client.error(COMPLETIONS, {**fields, "stream": stream})
        assert error["param"] == "best_of"
        assert "only best_of = n is supported" in error["message"]
    assert is_alive(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_g24_128_choices_all_end_and_129_are_refused(client: Client, path: str) -> None:
    choices = client.ok(path, **body(path, n=128, max_tokens=2))["choices"]
    assert [choice["index"] for choice in choices] == list(range(128))
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    fields = {"model": "null", **body(path, n=129, max_tokens=2)}
    assert client.error(path, fields)["param"] == "n"
    assert is_alive(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_h01_the_usage_has_a_chunk_of_its_own(client: Client, path: str) -> None:
    *others, last = client.chunks(path, **body(path, max_tokens=5, n=2, **USAGE))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)


def test_h04_a_stream_of_completions_has_an_end_for_each_choice(client: Client) -> None:
    prompts = ["One", "Two"]
    *others, last = client.chunks(COMPLETIONS, prompt=prompts, n=2, max_tokens=3, **USAGE)
    ends = [
        (choice["index"], choice["finish_reason"])
        for chunk in others
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ends) == [(index, "length") for index in range(4)]
    assert last["usage"]["completion_tokens"] == 12
    assert not any("usage" in chunk for chunk in client.chunks(COMPLETIONS, prompt="One"))


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("extra", [{}, {"n": 3}, USAGE, {"stop": " fox"}])
def test_h05_the_last_event_is_done_exactly_once(
    client: Client, path: str, extra: dict[str, Any]
) -> None:
    fields = {"model": "null", "stream": True, "max_tokens": 9, **body(path, **extra)}
    response = client.post(path, fields)
    events = response.text.split("\n\n")
    assert (events[-2], events[-1]) == ("data: [DONE]", "")
    assert response.text.count("[DONE]") == 1


def test_h10_an_end_token_is_the_reason_stop(spelling: Client) -> None:
    (choice,) = spelling.complete(prompt="a", max_tokens=50)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("bcdefgh", "stop")
    chunks = spelling.chunks(COMPLETIONS, prompt="a", max_tokens=50)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [reason for reason in reasons if reason is not None] == ["stop"]
    assert reasons[-1] == "stop"
    # The template ends with <assistant>, after which this model ends at once.
    assert spelling.chat(max_tokens=50)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["One", ""], [[1], []]])
def test_h12_an_empty_prompt_is_refused(client: Client, prompt: Any) -> None:
    error = client.error(COMPLETIONS, {"model": "null", "prompt": prompt, "max_tokens": 1})
    assert error["param"].startswith("prompt")
    assert is_alive(client)


@pytest.mark.parametrize("stream", [False, True])
def test_h14_a_prompt_one_below_the_limit_gives_one_token(client: Client, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": [1] * (MAX_MODEL_LEN - 1)}
    if stream:
        choices = [chunk["choices"][0] for chunk in client.chunks(COMPLETIONS, **fields)]
    else:
        answer = client.complete(**fields)
        assert answer["usage"]["completion_tokens"] == 1
        choices = answer["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"]
    assert choices[0]["text"]
    fields = {"model": "null", "stream": stream, "prompt": [1] * MAX_MODEL_LEN}
    assert client.error(COMPLETIONS, fields)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["a", "one\ntwo\n\nthree\n", "\n\n\n a\ta", "the and hello\n"])
def test_h18_the_tokens_of_a_prompt_are_its_text_piece_by_piece(
    spelling: Client, client: Client, prompt: str
) -> None:
    for server in (spelling, client):
        fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4}
        (choice,) = server.complete(**fields)["choices"]
        logprobs = choice["logprobs"]
        shown = "".join(logprobs["tokens"]).removesuffix("</s>")
        assert shown == choice["text"]
        assert choice["text"].startswith(prompt)
        lengths = {len(array) for array in logprobs.values()}
        assert lengths == {len(logprobs["tokens"])}
        assert logprobs["token_logprobs"][0] is None
        assert all(value is not None for value in logprobs["token_logprobs"][1:])
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(token) or token == "</s>"


@pytest.mark.parametrize("stream", [False, True])
def test_h19_an_echo_has_an_entry_for_each_token_of_prompt_and_output(
    client: Client, llm: AsyncLLM, stream: bool
) -> None:
    prompt = "One, two, three"
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in client.chunks(COMPLETIONS, **fields)]
    else:
        parts = [client.complete(**fields)["choices"][0]["logprobs"]]
    num_expected = len(llm.encode(prompt)) + 1
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum(len(part[name]) for part in parts) == num_expected


@pytest.mark.parametrize(("temperature", "size"), [(0.0, 2), (2.0, 3)])
def test_h20_logprobs_have_the_likely_tokens_of_each_position(
    random: Client, temperature: float, size: int
) -> None:
    fields: dict[str, Any] = {"prompt": "hello", "max_tokens": 12, "seed": 2, "ignore_eos": True}
    fields["temperature"] = temperature
    (choice,) = random.complete(**fields, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["top_logprobs"]) == 12
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    for token, value, top in rows:
        # The two likeliest, and the token itself if it is none of them.
        assert 2 <= len(top) <= 3
        assert top[token] == value
    assert max(len(top) for top in logprobs["top_logprobs"]) == size
    (choice,) = random.complete(**fields, logprobs=0)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1] * 12


def test_h21_max_completion_tokens_counts(client: Client) -> None:
    assert client.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    both = client.chat(max_completion_tokens=3, max_tokens=3)
    assert both["usage"]["completion_tokens"] == 3
    fields = {"model": "null", "messages": MESSAGES, "max_completion_tokens": 3, "max_tokens": 4}
    error = client.error(CHATS, fields)
    assert error["param"] == "max_tokens"
    assert "max_completion_tokens" in error["message"]


LOOP = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "schema",
    [{"type": "objekt"}, {}, {"type": "string", "pattern": "("}, LOOP, None, "x", [[]] * 9],
)
def test_h23_a_schema_is_refused_whatever_it_is(client: Client, schema: Any) -> None:
    for form in (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        {"type": "json_schema", "json_schema": schema},
    ):
        fields = {"model": "null", "messages": MESSAGES, "response_format": form}
        error = client.error(CHATS, fields)
        assert error["param"] == "response_format"
        assert error["code"] == "unsupported_parameter"
    assert is_alive(client)


def test_h26_calls_of_tools_are_refused_and_never_made_up(client: Client) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("first", "second")
    ]
    for fields in (
        {"tools": tools},
        {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": {"type": "function", "function": {"name": "first"}}},
        {"functions": [tools[0]["function"]]},
        {"function_call": "auto"},
    ):
        error = client.error(CHATS, {"model": "null", "messages": MESSAGES, **fields})
        assert error["param"] in fields
        assert error["code"] == "unsupported_parameter"
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    answered = {"role": "tool", "tool_call_id": "1", "content": "{}"}
    for message in (called, answered):
        fields = {"model": "null", "messages": [*MESSAGES, message]}
        assert client.error(CHATS, fields)["param"].startswith("messages[1]")
    assert "tool_calls" not in client.chat(max_tokens=2)["choices"][0]["message"]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 49, 100])
def test_h32_cached_tokens_are_those_that_were_not_computed(
    client: Client, llm: AsyncLLM, num_tokens: int
) -> None:
    fields = {"prompt": [7] * num_tokens, "cache_salt": f"h32-{num_tokens}"}
    num_cacheable = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    for expected in (0, num_cacheable):
        wait_until(lambda: is_idle(llm))
        before = llm.stats()["num_scheduled_tokens"]
        usage = client.complete(**fields, max_tokens=3)["usage"]
        wait_until(lambda: is_idle(llm))
        # Two of the three output tokens are run as well.
        num_computed = llm.stats()["num_scheduled_tokens"] - before - 2
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert num_cached == num_tokens - num_computed == expected
    *_, last = client.chunks(COMPLETIONS, **fields, max_tokens=1, **USAGE)
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cacheable


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_h34_a_field_works_or_is_refused_by_name(client: Client, path: str) -> None:
    plain = client.ok(path, **body(path, max_tokens=4))["choices"]
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True}
    assert client.ok(path, **body(path, max_tokens=4, **harmless))["choices"] == plain
    refused: dict[str, Any] = {
        "no_such_field": 1,
        "grammar": "x",
        "guided_json": {},
        "Temperature": 1,
    }
    if path == COMPLETIONS:
        refused |= {"suffix": "end", "best_of": 4, "functions": [], "tools": []}
    else:
        refused |= {"functions": [], "tools": [], "modalities": ["audio"], "prediction": {}}
        refused |= {"reasoning_effort": "low", "verbosity": "low", "audio": {}, "suffix": "end"}
    for name, value in refused.items():
        error = client.error(path, {"model": "null", **body(path, **{name: value})})
        assert error["param"] == name
        assert name in error["message"]


def test_h34_a_bias_changes_the_output(random: Client) -> None:
    favoured = 2 + ord("z")
    fields = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    (choice,) = random.complete(**fields, logit_bias={str(favoured): 100})["choices"]
    assert (choice["token_ids"], choice["text"]) == ([favoured] * 3, "zzz")
    (choice,) = random.complete(**fields)["choices"]
    assert favoured not in choice["token_ids"]


def test_h35_200_streams_at_once_each_have_one_end_per_choice(client: Client) -> None:
    async def one(http: httpx2.AsyncClient, number: int) -> None:
        path, n = [COMPLETIONS, CHATS][number % 2], 1 + number % 3
        fields = {"model": "null", "stream": True, "max_tokens": 6, "n": n, **body(path)}
        response = await http.post(path, json=fields)
        assert response.status_code == 200, response.text
        choices = [choice for chunk in parse_events(response.text) for choice in chunk["choices"]]
        for index in range(n):
            reasons = [item["finish_reason"] for item in choices if item["index"] == index]
            assert reasons == [None] * (len(reasons) - 1) + ["length"]

    async def run() -> None:
        base_url = str(client.http.base_url)
        limits = httpx2.Limits(max_connections=200)
        async with httpx2.AsyncClient(base_url=base_url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(one(http, number) for number in range(200)))

    asyncio.run(run())
