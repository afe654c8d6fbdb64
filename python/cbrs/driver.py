"""Runs one engine in whichever thread waits for results.

There is no engine thread. Of the threads inside `LLM.generate` one drives: it steps the engine and
hands out finished requests. The others sleep; once the driver has its own results, another takes
over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from cbrs.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    is_failure,
    placed,
)
from cbrs.interrupts import append_results

if TYPE_CHECKING:
    from cbrs._core import FinishedRequest, Scheduler
    from cbrs.engine import Engine

# While nothing can run, the text thread is about to hand over a result; it wakes the wait at once.
_IDLE_WAIT_S = 0.005
# While a pause keeps what waits from starting, only a result or `resume` can change anything.
_PAUSED_WAIT_S = 0.02
# A thread that sleeps with requests left to submit looks for queue room this often.
_FEED_INTERVAL_S = 0.01
# A thread that sleeps reports its progress this often.
_REPORT_INTERVAL_S = 0.25
# `index` of a request is the number of its call above these bits and its position below.
_INDEX_BITS = 32


class Refusal(NamedTuple):
    """Why waiting does not help a request, and when that was found."""

    message: str
    time_s: float
    """On the scheduler's clock."""


class Call:
    """The requests of one `generate` call, and what has come of them.

    Requests are submitted in order, so that `request_ids[i]` belongs to prompt `i` (0, which is no
    id, if it is `refused`).
    """

    def __init__(self, submissions: Sequence[Callable[..., int]], scheduler: Scheduler) -> None:
        """`submissions` submit one prompt each; they take the keyword `index`."""
        self._submissions = submissions
        self._scheduler = scheduler
        self._num_wanted = len(submissions)
        # Nothing is submitted before the one or unless fewer than the other wait.
        self._retry_at = 0.0
        self._retry_below = 0
        self.first_index = 0
        self.request_ids: list[int] = []
        self.finished: dict[int, FinishedRequest] = {}
        self.refused: dict[int, Refusal] = {}

    @property
    def is_fed(self) -> bool:
        """Whether nothing is left to submit."""
        return len(self.request_ids) >= self._num_wanted

    @property
    def is_done(self) -> bool:
        """Whether everything submitted has ended and nothing is left to submit."""
        return self.is_fed and self.num_ended >= len(self.request_ids)

    @property
    def num_ended(self) -> int:
        """Requests of which a result is there."""
        return len(self.finished) + len(self.refused)

    def feed(self) -> None:
        """Submits what the engine takes now.

        After a refusal for lack of room it tries again when the engine said, or when half of what
        waited then has started: so no room stays unused, and no refusal is provoked in each step. A
        request whose deadline cannot be met is not tried again.

        Raises:
            InvalidRequestError: names the position of the prompt; so does a TypeError.
        """
        while len(self.request_ids) < self._num_wanted and self._may_retry():
            try:
                self._submit_rest()
            except OverloadedError as error:
                if error.reason == "deadline" or error.retry_after_s is None:
                    time_s = self._scheduler.time_ns() / 1e9
                    self.refused[len(self.request_ids)] = Refusal(str(error), time_s)
                    self.request_ids.append(0)
                else:
                    self._retry_at = time.monotonic() + error.retry_after_s
                    is_rate = error.reason == "rate"
                    self._retry_below = 0 if is_rate else (self._num_waiting() + 1) // 2

    def _may_retry(self) -> bool:
        is_due = time.monotonic() >= self._retry_at
        return is_due or self._num_waiting() < self._retry_below

    def _num_waiting(self) -> int:
        return int(self._scheduler.stats()["num_waiting"])

    def _submit_rest(self) -> None:
        start = len(self.request_ids)
        rest = (
            partial(self._submissions[i], index=self.first_index + i)
            for i in range(start, self._num_wanted)
        )
        try:
            append_results(self.request_ids, rest)
        except (InvalidRequestError, TypeError) as error:
            raise placed(error, f"prompts[{len(self.request_ids)}]") from None

    def take(self, finished: FinishedRequest) -> None:
        """Keeps a result; taking it twice does no harm."""
        self.finished[finished.index - self.first_index] = finished

    def stop_feeding(self) -> None:
        """Leaves the rest unsubmitted."""
        self._num_wanted = 0


class Drain(Call):
    """A call without requests, which is done once nothing that has started is left running."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Waits until `scheduler`, which is paused, runs nothing."""
        super().__init__([], scheduler)

    @property
    def is_fed(self) -> bool:
        """False, as for a call that has to look often whether it can go on."""
        return False

    @property
    def is_done(self) -> bool:
        """Whether nothing runs or the pause is over.

        What has started and lost its row gets one as soon as nothing else runs.
        """
        return self._scheduler.stats()["num_running"] == 0 or not self._scheduler.is_paused()


class Serve(Call):
    """A call without requests that keeps the engine running for others, until it is stopped."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Runs what others submit to `scheduler`."""
        super().__init__([], scheduler)
        self._is_stopped = False

    @property
    def is_done(self) -> bool:
        """Whether it was stopped."""
        return self._is_stopped

    def stop(self) -> None:
        """Ends the call."""
        self._is_stopped = True


class Driver:
    """Takes turns among calling threads to run one engine."""

    def __init__(self, engine: Engine) -> None:
        """Drives `engine`, which nothing else may step meanwhile."""
        self._engine = engine
        self._changed = threading.Condition()
        self._calls: dict[int, Call] = {}
        self._num_calls = 0
        self._driver: int | None = None
        self._inbox: list[list[FinishedRequest]] = []
        self._closed = False
        self._death: BaseException | None = None

    def run(self, call: Call, on_progress: Callable[[int], object] | None = None) -> None:
        """Submits the requests of `call` and returns when all have ended.

        On any exception (a refused prompt, a Ctrl-C) the call's requests are cancelled and waited
        for before it goes on, so that nothing of it stays in the engine.
        """
        key = self._register(call)
        try:
            self._until_done(call, on_progress)
        except BaseException:
            call.stop_feeding()
            for request_id in call.request_ids:
                self._engine.scheduler.cancel(request_id)
            if not self._closed and self._death is None and self._engine.fate.error is None:
                self._until_done(call, None)
            raise
        finally:
            self._leave()
            self._calls.pop(key, None)

    def drain(self, *, cancel: bool) -> None:
        """Returns once nothing that has started is left running; the scheduler must be paused.

        With `cancel` all requests of all calls are cancelled first.
        """
        if cancel:
            for call in list(self._calls.values()):
                for request_id in list(call.request_ids):
                    self._engine.scheduler.cancel(request_id)
        drain = Drain(self._engine.scheduler)
        key = self._register(drain)
        try:
            self._until_done(drain, None)
        finally:
            self._leave()
            self._calls.pop(key, None)

    def close(self) -> None:
        """Closes the engine once the thread that drives it has left the loop."""
        me = threading.get_ident()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            # A signal handler or hook of the driving thread must not wait for itself.
            self._changed.wait_for(lambda: self._driver in (None, me))
        self._engine.close()

    def _register(self, call: Call) -> int:
        with self._changed:
            self._num_calls += 1
            key = self._num_calls
            call.first_index = key << _INDEX_BITS
            self._calls[key] = call
        return key

    def _until_done(self, call: Call, on_progress: Callable[[int], object] | None) -> None:
        while not call.is_done:
            self._check_usable()
            call.feed()
            if self._take_turn(call):
                try:
                    self._drive(call, on_progress)
                finally:
                    self._leave()
            if on_progress is not None:
                on_progress(call.num_ended)

    def _check_usable(self) -> None:
        death = self._death or self._engine.fate.error
        if death is not None:
            raise EngineDeadError(f"the engine has died: {death}") from death
        if self._closed:
            raise EngineClosedError("the engine was closed; create a new one")

    def _take_turn(self, call: Call) -> bool:
        """Sleeps until there is something to do for `call`; returns whether this thread drives."""
        me = threading.get_ident()
        with self._changed:
            if self._driver not in (None, me):
                self._changed.wait(_REPORT_INTERVAL_S if call.is_fed else _FEED_INTERVAL_S)
            if self._driver not in (None, me) or call.is_done or self._closed:
                return False
            self._driver = me
            return True

    def _leave(self) -> None:
        with self._changed:
            if self._driver == threading.get_ident():
                self._driver = None
                self._changed.notify_all()

    def _drive(self, call: Call, on_progress: Callable[[int], object] | None) -> None:
        while not call.is_done and not self._closed:
            if not call.is_fed:
                call.feed()
            self._step()
            if on_progress is not None:
                on_progress(call.num_ended)

    def _step(self) -> None:
        try:
            batch = self._engine.step()
        except BaseException as error:
            # A failed model run stays inside `step`: what arrives here is the loop itself.
            if is_failure(error):
                self._death = error
                self._check_usable()
            raise
        processor = self._engine.processor
        append_results(self._inbox, [processor.take_finished])
        if batch.num_seqs == 0 and not self._inbox[-1]:
            wait_s = _PAUSED_WAIT_S if self._engine.scheduler.is_paused() else _IDLE_WAIT_S
            append_results(self._inbox, [partial(processor.wait_finished, wait_s)])
        self._deliver()

    def _deliver(self) -> None:
        """Hands out what is in the inbox and wakes the threads whose calls are done."""
        is_any_done = False
        while self._inbox:
            for finished in self._inbox[0]:
                call = self._calls.get(finished.index >> _INDEX_BITS)
                if call is not None:
                    call.take(finished)
                    is_any_done |= call.is_done
            del self._inbox[0]
        if is_any_done:
            with self._changed:
                self._changed.notify_all()
