"""How much a simulated machine serves when there is always more to do."""

from __future__ import annotations

import numpy as np

from .output import Figures, rounded
from .profiles import NUM_ROWS, Profile
from .simulator import config, simulate
from .workload import SECOND_NS, closed_loop


def measure_capacity(seed: int, profile: Profile, span_s: float) -> Figures:
    """Requests and output tokens per second of a closed loop that keeps the rows full.

    The first fifth of the time is left out, in which the rows fill.
    """
    random = np.random.default_rng(seed)
    num_requests = int(span_s * 80) + 1000
    streams = [closed_loop("all", random, num_requests, 4 * NUM_ROWS)]
    run = simulate(config(policy="fcfs"), profile, streams, until_s=span_s)
    from_ns = run.end_ns // 5
    seconds = (run.end_ns - from_ns) / SECOND_NS
    return {
        "requests_per_s": rounded(np.count_nonzero(run.requests.ended_ns > from_ns) / seconds),
        "output_tokens_per_s": rounded(run.output_tokens(None, from_ns) / seconds),
    }
