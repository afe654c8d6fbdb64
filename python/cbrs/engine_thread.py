"""The thread that runs an engine for `AsyncLLM`, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from cbrs.errors import CbrsError, EngineClosedError, EngineDeadError
from cbrs.loop_ports import LoopPorts

if TYPE_CHECKING:
    from cbrs.engine import Engine

logger = logging.getLogger("cbrs")

# Exit waits so long for the step that runs; the thread is a daemon and ends with the process.
_EXIT_WAIT_S = 1.0
# Threads that were told to end and have not freed their engines yet.
_stopping: set[threading.Thread] = set()


@atexit.register
def _wait_for_stopping() -> None:
    """Lets threads that free a model finish: native code that wants the GIL after exit aborts."""
    for thread in list(_stopping):
        thread.join(_EXIT_WAIT_S)


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
        self._death: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=([engine],), name="cbrs-engine", daemon=True
        )
        self._thread.start()

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
        death = self._death
        if death is not None:
            error = EngineDeadError(f"the engine has died: {death}")
            error.__cause__ = death
            return error
        if self._is_stopping:
            return EngineClosedError("this AsyncLLM is closed; create a new one")
        if self.is_foreign:
            return EngineClosedError(
                f"this AsyncLLM belongs to process {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}; create a new one here"
            )
        return None

    def stop(self) -> None:
        """Ends all requests and then the thread; returns at once, but at the end of the program.

        Any thread, any number of times; nothing in a forked child. It takes no lock: the garbage
        collector may call it anywhere.
        """
        if self.is_foreign:
            return
        self._is_stopping = True
        if not self.ended.done():
            _stopping.add(self._thread)
        self.scheduler.close()
        if not threading.main_thread().is_alive():
            # The interpreter is about to be torn down: nothing may be left that wants the GIL.
            self._thread.join(_EXIT_WAIT_S)

    def _run(self, owned: list[Engine]) -> None:
        try:
            while True:
                owned[0].step(block=True)
        except EngineClosedError:
            pass
        except BaseException as error:
            # Without its traceback, which would keep this frame and so the engine alive.
            logger.critical("the engine has died: %s", error, exc_info=error)
            self._death = error.with_traceback(None)
        finally:
            self._end(owned)

    def _end(self, owned: list[Engine]) -> None:
        try:
            owned[0].close()
        except BaseException as error:
            # Broken native parts; whoever waits is told in any case.
            logger.error("the engine did not close: %s", error, exc_info=error)
        # Freed before anybody hears of the end, who may then end the program.
        owned.clear()
        _stopping.discard(self._thread)
        self._is_stopping = True
        self.ports.end()
        self.ended.set_result(None)
