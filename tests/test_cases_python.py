"""Faults that engines of this kind have really had, each as an assertion on the Python engine.

The id in a test's name stands for one such fault, its letter for the kind: a = blocks, b = prefix
reuse, c = chunked prompts, d = preemption, e = cancelling and failing, f = text, g = sampling.
Every test ends drained (`make_llm`).
"""

import random
import subprocess
import sys
import textwrap

import kit
import numpy as np
import pytest
import torch
from scheduler_kit import make_scheduler

import cbrs
from cbrs import SamplingParams
from cbrs.errors import StepError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def greedy(max_tokens):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def record_batches(llm):
    """Wraps the engine's step; returns a list that fills with one dict per batch."""
    trace = []
    step = llm.engine.step

    def recorded():
        batch = step()
        if batch.num_seqs > 0:
            trace.append(
                {
                    "request_ids": batch.request_ids.tolist(),
                    "query_lens": np.diff(batch.query_start).tolist(),
                    "seq_lens": batch.seq_lens.tolist(),
                    "num_samples": len(batch.sample_index),
                }
            )
        return batch

    llm.engine.step = recorded
    return trace


def record_logits(llm):
    """Wraps the runner; returns a list of `(position, logits row)` of every sampled row."""
    rows = []
    runner = llm.engine._runner

    class Recorder:
        def forward(self, batch):
            logits = runner.forward(batch)
            for i, row in enumerate(batch.sample_index.tolist()):
                rows.append((int(batch.sample_positions[i]), logits[row].clone()))
            return logits

    llm.engine._runner = Recorder()
    return rows


def small_scheduler(**options):
    return make_scheduler(**{"max_num_batched_tokens": 64, "num_blocks": 16, **options})


def run_to_end(scheduler, token=5, max_steps=1000):
    """Answers every batch with `token`; returns finish reasons by request."""
    ends = {}
    result = None
    for _ in range(max_steps):
        batch = scheduler.step(result)
        collect_ends(batch.outputs, ends)
        if batch.num_seqs == 0:
            return ends
        result = np.full(len(batch.sample_index), token, dtype=np.int32)
    raise AssertionError("the scheduler does not come to an end")


def collect_ends(outputs, ends):
    for request, code in zip(
        outputs.request_ids.tolist(), outputs.finish_reasons.tolist(), strict=True
    ):
        if code != 0:
            ends.setdefault(request, []).append(code)


def assert_empty(scheduler, num_blocks):
    scheduler.check_invariants()
    stats = scheduler.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == num_blocks


def test_a05_one_short_prompt_with_a_long_answer_leaves_every_block_free_or_cached(make_llm, tiny):
    llm = make_llm(tiny)
    (output,) = llm.generate([[1, 2, 3]], greedy(200))
    assert len(output.outputs[0].token_ids) == 200
    stats = llm.stats()
    assert stats["num_used_blocks"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == llm.config().num_blocks


def test_a05_a_step_answered_twice_is_a_typed_error_and_changes_nothing():
    scheduler = small_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2)
    batch = scheduler.step()
    with pytest.raises(StepError):
        scheduler.step(cbrs.StepResult(batch.step_id + 1, np.array([5], dtype=np.int32)))
    scheduler.fail(batch.step_id, "enough")
    with pytest.raises(StepError):
        scheduler.fail(batch.step_id, "once more")
    run_to_end(scheduler)
    assert_empty(scheduler, 16)


def test_a09_an_admission_that_does_not_fit_takes_nothing():
    scheduler = small_scheduler(num_blocks=8, max_model_len=32)
    running = scheduler.submit([1] * 25, max_tokens=7)
    batch = scheduler.step()
    blocked = [scheduler.submit([2] * 20, max_tokens=2) for _ in range(3)]
    result = np.full(len(batch.sample_index), 5, dtype=np.int32)
    for _ in range(5):
        batch = scheduler.step(result)
        assert batch.request_ids.tolist() == [running]
        scheduler.check_invariants()
        stats = scheduler.stats()
        held = -(-int(batch.seq_lens[0]) // 4)
        assert stats["num_used_blocks"] == held, "only the running request holds blocks"
        assert stats["num_waiting"] == len(blocked)
        result = np.full(len(batch.sample_index), 5, dtype=np.int32)
    ends = run_to_end_after(scheduler, result)
    assert set(ends) >= set(blocked)
    assert_empty(scheduler, 8)


def run_to_end_after(scheduler, result):
    ends = {}
    batch = scheduler.step(result)
    collect_ends(batch.outputs, ends)
    while batch.num_seqs > 0:
        batch = scheduler.step(np.full(len(batch.sample_index), 5, dtype=np.int32))
        collect_ends(batch.outputs, ends)
    return ends


def test_a14_chunks_and_decodes_in_one_batch_leave_nothing_behind(make_llm, tiny):
    llm = make_llm(tiny, max_prefill_chunk_tokens=16, max_num_batched_tokens=64)
    lengths = random.Random(1)
    prompts = [[lengths.randrange(300) for _ in range(lengths.randint(1, 300))] for _ in range(128)]
    trace = record_batches(llm)
    outputs = llm.generate(prompts, greedy(8))
    assert all(len(ids) == 8 for ids in token_ids(outputs))
    assert any({1, 16} <= set(batch["query_lens"]) for batch in trace), "mixed batches ran"


def test_b01_prompt_logprobs_are_the_same_with_and_without_a_cached_prefix(make_llm, tiny):
    llm = make_llm(tiny, block_size=16)
    prompt = [3 + (7 * i) % 200 for i in range(33)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    first, second = (llm.generate([prompt], params)[0].prompt_logprobs for _ in range(2))
    (after,) = llm.generate([prompt], greedy(1))
    assert after.num_cached_tokens == 32, "the prompt is cached, and others may use it"
    assert len(first) == len(second) == 33
    assert first[0] is second[0] is None
    for token, own, other in zip(prompt[1:], first[1:], second[1:], strict=True):
        assert own[token].rank == other[token].rank
        assert own[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_b05_an_adopted_prefix_is_not_computed_again(make_llm, tiny):
    shared = [3 + i for i in range(40)]
    prompts = [[*shared, 60], [*shared, 61, 62]]
    plain, cached = make_llm(tiny, enable_prefix_caching=False), make_llm(tiny)
    expected = record_logits(plain)
    plain.generate(prompts, greedy(1))
    cached.generate([shared], greedy(1))
    trace, logits = record_batches(cached), record_logits(cached)
    outputs = cached.generate(prompts, greedy(1))
    assert [output.num_cached_tokens for output in outputs] == [32, 32]
    assert [batch["query_lens"] for batch in trace] == [[9, 10]]
    assert trace[0]["seq_lens"] == [41, 42], "the KV length is the prompt length"
    for (_, with_cache), (_, without) in zip(logits, expected, strict=True):
        torch.testing.assert_close(with_cache, without, atol=1e-5, rtol=0)


def test_b08_conversations_are_equal_with_and_without_reuse(make_llm, tiny):
    plain, cached = make_llm(tiny, enable_prefix_caching=False), make_llm(tiny)
    choose = random.Random(2)
    histories = [[choose.randrange(300) for _ in range(20)] for _ in range(200)]
    num_cached = 0
    for _ in range(3):
        expected, outputs = (llm.generate(histories, greedy(6)) for llm in (plain, cached))
        assert token_ids(outputs) == token_ids(expected)
        num_cached += sum(output.num_cached_tokens for output in outputs)
        for history, ids in zip(histories, token_ids(outputs), strict=True):
            assert all(0 <= token < 300 for token in ids)
            history += ids + [choose.randrange(300) for _ in range(7)]
    assert num_cached > 200 * 16


def test_c01_a_chunk_reads_only_what_has_been_written(make_llm, tiny):
    prompt = [(7 * i) % 300 for i in range(40)]
    whole, chunked = make_llm(tiny), make_llm(tiny, max_prefill_chunk_tokens=16)
    expected, logits = record_logits(whole), []
    chunked.engine._runner.kv_cache.fill(float("nan"))
    trace, logits = record_batches(chunked), record_logits(chunked)
    outputs = [llm.generate([prompt], greedy(4)) for llm in (whole, chunked)]
    assert token_ids(outputs[0]) == token_ids(outputs[1])
    assert [batch["query_lens"] for batch in trace[:3]] == [[16], [16], [8]]
    for (_, in_chunks), (_, at_once) in zip(logits, expected, strict=True):
        assert not torch.isnan(in_chunks).any()
        torch.testing.assert_close(in_chunks, at_once, atol=1e-4, rtol=0)


def test_c03_no_token_comes_before_the_last_chunk(make_llm, tiny):
    llm = make_llm(tiny, max_prefill_chunk_tokens=16)
    trace = record_batches(llm)
    (output,) = llm.generate([[1 + i for i in range(80)]], greedy(5))
    assert [batch["num_samples"] for batch in trace] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert len(output.outputs[0].token_ids) == 5
    assert len(output.metrics.inter_token_latencies_s) == 4
    assert output.metrics.time_to_first_token_s > output.metrics.queue_time_s
    assert all(token >= 0 for token in output.outputs[0].token_ids)


def test_c10_the_chunk_size_reaches_the_scheduler(make_llm, tiny):
    llm = make_llm(tiny, max_prefill_chunk_tokens=17)
    trace = record_batches(llm)
    llm.generate([[1 + i for i in range(100)]], greedy(1))
    assert [batch["query_lens"] for batch in trace] == [[17]] * 5 + [[15]]
    assert llm.config().max_prefill_chunk_tokens == 17
    assert llm.engine.scheduler.config.max_prefill_chunk_tokens == 17


TIGHT = {"num_blocks": 8, "block_size": 4, "max_model_len": 32, "enable_prefix_caching": False}
"""Two requests of 5 prompt tokens fill it when each has 11 output tokens."""


@pytest.mark.parametrize(
    "penalty",
    [
        {},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2},
        {"repetition_penalty": 1.4},
    ],
)
def test_d15_a_preemption_changes_neither_the_ids_nor_the_prompt_count(penalty, make_llm, tiny):
    solo = make_llm(tiny, enable_prefix_caching=False)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    # Few tokens are likely, so that every penalty changes something.
    bias = dict.fromkeys(range(20, 26), 8.0)
    params = SamplingParams(seed=3, max_tokens=25, ignore_eos=True, logit_bias=bias, **penalty)
    expected = [solo.generate([prompt], params)[0] for prompt in prompts]
    tight = make_llm(tiny, **TIGHT)
    outputs = tight.generate(prompts, params)
    assert tight.stats()["num_preemptions"] > 0
    assert token_ids(outputs) == token_ids(expected)
    assert [output.prompt_token_ids for output in outputs] == prompts
    if penalty:
        plain = SamplingParams(seed=3, max_tokens=25, ignore_eos=True, logit_bias=bias)
        assert token_ids(solo.generate(prompts, plain)) != token_ids(expected)


def test_d18_a_preemption_loses_no_logprob(make_llm, tiny):
    solo = make_llm(tiny, enable_prefix_caching=False)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, logprobs=1)
    expected = [solo.generate([prompt], params)[0] for prompt in prompts]
    tight = make_llm(tiny, **TIGHT)
    outputs = tight.generate(prompts, params)
    assert tight.stats()["num_preemptions"] > 0
    for output, other in zip(outputs, expected, strict=True):
        found, wanted = output.outputs[0], other.outputs[0]
        assert found.token_ids == wanted.token_ids
        assert len(found.logprobs) == len(found.token_ids) == 25
        for token, own, its in zip(found.token_ids, found.logprobs, wanted.logprobs, strict=True):
            assert own[token].logprob == pytest.approx(its[token].logprob, abs=1e-4)


def test_d16_a_preempted_request_recomputes_all_it_knows_and_repeats_nothing(make_llm, tiny):
    solo = make_llm(tiny, enable_prefix_caching=False)
    prompts = [[1, 2, 3], [4, 5, 6]]
    expected = [solo.generate([prompt], greedy(100))[0] for prompt in prompts]
    # Admission by the prompt alone overcommits the pool.
    limits = {"num_blocks": 10, "max_model_len": 160, "admission": "prompt"}
    tight = make_llm(tiny, enable_prefix_caching=False, **limits)
    trace = record_batches(tight)
    outputs = tight.generate(prompts, greedy(100))
    assert tight.stats()["num_preemptions"] > 0
    assert token_ids(outputs) == token_ids(expected)
    assert [len(output.prompt_token_ids) for output in outputs] == [3, 3]
    computed: dict[int, int] = {}
    resumed = 0
    for batch in trace:
        for request, query, length in zip(
            batch["request_ids"], batch["query_lens"], batch["seq_lens"], strict=True
        ):
            if length == query and request in computed:
                resumed += 1
                assert query == computed[request] + 1, "all known tokens, each once"
            computed[request] = length
    assert resumed > 0


def test_d22_a_pool_for_one_and_a_half_requests_serves_twenty(make_llm, tiny):
    solo = make_llm(tiny)
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    expected = [solo.generate([prompt], greedy(60))[0] for prompt in prompts]
    tight = make_llm(tiny, num_blocks=6, max_model_len=96)
    trace = record_batches(tight)
    outputs = tight.generate(prompts, greedy(60))
    assert token_ids(outputs) == token_ids(expected)
    assert tight.stats()["num_preemptions"] > 0
    assert all(query >= 1 for batch in trace for query in batch["query_lens"])


def test_e03_a_cancelled_request_leaves_room_for_the_next():
    scheduler = small_scheduler(queue_capacity=1)
    first = scheduler.submit([1, 2, 3], max_tokens=2)
    with pytest.raises(cbrs.errors.OverloadedError):
        scheduler.submit([1, 2, 3], max_tokens=2)
    scheduler.cancel(first)
    ends = run_to_end(scheduler)
    second = scheduler.submit([1, 2, 3], max_tokens=2)
    ends |= run_to_end(scheduler)
    assert second != first
    assert {request: len(codes) for request, codes in ends.items()} == {first: 1, second: 1}
    scheduler.cancel(first)  # stale: nothing happens
    assert_empty(scheduler, 16)


def test_e06_a_cancel_in_the_step_of_the_stop_token_gives_one_end():
    scheduler = small_scheduler(eos_token_ids=(9,))
    choose = random.Random(3)
    stopped, cancelled = cbrs.StepOutput.STOP, cbrs.StepOutput.CANCELLED
    seen = set()
    for _ in range(10_000):
        request = scheduler.submit([1, 2, 3], max_tokens=5)
        ends = {}
        batch = scheduler.step()
        moment = choose.randrange(3)
        if moment == 0:
            scheduler.cancel(request)
        batch = scheduler.step(np.array([9], dtype=np.int32))
        collect_ends(batch.outputs, ends)
        if moment == 1:
            scheduler.cancel(request)
        collect_ends(scheduler.step().outputs, ends)
        collect_ends(scheduler.step().outputs, ends)
        # The cancel wins if it came before the token, and is stale if it came after.
        assert ends == {request: [cancelled if moment == 0 else stopped]}
        seen |= {*ends[request]}
    assert seen == {stopped, cancelled}, "both outcomes occurred"
    assert_empty(scheduler, 16)


def test_e07_a_failure_whose_receiver_has_gone_hurts_nobody(make_llm, tiny):
    llm = make_llm(tiny)
    kept = list(range(1, 50))
    (expected,) = llm.generate([kept], greedy(5))
    num_cached = llm.stats()["num_cached_blocks"]
    runner = llm.engine._runner

    class FailsOnce:
        has_failed = False

        def forward(self, batch):
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("once")
            return runner.forward(batch)

    llm.engine._runner = FailsOnce()
    # Nobody takes the result of this request: its receiver has gone.
    llm.engine.processor.submit([200, 201], max_tokens=3, index=0)
    llm.engine.step()
    (again,) = llm.generate([kept], greedy(5))
    assert token_ids([again]) == token_ids([expected])
    assert again.num_cached_tokens == 48, "the cache was not flushed"
    assert llm.stats()["num_cached_blocks"] >= num_cached


def test_e14_a_host_keeps_its_signal_handlers_threads_and_descriptors(tiny):
    code = f"""
        import gc, os, signal, time
        handler = lambda *_: None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)

        def counts():
            gc.collect()
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        from cbrs import LLM, SamplingParams
        params = SamplingParams(max_tokens=2)
        LLM({str(tiny)!r}, num_threads=2, max_model_len=64).generate("warm up", params)
        before = counts()
        llm = LLM({str(tiny)!r}, num_threads=2, max_model_len=64)
        llm.generate("a", params)
        assert signal.getsignal(signal.SIGINT) is handler
        del llm
        deadline = time.monotonic() + 10  # joined threads leave the list a moment later
        while counts() != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert counts() == before, (counts(), before)
        assert signal.getsignal(signal.SIGTERM) is handler
        print("fine")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "fine", result.stderr


def test_e19_two_calls_on_one_engine_both_return_their_results_in_order(make_llm, tiny):
    llm = make_llm(tiny)
    prompts = [[10 * i, 10 * i + 1] for i in range(1, 6)]
    first, second = llm.generate(prompts, GREEDY), llm.generate(prompts[::-1], GREEDY)
    assert [output.prompt_token_ids for output in first] == prompts
    assert token_ids(second) == token_ids(first)[::-1]
    assert len({output.request_id for output in first + second}) == 10


def byte_id(byte):
    return 2 + byte


def piece_tokenizer(pieces):
    """The 256 bytes and `pieces`, each one token; texts become bytes, as there are no merges."""
    letters = kit.byte_letters()
    tokenizer = kit.byte_tokenizer()
    tokens = ["<s>", "</s>", *(letters[byte] for byte in range(256))]
    tokens += ["".join(letters[byte] for byte in piece) for piece in pieces]
    tokenizer["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    tokenizer["added_tokens"] = [
        token for token in tokenizer["added_tokens"] if token["id"] in (kit.BOS, kit.EOS)
    ]
    return tokenizer


@pytest.fixture
def run_chain(make_llm, tmp_path):
    """Answers `<s>` with `pieces`, one token each, then ends; returns the output."""

    def run(pieces, **parameters):
        long_pieces = [piece for piece in pieces if len(piece) > 1]
        ids = [
            byte_id(piece[0]) if len(piece) == 1 else byte_id(256) + long_pieces.index(piece)
            for piece in pieces
        ]
        assert len(set(ids)) == len(ids), "each piece can be emitted once"
        follows = dict(zip([kit.BOS, *ids], [*ids, kit.EOS], strict=True))
        folder = kit.chain(tmp_path / "chain", follows, piece_tokenizer(long_pieces))
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **parameters})
        return make_llm(folder).generate([[kit.BOS]], params)[0].outputs[0]

    return run


def test_f01_nothing_of_a_stop_string_is_in_the_text(run_chain):
    pieces = [bytes([byte]) for byte in b"ABCDEFGH"]
    completion = run_chain(pieces, stop="DEFG")
    assert completion.text == "ABC"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "DEFG")
    assert completion.token_ids == [byte_id(byte) for byte in b"ABCDEFG"], "no token after it"
    assert run_chain(pieces, stop="DEFX").text == "ABCDEFGH"


def test_f06_a_character_split_over_two_tokens_is_one_character(run_chain):
    assert run_chain([b"a", b"\xc4", b"\x8f", b"b"]).text == "a\u010fb"


def test_f08_every_token_of_plain_text_is_in_the_result(run_chain):
    pieces = [bytes([byte]) for byte in range(0x30, 0x30 + 50)]
    completion = run_chain(pieces)
    assert completion.text == b"".join(pieces).decode()
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == kit.EOS, "the end token is counted, its text is not shown"


def test_f10_consecutive_spaces_survive(run_chain):
    assert run_chain([b"x", b"   ", b" word", b"  ", b" end"]).text == "x    word   end"


def test_g02_seed_zero_is_a_seed(make_llm, tiny):
    llm = make_llm(tiny)
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=32)
    first, second = (token_ids(llm.generate([[1, 2]], params)) for _ in range(2))
    other = token_ids(
        llm.generate([[1, 2]], SamplingParams(temperature=1.0, seed=1, max_tokens=32))
    )
    unseeded = [
        token_ids(llm.generate([[1, 2]], SamplingParams(temperature=1.0, max_tokens=32)))
        for _ in range(2)
    ]
    assert first == second
    assert first != other
    assert unseeded[0] != unseeded[1]


def test_g12_padded_rows_of_the_head_are_never_sampled(make_llm, tiny):
    llm = make_llm(tiny, max_num_seqs=64)
    params = SamplingParams(temperature=5.0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate([[i % 300] for i in range(100)], params)
    ids = [token for output in token_ids(outputs) for token in output]
    assert len(ids) == 10_000
    assert max(ids) < 300


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"num_blocks": 40}])
def test_g14_a_request_is_the_same_whoever_its_neighbours_are(make_llm, tiny, options):
    solo = make_llm(tiny, enable_prefix_caching=False)
    llm = make_llm(tiny, max_num_seqs=8, **options)
    choose = random.Random(4)
    prompts, params = [], []
    for i in range(24):
        prompts.append([choose.randrange(300) for _ in range(choose.randint(1, 60))])
        params.append(
            SamplingParams(
                temperature=choose.choice([0.0, 0.7, 1.5]),
                top_k=choose.choice([0, 5, 50]),
                top_p=choose.choice([0.5, 1.0]),
                min_p=choose.choice([0.0, 0.05]),
                seed=i,
                max_tokens=choose.randint(1, 40),
            )
        )
    alone = [
        solo.generate([prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)
    ]
    order = list(range(24))
    choose.shuffle(order)
    together = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert token_ids(together) == [token_ids(alone)[i] for i in order]


def test_g02_a_seed_gives_the_same_tokens_on_another_engine(make_llm, tiny):
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=20)
    first, second = (token_ids(make_llm(tiny).generate([[1, 2]], params)) for _ in range(2))
    assert first == second
