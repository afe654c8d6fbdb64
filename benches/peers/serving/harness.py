"""The load that every engine gets, and the program that runs it in a peer's interpreter.

    python -m peers.serving openvino '{"model": "model-f16.gguf", "num_threads": 2, ...}'

Needs nothing but the standard library and the peer. Prints JSON lines: first that the engine is
ready (or `absent`, with the reason); then it reads a load as a line and answers with its figures,
until the end of its input. What the peer itself prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

FIRST_ID = 256  # ids below it may be special tokens
Figures = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What an engine is made for; `dtype` is `bfloat16` or `float32`."""

    model: str
    dtype: str
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    binary: str | None = None
    """Program of a peer that is one."""
    quantization: str | None = None
    """Of the weights, for cbrs; peers find it in their files."""
    token_budget: int | None = None
    """Most tokens of a step, for cbrs; None as it chooses. Peers: as their drivers say."""


@dataclass(frozen=True)
class Load:
    """A closed loop: so many clients, each sends its next request when its last has ended."""

    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Random ids, different for each request and each seed."""
        source = random.Random(self.seed)
        return [
            [source.randrange(FIRST_ID, self.vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_requests)
        ]


@dataclass
class Seen:
    """When a request was sent and when its tokens came, in seconds of one clock."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens of each output that had any."""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    def gaps_s(self) -> Iterator[float]:
        """From each token to the next; 0 between tokens that came together."""
        last_s = None
        for time_s, count in self.arrivals:
            if last_s is not None:
                yield time_s - last_s
            yield from [0.0] * (count - 1)
            last_s = time_s


class MissingError(Exception):
    """What a peer needs is not there; the message says what."""


class Peer:
    """An engine under load."""

    version = ""
    measured = ""
    """What was timed, and with which settings, in a sentence."""

    def __init__(self, settings: Settings) -> None: ...

    def run(self, load: Load) -> list[Seen]:
        """Runs a load to its end."""
        raise NotImplementedError

    def measure(self, load: Load) -> Figures:
        """The figures of a load."""
        started_s = time.perf_counter()
        seen = self.run(load)
        return figures(seen, time.perf_counter() - started_s, load)

    def close(self) -> None:
        """Ends the engine."""


Event = tuple[int, float, int, bool]
"""Number of a request, the time, the tokens that came, whether it has ended."""


class SteppedPeer(Peer):
    """An engine that runs when it is told."""

    def submit(self, number: int, prompt: list[int], num_output_tokens: int) -> None:
        """Queues a greedy request of exactly so many tokens."""
        raise NotImplementedError

    def step(self) -> Iterable[Event]:
        """Lets it work until something has come."""
        raise NotImplementedError

    def run(self, load: Load) -> list[Seen]:
        prompts = load.prompts()
        seen: list[Seen] = []
        num_ended = 0

        def send() -> None:
            number = len(seen)
            seen.append(Seen(time.perf_counter()))
            self.submit(number, prompts[number], load.output_tokens)

        for _ in range(min(load.concurrency, len(prompts))):
            send()
        while num_ended < len(prompts):
            for number, time_s, count, has_ended in self.step():
                if count:
                    seen[number].arrivals.append((time_s, count))
                if has_ended:
                    num_ended += 1
                    if len(seen) < len(prompts):
                        send()
        return seen


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed."""
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(0, int(rank) - 1)] if values else 0.0


def figures(seen: list[Seen], duration_s: float, load: Load) -> Figures:
    """Rates over the whole duration, and milliseconds of single requests.

    Raises:
        RuntimeError: a request did not get all of its tokens, so that nothing can be compared.
    """
    short = [each.num_tokens for each in seen if each.num_tokens != load.output_tokens]
    if short or len(seen) != load.num_requests:
        raise RuntimeError(
            f"{len(short)} of {load.num_requests} requests got another number of tokens than "
            f"{load.output_tokens}, for example {short[:3]}"
        )
    num_tokens = load.num_requests * load.output_tokens
    ttft = [1e3 * (each.arrivals[0][0] - each.sent_s) for each in seen]
    gaps = [1e3 * gap for each in seen for gap in each.gaps_s()]
    return {
        "tokens_per_s": num_tokens / duration_s,
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "itl_max_ms": max(gaps, default=0.0),
        "duration_s": duration_s,
    }


def load_peer(name: str) -> type[Peer]:
    """The class of a peer; `ImportError` if its package is missing."""
    peer: type[Peer] = importlib.import_module(f"peers.serving.{name}").Peer
    return peer


def main() -> None:
    """Starts the engine and runs what it is told."""
    # Engines print to stdout as they like; the parent's lines have a descriptor of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**document: Any) -> None:
        print(json.dumps(document), file=channel, flush=True)

    started_s = time.perf_counter()
    try:
        peer = load_peer(sys.argv[1])(Settings(**json.loads(sys.argv[2])))
    except (ImportError, MissingError) as error:
        answer(absent=str(error))
        return
    except Exception as error:
        traceback.print_exc()
        answer(failed=f"start: {type(error).__name__}: {error}")
        return
    load_s = time.perf_counter() - started_s
    answer(version=peer.version, measured=peer.measured, load_s=round(load_s, 2))
    try:
        for line in sys.stdin:
            answer(**peer.measure(Load(**json.loads(line))))
    except Exception as error:
        traceback.print_exc()
        answer(failed=f"{type(error).__name__}: {error}")
    finally:
        peer.close()
