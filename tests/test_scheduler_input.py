"""What `cbrs.Scheduler` takes and refuses: every limit, at the limit and beyond."""

import numpy as np
import pytest
from scheduler_kit import VOCAB_SIZE, assert_drained, make_scheduler, run

from cbrs import Scheduler, SchedulerConfig, StepResult
from cbrs.errors import (
    CbrsError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    StepError,
)


def test_prompts_may_be_any_integers_and_nothing_else():
    scheduler = make_scheduler()
    for prompt in (
        [1, 2],
        (1, 2),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        iter([1, 2]),
        range(1, 3),
    ):
        scheduler.submit(prompt, max_tokens=1)
    for prompt in (["a"], "12", [1.5], np.array([1.5]), np.array([[1, 2]]), 3, None, [None]):
        with pytest.raises((TypeError, InvalidRequestError)):
            scheduler.submit(prompt)
    assert len(run(scheduler)) == 6
    assert_drained(scheduler)


def test_a_list_may_mix_integers_of_all_kinds_and_change_while_it_is_read():
    class Shrinking:
        def __index__(self) -> int:
            del prompt[3:]
            return 3

    class Subclass(int):
        pass

    scheduler = make_scheduler()
    mixed = scheduler.submit([1, Subclass(2), np.int64(3), 4], max_tokens=1)
    prompt = [1, 2, Shrinking(), 4, 5]
    shrunk = scheduler.submit(prompt, max_tokens=1)
    with pytest.raises(InvalidRequestError, match=r"prompt_token_ids\[3\]") as refusal:
        scheduler.submit([1, 2, 3, 2**40, "x"])
    assert refusal.value.param == "prompt_token_ids"
    batch = scheduler.step()
    tokens = dict(zip(batch.request_ids, np.split(batch.token_ids, [4]), strict=True))
    assert {name: ids.tolist() for name, ids in tokens.items()} == {
        mixed: [1, 2, 3, 4],
        shrunk: [1, 2, 3],
    }


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1, VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**40]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**80]}, "prompt_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "prompt"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.01}, "min_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": -(2**70)}, "top_k"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"tenant": ""}, "tenant"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"n": 129}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2**40}, "min_tokens"),
        ({"presence_penalty": 2.01}, "presence_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": -2.01}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {VOCAB_SIZE: 5.0}}, "logit_bias"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias"),
        ({"logit_bias": {1: 100.5}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"bad_words_token_ids": [[1], []]}, "bad_words"),
        ({"bad_words_token_ids": [[VOCAB_SIZE]]}, "bad_words"),
        ({"bad_words_token_ids": [[1] * 257]}, "bad_words"),
        ({"bad_words_token_ids": [[1]] * 1025}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"priority": "urgent"}, "priority"),
        ({"cache_key_extra": "adapter"}, "cache_key_extra"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name_and_leaves_nothing_behind(arguments, param):
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.submit(**({"prompt_token_ids": [1, 2]} | arguments))
    assert caught.value.param == param
    assert isinstance(caught.value, CbrsError)
    assert isinstance(caught.value, ValueError)
    assert scheduler.stats()["num_accepted_requests"] == 0
    assert_drained(scheduler)


def test_the_length_rule_holds_at_the_limit_and_one_beyond():
    scheduler = make_scheduler()
    scheduler.submit([1] * 63)
    scheduler.submit([1] * 60, max_tokens=4)
    for prompt, max_tokens in (([1] * 64, None), ([1] * 60, 5)):
        with pytest.raises(PromptTooLongError, match="max_model_len is 64"):
            scheduler.submit(prompt, max_tokens)
    events = run(scheduler)
    assert sorted(len(of_one) for of_one in events.values()) == [1, 4]
    assert {of_one[-1][1] for of_one in events.values()} == {"length"}


def test_the_context_is_lowered_to_what_the_pool_holds():
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=8, num_blocks=15, max_model_len=100, block_size=4
    )
    assert config.max_model_len == 60
    scheduler = Scheduler(config)
    scheduler.submit([1] * 59)
    with pytest.raises(PromptTooLongError, match="60"):
        scheduler.submit([1] * 60)
    run(scheduler)
    assert_drained(scheduler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": -3}, "max_num_seqs is -3"),
        ({"num_blocks": 2**70}, "num_blocks"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"queue_capacity": 0}, "queue_capacity is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"eos_token_ids": [VOCAB_SIZE]}, "eos_token_ids"),
        ({"policy": "lifo"}, "unknown policy"),
        ({"clock": "wall"}, "clock"),
    ],
)
def test_a_wrong_setting_is_a_value_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(**options)


def test_a_result_that_does_not_fit_changes_nothing():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2)
    with pytest.raises(StepError, match="no batch is in flight"):
        scheduler.step([1])
    batch = scheduler.step()
    wrong = [
        None,
        [],
        [1, 2],
        [VOCAB_SIZE],
        [-1],
        StepResult(batch.step_id + 1, [1]),
        StepResult(batch.step_id, [1], row_error=[0, 0]),
        StepResult(batch.step_id, [1], token_start=[0, 2]),
        StepResult(batch.step_id, [1], token_start=[0]),
    ]
    for result in wrong:
        with pytest.raises(StepError):
            scheduler.step(result)
    with pytest.raises(StepError):
        scheduler.fail(batch.step_id + 1, "no")
    batch = scheduler.step(StepResult(batch.step_id, [5], token_start=[0, 1], row_error=[False]))
    assert batch.outputs.token_ids.tolist() == [5]
    run(scheduler, batch)
    assert_drained(scheduler)


def test_values_of_later_versions_are_refused():
    with pytest.raises(InvalidRequestError, match="draft_token_ids"):
        StepResult(1, [1], draft_token_ids=[1])
    with pytest.raises(TypeError, match="tempreature"):
        make_scheduler().submit([1], tempreature=1.0)


def test_unknown_ids_do_nothing():
    scheduler = make_scheduler()
    request = scheduler.submit([1], max_tokens=1)
    run(scheduler)
    for stale in (request, 0, 1, 2**63, 2**64 - 1):
        assert not scheduler.cancel(stale)
        assert not scheduler.finish(stale, 0, 1)
    assert run(scheduler) == {}
    assert_drained(scheduler)


def test_bounds_of_the_queue_are_exact_and_a_refusal_is_immediate():
    scheduler = make_scheduler(queue_capacity=3, max_queued_tokens=10)
    scheduler.submit([1] * 4)
    scheduler.submit([2] * 6)
    with pytest.raises(OverloadedError, match="at most 10 may wait now") as caught:
        scheduler.submit([1])
    # Nothing is known yet about how fast the queue drains.
    assert caught.value.retry_after_s == 1.0
    scheduler.step()
    for _ in range(3):
        scheduler.submit([1], max_tokens=1)
    with pytest.raises(OverloadedError, match="3 requests are waiting"):
        scheduler.submit([1])
    assert scheduler.stats()["num_waiting"] == 3


def test_seeds_follow_the_scheduler_seed_and_the_order_of_arrival():
    def seeds(seed):
        scheduler = make_scheduler(seed=seed)
        for _ in range(3):
            scheduler.submit([1])
        scheduler.submit([1], seed=0)
        return scheduler.step().seeds.tolist()

    assert seeds(1) == seeds(1)
    assert seeds(1)[:3] != seeds(2)[:3]
    assert len(set(seeds(1)[:3])) == 3
    assert seeds(1)[3] == 0, "0 is a seed"
    assert make_scheduler().config.seed != make_scheduler().config.seed


def test_limits_beyond_the_machine_are_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match=r"block tables .* bytes"):
        make_scheduler(max_num_seqs=2**20, num_blocks=2**28, max_model_len=2**28, block_size=1)


def test_numbers_that_nobody_can_have_name_nothing():
    scheduler = make_scheduler()
    request = scheduler.submit([1], max_tokens=3)
    for number in (-1, 2**64, 2**200):
        assert not scheduler.cancel(number)
        assert not scheduler.finish(number, 0, 1)
    assert scheduler.finish(request, 7, 1), "the request lives, but has no such choice"
    with pytest.raises(InvalidRequestError, match="num_tokens"):
        scheduler.finish(request, 0, -1)
    batch = scheduler.step()
    with pytest.raises(StepError):
        scheduler.fail(-1, "no such step")
    for token in (2**31, -(2**31) - 1, 2**70):
        with pytest.raises(StepError):
            scheduler.step([token])
    assert len(run(scheduler, batch)[request]) == 3


def test_an_empty_batch_accepts_an_empty_result_that_names_it():
    scheduler = make_scheduler()
    batch = scheduler.step()
    batch = scheduler.step(StepResult(batch.step_id, []))
    assert batch.num_seqs == 0
    with pytest.raises(StepError):
        scheduler.step(StepResult(batch.step_id + 1, []))


def test_row_errors_may_be_a_numpy_mask():
    scheduler = make_scheduler()
    request = scheduler.submit([1], max_tokens=3)
    batch = scheduler.step()
    logits = np.array([[0.0, np.nan]])
    result = StepResult(batch.step_id, [0], row_error=np.isnan(logits).any(axis=-1))
    outputs = scheduler.step(result).outputs
    assert (outputs.request_ids.tolist(), outputs.finish_reason(0)) == ([request], "error")


def test_log_probabilities_must_come_where_they_are_wanted_and_wide_enough():
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_tokens=2, logprobs=2)
    batch = scheduler.step()

    def matrix(rows=1, columns=3, ranks=1):
        ids = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        return ids, np.zeros((rows, columns), np.float32), np.ones(ranks, np.int32)

    for wrong in (None, matrix(columns=2), matrix(rows=2), matrix(ranks=2)):
        with pytest.raises(StepError, match="logprobs"):
            scheduler.step(StepResult(batch.step_id, [5], logprobs=wrong))
    for wrong in (5, [1, 2], (np.zeros(3, np.int32),) * 3):
        with pytest.raises((TypeError, BufferError)):
            StepResult(batch.step_id, [5], logprobs=wrong)
    outputs = scheduler.step(StepResult(batch.step_id, [5], logprobs=matrix(columns=9))).outputs
    assert outputs.logprobs.token_ids.tolist() == [0, 1, 2]
    assert outputs.logprob_events.tolist() == [0]
