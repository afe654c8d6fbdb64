"""Who runs next, through `Scheduler` with a manual clock."""

import time

import numpy as np
import pytest
from scheduler_kit import assert_drained, collect, make_scheduler, run

from cbrs import StepResult
from cbrs.errors import InvalidRequestError, OverloadedError

STEP_NS = 10_000_000


class Rig:
    """A scheduler whose steps take 10 ms, and what each request has had."""

    def __init__(self, **options):
        defaults = {"policy": "fair", "clock": "manual", "num_blocks": 256}
        self.scheduler = make_scheduler(**(defaults | options))
        self.now_ns = 0
        self.events = {}
        self.errors = {}
        self.batch = self.scheduler.step()

    def submit(self, priority="standard", tenant=None, max_tokens=40, num_tokens=4, **parameters):
        prompt = np.random.default_rng(len(self.events)).integers(1, 50, num_tokens, np.int32)
        request = self.scheduler.submit(
            prompt, max_tokens, tenant=tenant, priority=priority, **parameters
        )
        self.events[request] = []
        return request

    def step(self, num_steps=1):
        for _ in range(num_steps):
            self.now_ns += STEP_NS
            self.scheduler.set_time_ns(self.now_ns)
            tokens = np.full(len(self.batch.sample_index), 7, np.int32)
            result = StepResult(self.batch.step_id, tokens, step_time_ns=STEP_NS)
            self.batch = self.scheduler.step(result)
            outputs = self.batch.outputs
            collect(outputs, self.events)
            for index, request in enumerate(outputs.request_ids.tolist()):
                if outputs.finish_reason(index) == "error":
                    self.errors[request] = outputs.error(index)
            self.scheduler.check_invariants()

    @property
    def running(self):
        """Query tokens of each request in the batch that was planned last."""
        lengths = np.diff(self.batch.query_start).tolist()
        return dict(zip(self.batch.request_ids.tolist(), lengths, strict=True))

    def until(self, is_reached, max_steps=500):
        for _ in range(max_steps):
            if is_reached():
                return
            self.step()
        raise AssertionError("it does not come to pass")

    def end(self, request):
        events = self.events[request]
        return events[-1][1] if events else None

    def drain(self):
        self.until(lambda: all(self.end(request) for request in self.events))
        self.step()
        assert_drained(self.scheduler)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_classes_start_in_their_order_whatever_the_order_of_arrival(policy):
    rig = Rig(max_num_seqs=1, policy=policy)
    classes = ("batch", "standard", "interactive")
    late, middle, first = (rig.submit(name, max_tokens=2) for name in classes)
    started = []
    while len(started) < 3:
        rig.step()
        started += rig.batch.outputs.started_request_ids.tolist()
    assert started == [first, middle, late]
    rig.drain()


def test_a_tenant_gives_its_requests_their_class_and_a_request_may_say_otherwise():
    rig = Rig(max_num_seqs=1, tenants={"jobs": {"priority": "batch"}})
    job = rig.submit(priority=None, tenant="jobs", max_tokens=2)
    plain = rig.submit(priority=None, tenant="people", max_tokens=2)
    urgent = rig.submit("interactive", tenant="jobs", max_tokens=2)
    started = []
    while len(started) < 3:
        rig.step()
        started += rig.batch.outputs.started_request_ids.tolist()
    assert started == [urgent, plain, job]
    rig.drain()


def test_batch_work_takes_what_is_left_and_yields_within_one_step():
    rig = Rig(max_num_seqs=4)
    batch = [rig.submit("batch") for _ in range(6)]
    rig.step(3)
    assert set(rig.running) == set(batch[:4]), "all rows are in use"
    urgent = rig.submit("interactive", max_tokens=3)
    rig.step()
    assert rig.running[urgent] == 4, "its prompt is in the very next batch"
    assert rig.scheduler.stats()["num_displacements"] == 1
    rig.until(lambda: rig.end(urgent))
    rig.step()
    assert len(rig.running) == 4, "batch work has the row again"
    rig.drain()
    assert [rig.end(request) for request in batch] == ["length"] * 6


def test_a_polite_tenant_runs_within_two_steps_beside_a_flood():
    rig = Rig(max_num_seqs=4)
    flood = [rig.submit(tenant="flood") for _ in range(20)]
    rig.step(5)
    assert set(rig.running) == set(flood[:4])
    polite = rig.submit(tenant="polite")
    rig.step(2)
    assert polite in rig.running
    assert rig.scheduler.stats()["num_displacements"] == 1
    rig.drain()


def test_without_fairness_a_flood_goes_first():
    rig = Rig(max_num_seqs=4, policy="fcfs")
    for _ in range(8):
        rig.submit(tenant="flood")
    rig.step(5)
    polite = rig.submit(tenant="polite")
    rig.step(10)
    assert polite not in rig.running
    rig.drain()


def test_the_earliest_deadline_is_first_within_a_tenant():
    rig = Rig(max_num_seqs=1)
    running = rig.submit(max_tokens=3)
    rig.step()
    plain = rig.submit(max_tokens=2)
    late = rig.submit(max_tokens=2, ttft_deadline_ms=90_000)
    early = rig.submit(max_tokens=2, deadline_ms=50_000.0)
    started = []
    rig.until(
        lambda: started.extend(rig.batch.outputs.started_request_ids.tolist()) or rig.end(running)
    )
    while len(started) < 4:
        rig.step()
        started += rig.batch.outputs.started_request_ids.tolist()
    assert [request for request in started if request != running] == [early, late, plain]
    rig.drain()


def test_a_waiter_past_its_deadline_ends_before_it_costs_prefill():
    rig = Rig(max_num_seqs=1)
    running = rig.submit(max_tokens=30)
    rig.step()
    waiting = rig.submit(ttft_deadline_ms=95, max_tokens=1)
    seen = set()
    rig.until(lambda: seen.update(rig.running) or rig.end(waiting))
    assert rig.events[waiting] == [(-1, "error")]
    assert rig.errors[waiting].startswith("the deadline passed: the request still waited after")
    assert "give a later deadline or a higher priority" in rig.errors[waiting]
    assert rig.now_ns == 11 * STEP_NS, "the first step after its deadline"
    assert waiting not in seen
    rig.drain()
    assert len(rig.events[running]) == 30
    assert rig.scheduler.stats()["num_expired_requests"] == 1


def test_a_running_request_ends_at_its_deadline_and_keeps_its_tokens():
    rig = Rig()
    request = rig.submit(deadline_ms=100, max_tokens=40)
    in_time = rig.submit(ttft_deadline_ms=100, max_tokens=40)
    rig.drain()
    assert rig.end(request) == "error"
    assert 5 < len(rig.events[request]) < 12
    assert "still ran" in rig.errors[request]
    assert len(rig.events[in_time]) == 40, "its first token was in time"


def test_deadlines_may_come_from_class_and_tenant():
    rig = Rig(
        classes={"batch": {"deadline_ms": 100}},
        tenants={"patient": {"deadline_ms": 100_000}},
    )
    short = rig.submit("batch")
    patient = rig.submit("batch", tenant="patient")
    own = rig.submit("batch", deadline_ms=200)
    rig.drain()
    assert (rig.end(short), rig.end(patient), rig.end(own)) == ("error", "length", "error")
    assert len(rig.events[short]) < len(rig.events[own]) < 40


def test_caps_on_running_sequences_hold_and_keep_nobody_else_waiting():
    rig = Rig(
        max_num_seqs=8,
        classes={"batch": {"max_num_seqs": 2}},
        tenants={"capped": {"max_num_seqs": 1}},
    )
    batch = [rig.submit("batch") for _ in range(4)]
    capped = [rig.submit(tenant="capped") for _ in range(3)]
    others = [rig.submit(tenant="other") for _ in range(3)]
    for _ in range(30):
        rig.step()
        assert len(rig.running.keys() & set(batch)) <= 2
        assert len(rig.running.keys() & set(capped)) <= 1
        assert rig.running.keys() >= set(others)
    rig.drain()


@pytest.mark.parametrize(
    "limits", [{"classes": {"standard": {"max_tokens": 5}}}, {"default_tenant": {"max_tokens": 5}}]
)
def test_a_cap_on_tokens_is_the_default_and_more_is_refused(limits):
    rig = Rig(**limits)
    request = rig.submit(max_tokens=None)
    rig.drain()
    assert len(rig.events[request]) == 5
    with pytest.raises(InvalidRequestError, match="max_tokens is 6") as caught:
        rig.scheduler.submit([1], max_tokens=6)
    assert caught.value.param == "max_tokens"


def test_an_aged_batch_request_starts_while_urgent_ones_keep_coming():
    rig = Rig(max_num_seqs=2, aging_s=0.5)
    for _ in range(4):
        rig.submit("interactive", max_tokens=4)
    rig.step()
    old = rig.submit("batch", max_tokens=4)

    def is_started():
        while sum(rig.end(request) is None for request in rig.events) < 6:
            rig.submit("interactive", max_tokens=4)
        return rig.events[old]

    rig.until(is_started)
    assert rig.now_ns > 500_000_000, "it has to be aged first"
    rig.drain()
    assert rig.end(old) == "length"


def test_a_tenant_over_its_rate_is_told_when_to_come_back():
    rig = Rig(tenants={"slow": {"requests_per_min": 60}})
    for _ in range(60):
        rig.submit(tenant="slow", max_tokens=1)
    with pytest.raises(OverloadedError, match="requests_per_min of 60") as caught:
        rig.submit(tenant="slow", max_tokens=1)
    assert caught.value.reason == "rate"
    assert 0.001 <= caught.value.retry_after_s <= 1.0
    rig.submit(tenant="other", max_tokens=1)
    rig.scheduler.set_time_ns(int(caught.value.retry_after_s * 1e9) + 1)
    rig.submit(tenant="slow", max_tokens=1)


def test_a_deadline_that_cannot_be_met_is_refused_on_arrival():
    rig = Rig(max_num_seqs=1)
    for _ in range(3):
        rig.submit(max_tokens=30)
    rig.step(60)
    for _ in range(5):
        rig.submit(max_tokens=30)
    rig.step()
    # About 6 x 30 steps of 10 ms are before it.
    with pytest.raises(OverloadedError, match="first token is predicted after") as caught:
        rig.submit(ttft_deadline_ms=1000)
    assert caught.value.reason == "deadline"
    assert 0.001 <= caught.value.retry_after_s < 2.0
    accepted = rig.submit(ttft_deadline_ms=3000)
    rig.drain()
    assert rig.end(accepted) == "length", "it was not refused, and started in time"
    assert rig.scheduler.stats()["num_expired_requests"] == 0


def test_a_deadline_that_is_too_short_whatever_waits_names_no_time_to_come_back():
    rig = Rig()
    rig.submit(max_tokens=30)
    rig.step(30)
    for _ in range(20):
        rig.submit(max_tokens=30)
        rig.step(32)
    with pytest.raises(OverloadedError, match=r"last token .* or a lower max_tokens$") as caught:
        rig.submit(deadline_ms=50, max_tokens=30)
    assert (caught.value.reason, caught.value.retry_after_s) == ("deadline", None)
    assert "try again" not in str(caught.value)
    rig.submit(deadline_ms=50, max_tokens=2)
    rig.drain()


def test_a_prompt_that_no_queue_holds_is_no_matter_of_load():
    rig = Rig(max_queued_tokens=20)
    with pytest.raises(InvalidRequestError, match=r"20 tokens long.*max_queued_tokens") as caught:
        rig.submit(num_tokens=20)
    assert caught.value.param == "prompt_token_ids"
    rig.submit("interactive", num_tokens=20)
    rig.drain()


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"priority": "urgent"}, "priority"),
        ({"ttft_deadline_ms": 0}, "ttft_deadline_ms"),
        ({"deadline_ms": float("nan")}, "deadline_ms"),
        ({"deadline_ms": 10**400}, "deadline_ms"),
        ({"target_itl_ms": 1e10}, "target_itl_ms"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(arguments, param):
    with pytest.raises(InvalidRequestError, match=param) as caught:
        make_scheduler().submit([1], **arguments)
    assert caught.value.param == param


def test_a_parameter_of_another_type_is_a_type_error_that_names_it():
    for name, value in [("priority", 3), ("deadline_ms", "1"), ("target_itl_ms", True)]:
        with pytest.raises(TypeError, match=name):
            make_scheduler().submit([1], **{name: value})


def test_the_time_of_a_step_can_be_told():
    scheduler = make_scheduler(clock="manual")
    scheduler.submit([1, 2], max_tokens=2)
    batch = scheduler.step()
    result = StepResult(batch.step_id, [5], step_time_ns=123_456)
    assert result.step_time_ns == 123_456
    batch = scheduler.step(result)
    assert scheduler.stats()["last_step_ns"] == 123_456
    scheduler.set_time_ns(7_000)
    run(scheduler, scheduler.step(StepResult(batch.step_id, [5])))
    assert scheduler.stats()["last_step_ns"] == 7_000, "the clock says it otherwise"
    with pytest.raises(InvalidRequestError, match="step_time_ns is -1"):
        StepResult(1, [5], step_time_ns=-1)
    with pytest.raises(TypeError, match="step_time_ns must be an integer"):
        StepResult(1, [5], step_time_ns=1.5)


def test_a_step_that_waits_wakes_for_a_deadline():
    waited_s = []
    for _ in range(5):
        scheduler = make_scheduler(policy="fair")
        scheduler.pause()
        scheduler.step()
        request = scheduler.submit([1], ttft_deadline_ms=20)
        started = time.monotonic()
        batch = scheduler.step(block=True)
        waited_s.append(time.monotonic() - started)
        assert batch.outputs.request_ids.tolist() == [request]
        assert batch.outputs.error(0).startswith("the deadline passed")
    assert 0.015 < min(waited_s) < 0.09, "neither early nor at the next look at signals"
