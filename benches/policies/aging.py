"""How often later arrivals are admitted before a request that has waited long."""

from __future__ import annotations

import numpy as np

from .run import NEVER, Run
from .workload import SECOND_NS

MAX_STILL_WAITING = 500


def overtakes_to_bound(run: Run, aging_s: float, aged_interval: int) -> dict[str, float | int]:
    """Admissions of later arrivals after a request was aged, to `aged_interval * (ahead + 1)`.

    `ahead` is how many older requests were aged and waited when it became aged. Requests that wait
    at the end count as far as they were overtaken by then. Returns the largest ratio and its parts.
    """
    requests = run.requests
    submitted = requests.submitted_ns
    order = np.flatnonzero(submitted != NEVER)
    order = order[np.argsort(submitted[order], kind="stable")]
    arrival = submitted[order]
    first = requests.first_planned_ns[order]
    start = np.where(first == NEVER, np.iinfo(np.int64).max, first)
    aged = arrival + int(aging_s * SECOND_NS)
    waits_long = np.flatnonzero((start > aged) & (aged < run.end_ns))
    started = np.sort(start[start < run.end_ns])
    worst: dict[str, float | int] = {
        "num_aged": len(waits_long),
        "overtakes_to_bound": 0.0,
        "most_overtakes": 0,
        "aged_before_it": 0,
    }
    is_aged = np.zeros(len(order), dtype=np.bool_)
    is_aged[waits_long] = True
    has_started = start[waits_long] < run.end_ns
    # Of those that still wait, the first ones were overtaken most for what is ahead of them.
    looked_at = [*waits_long[has_started], *waits_long[~has_started][:MAX_STILL_WAITING]]
    for place in looked_at:
        until = min(int(start[place]), run.end_ns)
        older = start[:place]
        num_ahead = int(np.count_nonzero((older > aged[place]) & is_aged[:place]))
        # All admissions in that time but those of older requests.
        since = int(aged[place])
        low, high = np.searchsorted(started, [since, until], side="left")
        num_older = int(np.count_nonzero((older >= since) & (older < until)))
        num_overtakes = int(high - low) - num_older
        ratio = num_overtakes / (aged_interval * (num_ahead + 1))
        if ratio > worst["overtakes_to_bound"]:
            worst["overtakes_to_bound"] = float(f"{ratio:.4g}")
            worst["most_overtakes"], worst["aged_before_it"] = num_overtakes, num_ahead
    return worst
