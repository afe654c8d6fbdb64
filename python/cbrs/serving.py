"""An OpenAI-compatible HTTP server in front of an `LLM` or `AsyncLLM` of this process.

Connections, templates, tokenizing and streams are the work of Rust threads
(`cbrs._core.HttpServer`); Python runs the model and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import weakref
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from cbrs._core import HttpServer
from cbrs.errors import InvalidRequestError

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping, Sequence

    from cbrs._core import ApiKey, LogWriter, Tokenizer
    from cbrs.base import BaseLLM
    from cbrs.config import EffectiveConfig

# Between two looks at signals while a server is drained.
_DRAIN_INTERVAL_S = 0.1
# Streams that are cut get so long to tell their readers.
_CUT_WAIT_S = 1.0


class ServerLimits(TypedDict, total=False):
    """Limits of a server that are to differ from the default, which `docs/serving.md` lists."""

    max_connections: int
    max_connections_per_address: int | None
    idle_timeout_s: float
    head_timeout_s: float
    max_head_bytes: int
    max_header_fields: int
    max_request_line_bytes: int
    body_timeout_s: float
    max_body_bytes: int | None
    max_body_depth: int
    write_timeout_s: float
    max_choices: int
    max_stop_strings: int
    max_completion_logprobs: int


class RunningServer:
    """A server that answers until it is closed; it keeps its `LLM` alive.

    `with` closes it at the end of the block, and so does dropping it.
    """

    def __init__(
        self,
        llm: BaseLLM,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        served_model_names: Sequence[str] = (),
        worker_threads: int | None = None,
        allow_public: bool = False,
        api_keys: Sequence[ApiKey] | None = None,
        open_metrics: bool = False,
        allowed_hosts: Sequence[str] = (),
        limits: ServerLimits | None = None,
        access_log: Literal["text", "json"] | None = None,
        log_writer: LogWriter | None = None,
        settings: Mapping[str, Any] | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        """Listens from now on; `served_model_names` is the name of the model unless given.

        With `api_keys` a request needs one of them, besides for `/health` and `/ready`, and with
        `open_metrics` for `/metrics` and `/stats`. `allowed_hosts` adds to the names by which a
        server on loopback may be called. With `access_log` a line for each request goes to the
        process's standard error output, by `log_writer` if there is one. `settings` is what
        `/version` tells of the server: no secrets.

        Raises:
            ValueError: keys that are unusable, an address that is, or one that is public without
                keys and without `allow_public`; a limit that is unknown or out of its range.
            OSError: the address cannot be had.
            EngineClosedError: `llm` is closed.
        """
        engine = llm.engine
        self._llm = llm
        names = list(served_model_names) or [served_name(engine.config.model)]
        own = {"host": host, "port": port, "served_model_name": names}
        self._settings = own if settings is None else dict(settings)
        self._names = names
        self._server = HttpServer(
            engine.processor,
            _tokenizer(llm),
            host=host,
            port=port,
            served_model_names=names,
            worker_threads=worker_threads,
            allow_public=allow_public,
            api_keys=None if api_keys is None else list(api_keys),
            open_metrics=open_metrics,
            allowed_hosts=list(allowed_hosts),
            settings=_settings_json(engine.config, self._settings),
            limits_json=json.dumps(limits or {}),
            access_log=access_log,
            log_writer=log_writer,
        )
        self._end = weakref.finalize(self, _end, self._server, on_close)

    @property
    def host(self) -> str:
        """The address it listens on."""
        return self._server.host

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """Its address as a URL without a path; OpenAI's clients want `/v1` after it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def num_active(self) -> int:
        """Requests and responses under way, until their last byte is with the system."""
        return self._server.num_active

    @property
    def served_model_names(self) -> list[str]:
        """What clients may call the model; answers carry the first."""
        return list(self._names)

    @property
    def worker_threads(self) -> int:
        """Threads that serve connections."""
        return self._server.worker_threads

    @property
    def limits(self) -> ServerLimits:
        """The limits in effect, defaults included."""
        return cast("ServerLimits", json.loads(self._server.limits_json))

    def set_api_keys(self, api_keys: Sequence[ApiKey]) -> None:
        """Puts other keys in force for requests that come from now on; those under way go on.

        Raises:
            ValueError: keys that are unusable; the old ones stay.
        """
        self._server.set_api_keys(list(api_keys))

    def tell_settings(self, settings: Mapping[str, Any] | None = None) -> None:
        """Has `/version` tell the engine's settings as they are now, and these of the server."""
        if settings is not None:
            self._settings = dict(settings)
        self._server.set_settings(_settings_json(self._llm.config(), self._settings))

    def begin_drain(self) -> None:
        """Refuses new requests from now on; `/ready` says so. What is under way goes on."""
        self._server.drain()

    def drain(self, timeout_s: float, is_cut: Callable[[], bool] = lambda: False) -> bool:
        """Refuses new requests and waits for those under way; returns whether all have finished.

        A request has finished when the last byte of its answer is with the system, or its client
        has gone. It waits `timeout_s` seconds at most, and no longer once `is_cut()`. What is left
        then ends with an error.
        """
        self._server.drain()
        deadline = time.monotonic() + timeout_s
        while not self._server.wait_idle(_DRAIN_INTERVAL_S):
            if is_cut() or time.monotonic() >= deadline:
                self._server.cancel_all()
                self._server.wait_idle(_CUT_WAIT_S)
                return False
        return True

    def close(self) -> None:
        """Ends the server; requests under way are cancelled. Closing twice does no harm."""
        self._end()

    def __enter__(self) -> RunningServer:
        """Returns itself; the end of the block calls `close`."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Calls `close`."""
        self.close()


def _tokenizer(llm: BaseLLM) -> Tokenizer | None:
    try:
        return llm.tokenizer
    except InvalidRequestError:
        return None  # the model has none: prompts are token ids


def _settings_json(config: EffectiveConfig, own: Mapping[str, Any]) -> tuple[str, str, str]:
    """The engine's settings, what a tenant may see of them, and the server's."""
    engine = asdict(config)
    rules = {name: value for name, value in config.policy_settings.items() if name != "tenants"}
    for_tenants = {**engine, "tenants": None, "policy_settings": rules}
    as_json = [json.dumps(value, default=str) for value in (engine, for_tenants, own)]
    return as_json[0], as_json[1], as_json[2]


def _end(server: HttpServer, on_close: Callable[[], object] | None) -> None:
    server.close()
    if on_close is not None:
        on_close()


class Serving:
    """What `serve` returns: `async with` starts the server and ends it."""

    def __init__(self, start: Callable[[], RunningServer], drain_timeout_s: float) -> None:
        """Starts nothing yet."""
        self._start = start
        self._drain_timeout_s = drain_timeout_s
        self._server: RunningServer | None = None

    async def __aenter__(self) -> RunningServer:
        """Starts the server."""
        self._server = self._start()
        return self._server

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Lets requests under way finish for `drain_timeout_s` seconds and ends the server."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.drain, self._drain_timeout_s)
            await asyncio.to_thread(server.close)


def serve(
    llm: BaseLLM,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    drain_timeout_s: float = 0.0,
    **options: Any,
) -> Serving:
    """Serves `llm` over HTTP: `async with cbrs.serve(llm, port=0) as server: server.url`.

    Port 0 is one that is free. At the end of the block requests under way may finish for
    `drain_timeout_s` seconds. `options` are further ones of `RunningServer`: `api_keys`, `limits`,
    `access_log` and so on.

    Raises, when the block is entered, what `RunningServer` raises.
    """

    def start() -> RunningServer:
        return llm.serve_in_background(
            host=host, port=port, served_model_name=served_model_name, **options
        )

    return Serving(start, drain_timeout_s)


def served_name(model: str) -> str:
    """Returns what a model is called by clients: a path by its last part."""
    looks_like_path = model.startswith((".", "~", os.sep)) or os.path.exists(model)
    return os.path.basename(os.path.normpath(model)) if looks_like_path else model
