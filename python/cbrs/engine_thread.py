"""The thread that runs an engine for `AsyncLLM`, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

from cbrs.errors import (
    CbrsError,
    EngineClosedError,
    EngineDeadError,
    closed_error,
    forked_error,
)
from cbrs.loop_ports import LoopPorts

if TYPE_CHECKING:
    from cbrs.engine import Engine

logger = logging.getLogger("cbrs")

# Exit waits so long for the steps that run; the threads are daemons and end with the process.
_EXIT_WAIT_S = 1.0


class EngineThread:
    """Steps an engine until it is closed or broken; sleeps in native code while nothing can run.

    Only the running thread keeps the engine alive, and it keeps nothing else: its users may be
    dropped.
    """

    def __init__(self, engine: Engine) -> None:
        """Starts stepping `engine`, which nothing else may step from now on."""
        self.scheduler = engine.scheduler
        self.ports = LoopPorts()
        self.ended: Future[None] = Future()
        self._pid = os.getpid()
        self._is_stopping = False
        self._fate = engine.fate
        self._death: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=([engine],), name="cbrs-engine", daemon=True
        )
        self._thread.start()
        _threads.add(self)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child, which has no such thread."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises what `error` returns."""
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> CbrsError | None:
        """Returns why there are no results any more; None while there are."""
        death = self._death or self._fate.error
        if death is not None:
            error = EngineDeadError(f"the engine has died: {death}")
            error.__cause__ = death
            return error
        if self._is_stopping:
            return closed_error("AsyncLLM")
        if self.is_foreign:
            return forked_error("AsyncLLM", self._pid)
        return None

    def stop(self) -> None:
        """Ends all requests and then the thread; returns at once.

        Any thread, any number of times; nothing in a forked child. It takes no lock: the garbage
        collector may call it anywhere.
        """
        if not self.is_foreign:
            self._is_stopping = True
            self.scheduler.close()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the thread; nothing in a forked child."""
        if not self.is_foreign:
            self._thread.join(timeout_s)

    def _run(self, engines: list[Engine]) -> None:
        engine = engines.pop()
        try:
            while True:
                engine.step(block=True)
        except EngineClosedError:
            pass
        except BaseException as error:
            # Without its traceback, which would keep this frame and so the engine alive.
            logger.critical("the engine has died: %s", error, exc_info=error)
            self._death = error.with_traceback(None)
        _close(engine)
        self._is_stopping = True
        self.ports.end()
        # Nobody is told before the model is freed: that takes a while, and needs the interpreter.
        del engine
        self.ended.set_result(None)


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except BaseException as error:
        # Broken native parts; whoever waits is told in any case.
        logger.error("the engine did not close: %s", error, exc_info=error)


# Every thread that may be running, however its users went.
_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops what still runs: native code must not want the interpreter while it is torn down."""
    threads = list(_threads)
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + _EXIT_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
