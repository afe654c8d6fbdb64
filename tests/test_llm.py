"""`LLM`: results, chat, several threads, Ctrl-C, close, fork, and nothing left behind."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from cbrs import LLM, SamplingParams
from cbrs.errors import (
    CbrsError,
    DeadlineExceededError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["One", "Two two", "Three three three", "4", "Five " * 20]


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def llm(make_llm, tiny):
    return make_llm(tiny)


def test_results_come_in_the_order_of_the_prompts(llm):
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    together = llm.generate(PROMPTS, GREEDY)
    assert token_ids(together) == token_ids(alone)
    assert [output.prompt for output in together] == PROMPTS


def test_a_result_holds_everything_about_its_request(llm):
    first, second = llm.generate([list(range(1, 41))] * 2, GREEDY), llm.generate([[5, 6]], GREEDY)
    output = first[0]
    assert output.prompt_token_ids == list(range(1, 41))
    assert output.prompt is None
    assert output.finished
    assert output.error is None
    assert output.request_id != second[0].request_id
    completion = output.outputs[0]
    assert completion.index == 0
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.finish_reason == "length"
    assert completion.stop_reason is None
    assert len(completion.token_ids) == 8


def test_metrics_are_consistent(llm):
    (output,) = llm.generate("Hello", GREEDY)
    metrics = output.metrics
    assert 0 <= metrics.queue_time_s <= metrics.time_to_first_token_s <= metrics.total_time_s < 60
    assert len(metrics.inter_token_latencies_s) == 7
    mean = metrics.mean_inter_token_latency_s
    spread = metrics.total_time_s - metrics.time_to_first_token_s
    assert mean == pytest.approx(spread / 7, abs=1e-3)


def test_a_repeated_prompt_hits_the_prefix_cache(llm):
    prompt = list(range(1, 50))
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert token_ids([first]) == token_ids([second])


def test_prompts_may_be_texts_ids_or_lists_of_either(llm):
    ids = llm.tokenizer.encode("Hello")
    as_text, as_ids = llm.generate("Hello", GREEDY), llm.generate(ids, GREEDY)
    mixed = llm.generate(["Hello", ids], GREEDY)
    assert token_ids(as_text) == token_ids(as_ids)
    assert token_ids(mixed) == token_ids(as_text) * 2
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    lengths = [1, 5, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(ids) for ids in token_ids(outputs)] == lengths
    with pytest.raises(InvalidRequestError, match="2 entries, but there are 3"):
        llm.generate(["a", "b", "c"], params[:2])


def test_a_refused_prompt_is_named_and_stops_the_whole_call(llm):
    with pytest.raises(InvalidRequestError, match=r"prompts\[2\].*empty") as caught:
        llm.generate([[1, 2], [3, 4], [], [5]], SamplingParams(max_tokens=100))
    assert caught.value.param == "prompt"
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\].*512"):
        llm.generate([[1], [1] * 512], GREEDY)
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\].*300"):
        llm.generate([[300]], GREEDY)
    assert llm.stats()["num_running"] == 0
    assert llm.generate("next", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_failed_step_comes_back_as_an_error_of_its_requests(monkeypatch, llm):
    (expected,) = llm.generate("fine", GREEDY)
    forward = type(llm.engine._runner).forward

    def fail_on_long_prompts(runner, batch):
        if batch.max_query_len > 100:
            raise MemoryError("no room for 101 tokens")
        return forward(runner, batch)

    monkeypatch.setattr(type(llm.engine._runner), "forward", fail_on_long_prompts)
    (failed,) = llm.generate([list(range(101))], GREEDY)
    assert failed.finished
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].token_ids == []
    assert failed.error == "MemoryError: no room for 101 tokens"
    assert failed.metrics.time_to_first_token_s is None
    assert token_ids(llm.generate("fine", GREEDY)) == token_ids([expected])


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "x"}, b"bytes", [None], [["a"]], [1, "a"]])
def test_a_prompt_of_another_type_is_a_type_error(llm, prompts):
    with pytest.raises(TypeError):
        llm.generate(prompts, GREEDY)


def test_a_list_longer_than_the_queue_is_fed_as_room_becomes_free(make_llm, tiny):
    llm = make_llm(tiny, queue_capacity=2, max_num_seqs=3)
    outputs = llm.generate([[1 + i % 200] for i in range(50)], GREEDY)
    expected = llm.generate([[7]], GREEDY)
    assert len(outputs) == 50
    assert token_ids([outputs[6]]) == token_ids(expected)


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_policy_changes_no_token(make_llm, tiny, llm, policy):
    prompts = [[1 + i, 2 + i] for i in range(12)]
    classes = ("interactive", "standard", "batch")
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=8,
            priority=classes[i % 3],
            tenant=f"tenant {i % 4}",
            deadline_ms=60_000,
            target_itl_ms=50,
        )
        for i in range(12)
    ]
    other = make_llm(tiny, policy=policy, max_num_seqs=3)
    assert other.config().policy == policy
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert token_ids(other.generate(prompts, params)) == token_ids(expected)


def test_the_policy_in_effect_is_in_the_config(make_llm):
    llm = make_llm("null", policy={"aging_s": 3.0}, victim="newest", tenants={"a": {"weight": 2}})
    config = llm.config()
    assert (config.policy, config.admission, config.victim) == ("fair", "estimated", "newest")
    assert config.tenants["a"]["weight"] == 2.0
    assert (config.target_itl_ms, config.max_queue_s) == (None, None)
    assert config.policy_settings["aging_s"] == 3.0
    again = make_llm("null", policy=config.policy_settings).config()
    assert again.policy_settings == config.policy_settings
    assert make_llm("null").config().policy == "fcfs"


def test_a_request_past_its_deadline_is_its_own_error(make_llm):
    llm = make_llm("null:0.01", max_num_seqs=1, max_model_len=4096)
    params = [SamplingParams(deadline_ms=200), SamplingParams(max_tokens=2)]
    late, other = llm.generate([[1, 2], [3, 4]], params)
    assert (late.outputs[0].finish_reason, other.outputs[0].finish_reason) == ("error", "length")
    assert late.error is not None
    assert late.error.startswith("the deadline passed")
    assert 1 < len(late.outputs[0].token_ids) < 4000, "what it has produced stays"
    with pytest.raises(DeadlineExceededError, match="the deadline passed"):
        late.raise_for_error()
    other.raise_for_error()


def test_a_deadline_that_cannot_be_met_is_its_own_error(make_llm):
    llm = make_llm("null:0.01", max_num_seqs=1)
    llm.generate([[1, 2]] * 3, SamplingParams(max_tokens=40))  # it learns how long they take
    params = [SamplingParams(max_tokens=20)] * 8
    params[5] = SamplingParams(n=2, ttft_deadline_ms=1)
    outputs = llm.generate([[3, 4]] * 8, params)
    assert [output.error is None for output in outputs] == [i != 5 for i in range(8)]
    refused = outputs[5]
    assert "the deadline" in str(refused.error)
    assert refused.prompt_token_ids == [3, 4]
    assert [choice.finish_reason for choice in refused.outputs] == ["error"] * 2
    with pytest.raises(CbrsError):
        refused.raise_for_error()


def test_a_list_is_fed_within_the_rate_of_its_tenant(make_llm):
    llm = make_llm("null", tenants={"slow": {"requests_per_min": 240}})
    params = SamplingParams(max_tokens=1, tenant="slow")
    outputs = llm.generate([[1]] * 242, params)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert llm.stats()["num_refused_requests"] >= 1


def test_a_prompt_that_no_queue_holds_is_refused(make_llm):
    llm = make_llm("null", max_queued_tokens=20)
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\].*max_queued_tokens"):
        llm.generate([[1] * 5, [1] * 30], SamplingParams(max_tokens=1))


def test_chat_renders_the_template_without_a_second_start_token(llm):
    conversation = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt == "<user>Hi</s><assistant>"
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == output.prompt
    several = llm.chat([conversation, [{"role": "user", "content": "Ho"}]], GREEDY)
    assert token_ids(several[:1]) == token_ids([output])
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        llm.chat([conversation, [{"role": "user"}]], GREEDY)


@pytest.mark.parametrize("messages", ["Hi", ["Hi"], {"role": "user"}, [[5]], [[{}], "Hi"]])
def test_messages_of_another_type_are_a_type_error(llm, messages):
    with pytest.raises(TypeError, match="messages must be a list"):
        llm.chat(messages, GREEDY)


def test_n_outputs_come_in_the_order_of_their_choices(llm):
    params = SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)
    (output,) = llm.generate("Hello", params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert len(output.metrics.inter_token_latencies_s) == 3 * 5
    single = llm.generate("Hello", SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    assert token_ids(single) == [output.outputs[0].token_ids]


def test_encode_and_decode_are_those_of_the_tokenizer(llm):
    ids = llm.encode("hello and")
    assert ids == llm.tokenizer.encode("hello and")
    assert llm.decode(ids) == "hello and"
    assert llm.decode([0, *ids]) == "hello and"
    assert llm.decode([0, *ids], skip_special_tokens=False) == "<s>hello and"


def test_a_reset_prefix_cache_is_empty(llm):
    prompt = list(range(1, 50))
    llm.generate([prompt], GREEDY)
    llm.reset_prefix_cache()
    assert llm.stats()["num_cached_blocks"] == 0
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def in_thread(function, *arguments):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()
    return thread, results


def test_a_pause_waits_for_what_has_started_and_starts_nothing(make_llm):
    llm = make_llm("null:0.002", max_num_seqs=2, max_model_len=4096)
    params = SamplingParams(max_tokens=100)
    running, results = in_thread(llm.generate, [[1]] * 4, params, False)
    while llm.stats()["num_running"] < 2:
        time.sleep(0.001)
    llm.pause()
    stats = llm.stats()
    assert (stats["is_paused"], stats["num_running"], stats["num_waiting"]) == (1, 0, 2)
    assert stats["num_length_requests"] == 2, "what had started went on to its end"
    later, later_results = in_thread(llm.generate, [[2]], params, False)
    llm.pause()  # once more does no harm
    time.sleep(0.05)
    assert llm.stats()["num_length_requests"] == 2
    llm.resume()
    for thread in (running, later):
        thread.join(30)
    reasons = [output.outputs[0].finish_reason for output in results[0] + later_results[0]]
    assert reasons == ["length"] * 5
    assert llm.stats()["is_paused"] == 0


def test_a_cancelling_pause_ends_everything(make_llm):
    llm = make_llm("null:0.002", max_num_seqs=2, max_model_len=4096)
    running, results = in_thread(llm.generate, [[1]] * 4, SamplingParams(max_tokens=4000), False)
    while llm.stats()["num_waiting"] < 2:
        time.sleep(0.001)
    llm.pause("cancel")
    running.join(30)
    assert [output.outputs[0].finish_reason for output in results[0]] == ["cancelled"] * 4
    llm.resume()
    with pytest.raises(ValueError, match="mode is 'now'"):
        llm.pause("now")


def test_a_pause_of_an_idle_engine_returns_at_once_and_a_resume_ends_it(make_llm):
    llm = make_llm("null:0.01", max_model_len=4096)
    llm.resume()
    llm.pause()
    waiting, results = in_thread(llm.generate, [1], SamplingParams(max_tokens=3), False)
    time.sleep(0.05)
    assert waiting.is_alive()
    llm.resume()
    waiting.join(30)
    assert results[0][0].outputs[0].finish_reason == "length"
    endless, _ = in_thread(llm.generate, [1], SamplingParams(max_tokens=200), False)
    while llm.stats()["num_running"] < 1:
        time.sleep(0.001)
    pausing, _ = in_thread(llm.pause)
    while not llm.stats()["is_paused"]:
        time.sleep(0.001)
    llm.resume()
    pausing.join(10)
    assert endless.is_alive(), "the pause did not wait for it"
    endless.join(30)


def test_a_score_is_what_prompt_and_output_logprobs_say(llm):
    """Greedy tokens, scored after their prompt, have the log-probabilities they came with."""
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params)
    completion = output.outputs[0]
    score = llm.score([5, 6, 7], completion.token_ids)
    assert score.token_ids == completion.token_ids
    assert score.logprob == pytest.approx(completion.cumulative_logprob, abs=1e-4)
    assert score.logprob == sum(score.token_logprobs)
    assert score.is_greedy
    other = llm.score([5, 6, 7], [completion.token_ids[0], 9 + completion.token_ids[1] % 200])
    assert not other.is_greedy
    assert other.token_logprobs[0] == pytest.approx(score.token_logprobs[0], abs=1e-4)


def test_scores_of_texts_and_lists(llm):
    pairs = [("One", " the"), ("Two two", "hello"), ("x", " and y")]
    alone = [llm.score(*pair) for pair in pairs]
    assert alone[0].token_ids == llm.encode(" the", add_special_tokens=False)
    together = llm.score([prompt for prompt, _ in pairs], [text for _, text in pairs])
    for one, same in zip(alone, together, strict=True):
        assert one.token_logprobs == pytest.approx(same.token_logprobs, abs=1e-4)
    several = llm.score("One", [" the", "hello"])
    assert several[0].logprob == pytest.approx(alone[0].logprob, abs=1e-4)
    assert len(several) == 2
    assert llm.score([], []) == []


@pytest.mark.parametrize(
    ("prompt", "continuation", "message"),
    [
        ("", "a", "prompt is empty"),
        ("a", "", "continuation is empty"),
        (["a", "b"], ["c"], "2 prompts, but 1 continuations"),
        ([1] * 300, [1] * 300, "512"),
        ([1], [300], "300"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm, prompt, continuation, message):
    with pytest.raises(InvalidRequestError, match=message):
        llm.score(prompt, continuation)


def test_the_settings_in_effect_can_be_read_back(make_llm, tiny):
    llm = make_llm(tiny, num_blocks=20, block_size=8)
    config = llm.config()
    assert (config.dtype, config.device, config.num_threads) == ("float32", "cpu", 1)
    assert config.max_model_len == 160, "lowered to what the pool holds"
    assert config.kv_cache_bytes == 20 * 8 * 2 * 2 * 2 * 16 * 4
    assert config.max_prefill_chunk_tokens == config.max_num_batched_tokens
    undecided = {name for name, value in dataclasses.asdict(config).items() if value is None}
    unset = {"target_itl_ms", "max_queue_s", "max_queued_tokens", "tokenizer", "quantization"}
    assert undecided == unset


def test_the_token_budget_fits_the_device_unless_it_is_given(make_llm, tiny):
    assert make_llm(tiny).config().max_num_batched_tokens == 512
    assert make_llm(tiny, max_num_seqs=600).config().max_num_batched_tokens == 1200
    assert make_llm(tiny, max_num_batched_tokens=40).config().max_num_batched_tokens == 40
    assert make_llm("null").config().max_num_batched_tokens == 2048


def test_the_pool_is_bounded_by_kv_cache_bytes_and_by_what_can_be_used(make_llm, tiny):
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert make_llm(tiny, kv_cache_bytes=100 * block_bytes + 1).config().num_blocks == 100
    assert make_llm(tiny).config().num_blocks == 16 * 512 // 16
    with pytest.raises(ValueError, match="one block takes"):
        make_llm(tiny, kv_cache_bytes=block_bytes - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'"),
        (
            {"kv_cache_dtype": "int4"},
            "kv_cache_dtype is 'int4'; choose one of auto, float32, bfloat16, int8",
        ),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"num_blocks": 4, "kv_cache_bytes": 4}, "give one of them"),
        ({"num_blocks": 1 << 36}, r"num_blocks is \d+, a KV pool of \d+ bytes, but \d+ bytes"),
        ({"kv_cache_bytes": 1 << 50}, r"kv_cache_bytes is \d+, .* free; lower it"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"policy": "lifo"}, "lifo"),
        ({"policy": "static", "victim": "cost"}, "has no rules"),
        ({"classes": {"urgent": {}}}, "classes.urgent"),
        ({"max_model_len": 2000}, "the context of .* has 512"),
    ],
)
def test_an_impossible_setting_is_a_value_error_that_names_it(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny, **options)


def test_an_unknown_setting_is_a_type_error(tiny):
    with pytest.raises(TypeError, match="block_sise"):
        LLM(tiny, block_sise=8)


def test_threads_share_the_batches_and_get_their_own_results(make_llm, tiny):
    llm = make_llm(tiny, max_num_seqs=8)
    prompts = [[1 + thread, 2 + thread] for thread in range(8)]
    expected = [llm.generate([prompt] * 3, GREEDY) for prompt in prompts]
    results = [None] * 8

    def work(thread):
        results[thread] = [llm.generate([prompts[thread]] * 3, GREEDY, False) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for thread in range(8):
        assert [token_ids(outputs) for outputs in results[thread]] == [
            token_ids(expected[thread])
        ] * 4


def test_a_short_call_returns_before_a_long_one_of_another_thread_ends(make_llm):
    llm = make_llm("null:0.002", max_model_len=4096)
    long = threading.Thread(target=llm.generate, args=([1], SamplingParams(max_tokens=1500)))
    long.start()
    time.sleep(0.1)
    llm.generate([2], SamplingParams(max_tokens=2))
    assert long.is_alive(), "the short call had to wait for the long one"
    long.join(60)


def test_close_is_idempotent_and_ends_use(tiny):
    llm = LLM(tiny, max_model_len=64)
    llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    assert llm.is_closed
    for use in USES.values():
        with pytest.raises(EngineClosedError, match="LLM is closed"):
            use(llm)
    public = {name for name in dir(LLM) if not name.startswith("_")}
    assert public == {*USES, "close", "is_closed"}


USES = {
    "generate": lambda llm: llm.generate("a"),
    "chat": lambda llm: llm.chat([]),
    "score": lambda llm: llm.score("a", "b"),
    "config": lambda llm: llm.config(),
    "stats": lambda llm: llm.stats(),
    "encode": lambda llm: llm.encode("a"),
    "decode": lambda llm: llm.decode([1]),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "pause": lambda llm: llm.pause(),
    "resume": lambda llm: llm.resume(),
    "set_policy": lambda llm: llm.set_policy("fair"),
    "engine": lambda llm: llm.engine,
    "tokenizer": lambda llm: llm.tokenizer,
    "serve_in_background": lambda llm: llm.serve_in_background(port=0),
}


def test_close_ends_a_generate_of_another_thread(make_llm):
    llm = make_llm("null:0.001", max_model_len=8192)
    errors = []

    def work():
        try:
            llm.generate([[1]] * 3)
        except EngineClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    started = time.monotonic()
    llm.close()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    assert time.monotonic() - started < 2


def num_threads_and_descriptors():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def is_growth_gone(before):
    """Whether there are no more than `before`; joined threads leave the list a moment later."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if all(
            now <= then for now, then in zip(num_threads_and_descriptors(), before, strict=True)
        ):
            return True
        time.sleep(0.01)
    return False


def test_no_thread_or_descriptor_is_left_behind(tiny):
    with LLM(tiny, num_threads=2, max_model_len=64) as llm:
        llm.generate("warm up", GREEDY)
    before = num_threads_and_descriptors()
    for _ in range(8):
        with LLM(tiny, num_threads=2, max_model_len=64) as llm:
            llm.generate("a", GREEDY)
    for _ in range(8):
        llm = LLM(tiny, num_threads=2, max_model_len=64)
        llm.generate("a", GREEDY)
        del llm  # without close
    assert is_growth_gone(before), (num_threads_and_descriptors(), before)


def test_a_broken_core_is_reported_once_and_for_ever(make_llm):
    llm = make_llm("null")
    scheduler = llm.engine.scheduler

    class Broken:
        def __getattr__(self, name):
            return getattr(scheduler, name)

        def step(self, result=None, block=False):
            raise RuntimeError("invariant broken")

    llm.engine.scheduler = Broken()
    with pytest.raises(EngineDeadError, match="invariant broken"):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineDeadError):
        llm.generate("a", GREEDY)
    llm.close()


def run_script(code, timeout_s=60):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_interrupts_at_any_moment_leave_the_engine_usable_and_drained():
    """Sends 60 SIGINTs at spread moments; a lost batch, request or result would hang or leak."""
    code = """
        import os, random, signal, sys, threading, time
        from cbrs import LLM, SamplingParams
        llm = LLM("null", max_model_len=4096, max_num_seqs=4)
        params = SamplingParams(max_tokens=4000)
        expected = llm.generate([1, 2], SamplingParams(max_tokens=50))[0].outputs[0].token_ids
        random = random.Random(5)
        interrupted = 0
        for _ in range(60):
            delay = random.uniform(0.0005, 0.02)
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                llm.generate([[3]] * 40, params)
                time.sleep(1)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            scheduler = llm.engine.scheduler
            scheduler.check_invariants()
            stats = llm.stats()
            busy = [stats[f"num_{name}"] for name in ("running", "waiting", "used_blocks")]
            assert busy == [0, 0, 0], stats
            again = llm.generate([1, 2], SamplingParams(max_tokens=50))[0].outputs[0].token_ids
            assert again == expected
        assert interrupted == 60, interrupted
        print("fine")
    """
    result = run_script(code)
    assert result.stdout.strip() == "fine", result.stderr


def test_interrupting_one_thread_leaves_the_others_alone(make_llm):
    llm = make_llm("null:0.001", max_model_len=4096)
    results = []
    other = threading.Thread(
        target=lambda: results.extend(llm.generate([5], SamplingParams(max_tokens=800)))
    )
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    other.start()
    time.sleep(0.05)  # the other thread drives
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([6], SamplingParams(max_tokens=4000))
    other.join(30)
    assert results[0].outputs[0].finish_reason == "length"
    assert len(results[0].outputs[0].token_ids) == 800


def test_use_inside_an_asyncio_program(make_llm):
    llm = make_llm("null")

    async def main():
        calls = [
            asyncio.to_thread(llm.generate, [1], SamplingParams(max_tokens=5), False)
            for _ in range(8)
        ]
        return await asyncio.gather(*calls)

    assert [len(ids) for outputs in asyncio.run(main()) for ids in token_ids(outputs)] == [5] * 8
