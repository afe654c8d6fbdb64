"""How outputs reach the event loops: one channel per engine and loop.

The text thread makes a loop's channel readable once per step. The loop then takes everything, puts
it into the inboxes of the requests and wakes their readers.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from cbrs._core import OutputChannel
from cbrs.inbox import Inbox, RequestIds

if TYPE_CHECKING:
    from collections.abc import Callable


class LoopPort:
    """Where the outputs of one engine enter one event loop.

    Only the loop itself keeps it: a loop that is closed drops it, with its channel, and the channel
    cancels the requests that would have sent more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ids: RequestIds) -> None:
        """Makes the channel and lets `loop`, which runs in this thread, read it."""
        self.channel = OutputChannel()
        self._ids = ids
        self._inboxes: dict[int, Inbox] = {}
        self._pid = os.getpid()
        self._loop = weakref.ref(loop)
        loop.add_reader(self.channel.fileno(), self._on_readable)

    def add(self, inbox: Inbox) -> None:
        """Delivers to `inbox` from now on, until its last update."""
        self._inboxes[inbox.index] = inbox

    def remove(self, inbox: Inbox) -> None:
        """Drops what comes for `inbox`; any thread."""
        self._inboxes.pop(inbox.index, None)

    def end(self) -> None:
        """Delivers what is left, ends all inboxes and leaves the loop; called by the loop."""
        if self.channel.is_closed:
            return
        self._on_readable()
        loop = self._loop()
        if loop is not None:
            loop.remove_reader(self.channel.fileno())
        self.channel.close()
        self._end_all()

    def _on_readable(self) -> None:
        for update in self.channel.take():
            inbox = self._inboxes.get(update.index)
            if inbox is None:
                continue
            inbox.push(update)
            if update.is_last:
                del self._inboxes[update.index]
                self._ids.release(inbox)

    def _end_all(self) -> None:
        while self._inboxes:
            _, inbox = self._inboxes.popitem()
            self._ids.release(inbox)
            inbox.end()

    def __del__(self) -> None:
        """Frees the ids of requests that ended with the loop."""
        # In a forked child the lock of the ids may be held for ever.
        if os.getpid() != self._pid:
            return
        while self._inboxes:
            _, inbox = self._inboxes.popitem()
            self._ids.release(inbox)


class LoopPorts:
    """The ports of one engine, by event loop; keeps neither ports nor loops alive."""

    def __init__(self) -> None:
        """Starts without any."""
        self.ids = RequestIds()
        self._ports: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopPort]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self._is_over = False

    def port(self, check_usable: Callable[[], None]) -> LoopPort:
        """Returns the port of the loop that runs in this thread.

        Raises what `check_usable` raises once the engine has ended.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_over:
                check_usable()
            known = self._ports.get(loop)
            port = None if known is None else known()
            if port is None:
                port = LoopPort(loop, self.ids)
                self._ports[loop] = weakref.ref(port)
            return port

    def end(self) -> None:
        """Ends all ports, each in its loop's thread, when nothing will come any more."""
        with self._lock:
            self._is_over = True
            ports = [(loop, known()) for loop, known in self._ports.items()]
        for loop, port in ports:
            # A closed loop has no readers left.
            with suppress(RuntimeError):
                if port is not None:
                    loop.call_soon_threadsafe(port.end)
