"""A real model over HTTP and in process, in pairs that take turns."""

from __future__ import annotations

import argparse
import os
import statistics

from policies.output import Figures, rounded

from .server import Inside

CONCURRENCY = 32
NUM_REQUESTS = 2 * CONCURRENCY
WARM_UP_REQUESTS = CONCURRENCY // 4
LOAD = {"concurrency": CONCURRENCY, "prompt_tokens": 64, "output_tokens": 64}


def compare(options: argparse.Namespace) -> Figures:
    """Output tokens per second of one engine, over HTTP and without, with the same prompts' sizes.

    Which of a pair comes first changes from pair to pair.
    """
    rates: dict[str, list[float]] = {"http": [], "in_process": []}
    with Inside(options.model, CONCURRENCY, sorted(os.sched_getaffinity(0))) as engine:

        def over_http(seed: int, num_requests: int = NUM_REQUESTS) -> float:
            report = engine.server.load(**LOAD, num_requests=num_requests, seed=seed)
            if report["num_failed"]:
                raise RuntimeError(f"requests failed: {report['errors']}")
            return float(report["output_tokens_per_s"])

        def in_process(seed: int, num_requests: int = NUM_REQUESTS) -> float:
            # Other prompts than any over HTTP, which the prefix cache may still know.
            return engine.run(**LOAD, num_requests=num_requests, seed=seed)["output_tokens_per_s"]

        over_http(1000, WARM_UP_REQUESTS)
        in_process(2000, WARM_UP_REQUESTS)
        for pair in range(options.runs):
            if pair % 2 == 0:
                rates["http"].append(over_http(1001 + pair))
                rates["in_process"].append(in_process(2001 + pair))
            else:
                rates["in_process"].append(in_process(2001 + pair))
                rates["http"].append(over_http(1001 + pair))
    ratios = [http / own for http, own in zip(rates["http"], rates["in_process"], strict=True)]
    return {
        "ratio": rounded(statistics.median(ratios)),
        "ratios": [rounded(ratio) for ratio in ratios],
        **{
            f"{name}_tokens_per_s": [rounded(rate) for rate in of_name]
            for name, of_name in rates.items()
        },
    }
