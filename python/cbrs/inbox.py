"""What requests have sent and their readers have not taken yet, and which of them has which id."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING

from cbrs.errors import InvalidRequestError
from cbrs.interrupts import append_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbrs._core import Scheduler, Update


class Inbox:
    """What one request has sent and its reader has not taken yet.

    Only the thread of its event loop touches it, but for `cancel`.
    """

    def __init__(self, request_id: str, index: int, wakes_at_end_only: bool) -> None:
        """`index` is what comes back with each update."""
        self.absorb: Callable[[Update], object] | None = None
        """If set, it is called with each update, of which only the last is kept then."""
        self.request_id = request_id
        self.index = index
        self.is_cancelled = False
        self.is_over = False
        self._core_ids: list[int] = []
        self._steps: deque[list[Update]] = deque()
        self._choices_of_last_step: set[int] = set()
        self._wakes_at_end_only = wakes_at_end_only
        self._waiter: asyncio.Future[None] | None = None

    def push(self, update: Update) -> None:
        """Takes an update, with the others of its step, and wakes the reader."""
        if self.absorb is None:
            self._keep(update)
        else:
            self.absorb(update)
            self._steps.clear()
            self._steps.append([update])
        self.is_over |= update.is_last
        if self.is_over or not self._wakes_at_end_only:
            self.wake()

    def _keep(self, update: Update) -> None:
        steps, choices = self._steps, self._choices_of_last_step
        # A step has one update for each choice; an end that no step brought has an earlier time.
        if steps and steps[-1][-1].time_s == update.time_s and update.choice not in choices:
            steps[-1].append(update)
        else:
            steps.append([update])
            choices.clear()
        choices.add(update.choice)

    def end(self) -> None:
        """Says that nothing will come any more, even if the last update has not."""
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Lets `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next call of `wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_readable(self) -> bool:
        """Whether a reader would find something, or will never again."""
        return self.is_over or (bool(self._steps) and not self._wakes_at_end_only)

    def take_step(self) -> list[Update]:
        """Takes the updates of one step; [] if there are none."""
        return self._steps.popleft() if self._steps else []

    def take_all(self) -> list[Update]:
        """Takes all updates in order."""
        updates = [update for step in self._steps for update in step]
        self._steps.clear()
        return updates

    def submit(self, function: Callable[[], int], scheduler: Scheduler) -> None:
        """Calls `function`, which submits the request, and keeps the core's id of it."""
        append_results(self._core_ids, [function])
        if self.is_cancelled:
            self.cancel(scheduler)

    def cancel(self, scheduler: Scheduler) -> None:
        """Asks for the end of the request; any thread, any number of times."""
        self.is_cancelled = True
        # `submit` keeps the id and then looks at the flag: one of the two cancels.
        for core_id in self._core_ids:
            scheduler.cancel(core_id)


class RequestIds:
    """Which request has which id, from its submission to its last update or its cancel.

    The garbage collector may call `release` anywhere, so the lock can be taken twice.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.RLock()

    def claim(self, inbox: Inbox) -> None:
        """Gives the inbox its id.

        Raises:
            InvalidRequestError: another live request has it.
        """
        with self._lock:
            if self._inboxes.setdefault(inbox.request_id, inbox) is inbox:
                return
        error = InvalidRequestError(
            f"request_id {inbox.request_id!r} belongs to a request that is not finished; wait for "
            "its end, cancel it, or give another id"
        )
        error.param = "request_id"
        raise error

    def release(self, inbox: Inbox) -> None:
        """Takes the id back, if the inbox still has it."""
        with self._lock:
            if self._inboxes.get(inbox.request_id) is inbox:
                del self._inboxes[inbox.request_id]

    def pop(self, request_id: str) -> Inbox | None:
        """Takes the id back from the live request that has it, and returns its inbox."""
        with self._lock:
            return self._inboxes.pop(request_id, None)

    def live(self) -> list[Inbox]:
        """Returns the inboxes of all requests that have an id."""
        with self._lock:
            return list(self._inboxes.values())

    def __len__(self) -> int:
        """Returns the number of ids in use."""
        return len(self._inboxes)
