"""Sampling parameters through the whole engine: every mode gives the same effect."""

import math
from typing import Any

import kit
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

PROMPT = [5, 6, 7, 6, 5, 9, 30, 31, 32, 33]
ALL_PENALTIES = {
    "presence_penalty": 1.0,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {40: 2.0, 41: -100.0},
    "min_tokens": 12,
}
MODES: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"policy": "static"},
    {"max_prefill_chunk_tokens": 3},
    {"max_num_batched_tokens": 4},
    {"block_size": 4},
]


def run(llm: Any, requests: list[dict[str, Any]]) -> list[Any]:
    """Run requests of `{"prompt": ids, parameter: value, ...}` together; return their results."""
    engine = llm.engine
    for index, parameters in enumerate(requests):
        given = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **parameters}
        engine.processor.submit(given.pop("prompt", PROMPT), index=index, **given)
    finished = drain(engine)
    results = [finished[index] for index in range(len(requests))]
    assert [result.error for result in results] == [None] * len(requests)
    return results


def drain(engine: Any) -> dict[int, Any]:
    """Step until every request has been handed over; return their only choices by index."""
    finished: dict[int, Any] = {}
    while True:
        is_idle = engine.step().num_seqs == 0
        is_done = engine.processor.num_live == 0
        results = engine.processor.wait_finished(0.01 if is_idle and not is_done else 0.0)
        finished.update((result.index, result.outputs[0]) for result in results)
        if is_done:
            return finished


def tokens_of(llm: Any, **parameters: Any) -> list[int]:
    return run(llm, [parameters])[0].token_ids.tolist()


@pytest.mark.parametrize(
    "parameters",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {40: 100.0}},
        {"temperature": 1.0, "seed": 3, **ALL_PENALTIES},
    ],
    ids=lambda parameters: "-".join(parameters),
)
def test_g18_a_parameter_has_the_same_effect_in_every_mode(make_llm, tiny, parameters):
    """Each mode twice, so that the second run may find the prompt in the cache."""
    plain = tokens_of(make_llm(tiny), **{**parameters, **neutral(parameters)})
    outputs = []
    for mode in MODES:
        llm = make_llm(tiny, **mode)
        outputs += [tokens_of(llm, **parameters), tokens_of(llm, **parameters)]
    assert outputs == [outputs[0]] * len(outputs)
    assert outputs[0] != plain


def neutral(parameters):
    """Return values without effect for the parameters that are about the choice of tokens."""
    values = {"repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0, "seed": 4}
    return {name: values.get(name, 0.0) for name in parameters if name != "temperature"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_d15_preemption_changes_no_token(make_llm, tiny, temperature):
    """A pool in which not all fit: somebody is preempted, and its output stays output."""
    requests = [
        {
            "prompt": [(7 * index + j) % 200 + 10 for j in range(12)],
            "temperature": temperature,
            "seed": index,
            "max_tokens": 40,
            "presence_penalty": 1.5,
            "frequency_penalty": 0.25,
            "repetition_penalty": 1.1,
        }
        for index in range(4)
    ]
    roomy = make_llm(tiny, block_size=4)
    expected = [run(roomy, [request])[0].token_ids.tolist() for request in requests]
    tight = make_llm(tiny, block_size=4, num_blocks=24, max_model_len=64)
    results = run(tight, requests)
    assert tight.stats()["num_preemptions"] > 0
    assert [result.token_ids.tolist() for result in results] == expected


def test_g14_neighbours_with_every_parameter_leave_a_plain_request_alone(make_llm, tiny):
    llm = make_llm(tiny)
    plain = {"prompt": [8, 9, 10]}
    expected = tokens_of(llm, **plain)
    heavy = {"temperature": 1.5, "seed": 1, "top_p": 0.5, "logprobs": 5, **ALL_PENALTIES}
    results = run(llm, [heavy, plain, {**heavy, "prompt": [8] * 40}, plain])
    assert [results[index].token_ids.tolist() for index in (1, 3)] == [expected] * 2


def test_g07_min_tokens_holds_off_every_end_token(make_llm, tmp_path):
    config = kit.tiny_config(tie_word_embeddings=False)
    model = kit.write_folder(
        tmp_path / "two_ends",
        config,
        kit.tensors_of(config, 7),
        kit.byte_tokenizer(),
        generation={"eos_token_id": [1, 2]},
    )
    llm = make_llm(model)
    # Of the two ends the one with the bias is always the best, the other one second.
    bias = {2: 100.0, 1: 99.0}
    (result,) = run(llm, [{"logit_bias": bias, "min_tokens": 5, "ignore_eos": False}])
    assert len(result.token_ids) == 6
    assert not {1, 2} & set(result.token_ids[:5].tolist())
    assert (result.token_ids[5], result.finish_reason) == (2, "stop")
    (result,) = run(llm, [{"logit_bias": bias, "ignore_eos": False}])
    assert result.token_ids.tolist() == [2]


def test_g08_min_tokens_holds_off_stop_tokens(make_llm, tiny):
    llm = make_llm(tiny)
    free = tokens_of(llm)
    stop = free[1]
    assert tokens_of(llm, stop_token_ids=[stop]) == free[: free.index(stop) + 1]
    held = tokens_of(llm, stop_token_ids=[stop], min_tokens=8)
    assert len(held) >= 9
    assert stop not in held[:8]


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_g27_logit_bias_has_its_effect_in_every_type(make_llm, tmp_path, stored, dtype):
    config = kit.tiny_config(tie_word_embeddings=False, torch_dtype=stored)
    folder = kit.write_folder(tmp_path / "model", config, {}, kit.byte_tokenizer())
    tensors = kit.tensors_of(config, 7).items()
    half = {name: torch.from_numpy(values).to(getattr(torch, stored)) for name, values in tensors}
    save_file(half, folder / "model.safetensors")
    llm = make_llm(folder, dtype=dtype)
    free = tokens_of(llm)
    assert tokens_of(llm, logit_bias={77: 100.0}) == [77] * 24
    first = tokens_of(llm, logit_bias={free[0]: -100.0})[0]
    assert first != free[0]
    assert tokens_of(llm, logit_bias={free[0]: 0.0}) == free


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_those_of_the_logits_that_were_sampled_from(make_llm, tiny, dtype):
    """Of every event, with neighbours that want other numbers of them or none."""
    llm = make_llm(tiny, dtype=dtype)
    engine = llm.engine
    counts = {0: 0, 1: 5, 2: None, 3: 20}
    requests = {}
    for index, count in counts.items():
        arguments = {"temperature": 1.0, "seed": index, "max_tokens": 6, "ignore_eos": True}
        request = engine.processor.submit(PROMPT[index:], index=index, logprobs=count, **arguments)
        requests[request] = count
    wanted: list[tuple[int, torch.Tensor]] = []
    seen = 0
    while engine.processor.num_live > 0 or wanted:
        batch = step_and_keep(engine, wanted_now := [])
        outputs = batch.outputs
        logprobs, events = outputs.logprobs, outputs.logprob_events.tolist()
        assert len(events) == sum(requests[request] is not None for request, _ in wanted)
        told = [(request, row) for request, row in wanted if requests[request] is not None]
        for number, (event, (request, row)) in enumerate(zip(events, told, strict=True)):
            assert outputs.request_ids[event] == request
            part = slice(*logprobs.start[number : number + 2].tolist())
            ids, values = logprobs.token_ids[part].tolist(), logprobs.values[part]
            assert len(ids) == 1 + requests[request]
            assert ids[0] == outputs.token_ids[event]
            exact = row.log_softmax(-1)
            np.testing.assert_allclose(values, exact[ids].numpy(), atol=2e-5)
            assert logprobs.ranks[number] == 1 + int((row > row[ids[0]]).sum())
            assert ids[1:] == exact.argsort(descending=True, stable=True)[: len(ids) - 1].tolist()
            seen += 1
        wanted = wanted_now
        engine.processor.take_finished()
    assert seen == 18


def step_and_keep(engine: Any, kept: list[tuple[int, torch.Tensor]]) -> Any:
    """Step once; put request and logits (without padding) of each sample into `kept`."""
    inner = engine._runner

    class Keeping:
        def forward(self, batch: Any) -> torch.Tensor:
            logits = inner.forward(batch)
            requests = dict(zip(batch.row_ids.tolist(), batch.request_ids.tolist(), strict=True))
            for index, row in zip(batch.sample_index, batch.sample_rows.tolist(), strict=True):
                kept.append((requests[row], logits[int(index), : kit.NUM_TOKENS].clone()))
            return logits

    engine._runner = Keeping()
    try:
        return engine.step()
    finally:
        engine._runner = inner


def test_a_request_without_any_token_left_ends_alone_with_the_reason(make_llm, tiny):
    llm = make_llm(tiny)
    engine = llm.engine
    banned = list(range(1, 120))
    bias = dict.fromkeys(range(300), -100.0)
    # Biases alone exclude nothing; the bans of end tokens cannot ban a whole vocabulary here.
    (result,) = run(llm, [{"stop_token_ids": banned, "min_tokens": 3, "logit_bias": bias}])
    assert not set(result.token_ids[:3].tolist()) & set(banned)
    inner = engine._runner

    class OnlyBanned:
        def forward(self, batch: Any) -> torch.Tensor:
            logits = inner.forward(batch).clone()
            logits[np.flatnonzero(batch.request_ids == cursed), 120:] = -math.inf
            logits[np.flatnonzero(batch.request_ids == cursed), 0] = -math.inf
            return logits

    engine._runner = OnlyBanned()
    arguments = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    cursed = engine.processor.submit(
        PROMPT, index=0, stop_token_ids=banned, min_tokens=3, **arguments
    )
    engine.processor.submit(PROMPT, index=1, **arguments)
    finished = drain(engine)
    assert finished[0].finish_reason == "error"
    assert "excluded" in finished[0].error
    assert finished[1].finish_reason == "length"


def test_null_reports_its_certainty(make_llm):
    llm = make_llm("null")
    engine = llm.engine
    engine.processor.submit([5, 6], index=0, max_tokens=3, logprobs=3)
    engine.processor.submit([5, 6], index=1, max_tokens=3)
    told = []
    while engine.processor.num_live > 0:
        outputs = engine.step().outputs
        if outputs.logprobs is not None:
            token = outputs.token_ids[outputs.logprob_events[0]]
            told.append(token)
            assert outputs.logprobs.token_ids.tolist() == [token, token, 0, 1]
            assert outputs.logprobs.values.tolist() == [0.0, 0.0, -9999.0, -9999.0]
            assert outputs.logprobs.ranks.tolist() == [1]
        engine.processor.take_finished()
    assert len(told) == 3
