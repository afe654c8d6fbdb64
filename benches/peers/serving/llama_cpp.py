"""llama.cpp: `llama-server` over HTTP."""

from __future__ import annotations

from .harness import MissingError, Settings
from .http import HttpPeer, free_port, version_of


class Peer(HttpPeer):
    measured = (
        "llama-server over HTTP; as many slots as clients, cache of prompts off, everything else "
        "as by default"
    )

    def __init__(self, settings: Settings) -> None:
        if settings.binary is None:
            raise MissingError("no llama-server: give its path with --llama-server")
        self.version = version_of(settings.binary, "--version").removeprefix("version:").strip()
        slots, threads, port = settings.max_num_seqs, str(settings.num_threads), free_port()
        command = [settings.binary, "-m", settings.model, "--port", str(port)]
        command += ["-t", threads, "-tb", threads, "-np", str(slots), "--cache-ram", "0"]
        command += ["-c", str(slots * settings.max_model_len)]
        self.start(command, port, "model")
