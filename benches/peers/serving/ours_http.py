"""cbrs: `cbrs serve` over HTTP, for peers that are measured so."""

from __future__ import annotations

import sys

import cbrs

from .harness import Settings
from .http import HttpPeer, free_port


class Peer(HttpPeer):
    version = cbrs.__version__
    measured = "cbrs serve over HTTP, on the same cores as its clients"

    def __init__(self, settings: Settings) -> None:
        port = free_port()
        command = [sys.executable, "-m", "cbrs", "serve", settings.model, "--port", str(port)]
        command += ["--dtype", settings.dtype, "--num-threads", str(settings.num_threads)]
        command += ["--max-num-seqs", str(settings.max_num_seqs), "--served-model-name", "model"]
        command += ["--max-model-len", str(settings.max_model_len)]
        if settings.quantization is not None:
            command += ["--quantization", settings.quantization]
        self.start(command, port, "model")
