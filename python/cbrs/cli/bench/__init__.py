"""`cbrs bench`: throughput and latency of a model or a server over a sweep of concurrencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cbrs.cli.bench.server import add_server_options, check_no_server_options, run_server
from cbrs.cli.common import EXIT_FAILURE, InputError, add_command, positive_int
from cbrs.cli.options import add_engine_options, add_model_argument, given
from cbrs.cli.prompts import read_prompts
from cbrs.config import EngineConfig
from cbrs.table import format_table

if TYPE_CHECKING:
    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.bench.figures import Level
    from cbrs.cli.bench.workload import BenchRequest
    from cbrs.cli.common import Commands

logger = logging.getLogger("cbrs")

_CONCURRENCY = (1, 4, 16, 64)
_INPUT_LEN, _OUTPUT_LEN = 128, 64
_WARM_UP_TOKENS, _MAX_WARM_UP_REQUESTS = 4, 8
# Requests a client sends, and requests at least, if --num-requests is not given.
_REQUESTS_PER_CLIENT, _MIN_REQUESTS = 2, 8
_DETAILS = """\
A closed loop for each concurrency: so many clients, each sends its next request when the last has
ended. All levels use one engine, which is loaded and warmed up first. Times are those that a client
in the same process sees; times per token are measured where tokens arrive.

Random prompts differ from level to level and run without the prefix cache, which could find nothing
in them. With --file the cache is on, and emptied before each level; --no-prefix-caching turns it
off.

With --url a server that speaks the OpenAI protocol is measured instead, by a load generator in
Rust, which also knows open loops (--rate) and traces (--trace): for example
`cbrs bench --url http://127.0.0.1:8000 --concurrency 64 --num-requests 1000`."""


class Workload(Protocol):
    """Where requests come from."""

    def requests(self, num_requests: int, concurrency: int) -> list[BenchRequest]:
        """Returns the requests of one level."""


def add_parser(commands: Commands) -> None:
    """Adds the command `bench`."""
    parser = add_command(
        commands,
        "bench",
        "measure throughput and latency over a sweep of concurrencies",
        "cbrs bench null:0.001 --concurrency 1,4 --output-len 16",
        _run,
        details=_DETAILS,
    )
    add_model_argument(parser, is_optional=True)
    parser.add_argument(
        "--concurrency",
        type=_concurrencies,
        metavar="N,...",
        help=f"clients at once, a level each (default: {','.join(map(str, _CONCURRENCY))})",
    )
    parser.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="N",
        help=f"requests of each level (default: {_REQUESTS_PER_CLIENT} for each client, "
        f"{_MIN_REQUESTS} at least)",
    )
    parser.add_argument(
        "--input-len",
        "--prompt-tokens",
        type=positive_int,
        metavar="N",
        help=f"tokens of a random prompt (default: {_INPUT_LEN})",
    )
    parser.add_argument(
        "--output-len",
        "--output-tokens",
        type=positive_int,
        metavar="N",
        help="output tokens: exactly for random prompts, at most for a line of --file without "
        f"max_tokens (default: {_OUTPUT_LEN})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts (default: 0)")
    parser.add_argument(
        "--file",
        "--prompts",
        metavar="PATH",
        help="prompts instead of random ones, in the forms of `cbrs generate --file`; used again "
        "from the start if there are fewer than requests; - is stdin. With --url the field can "
        "also be question or turns, of which the first is sent",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as one JSON object, the last line"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw throughput against latency (.png, .svg or .pdf; needs the extra viz)",
    )
    add_server_options(parser)
    add_engine_options(parser, max_num_seqs="the largest concurrency")


def _concurrencies(text: str) -> tuple[int, ...]:
    """An option's value that must be different integers >= 1, in ascending order afterwards."""
    return tuple(sorted({positive_int(part) for part in text.split(",")}))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.file is not None and arguments.input_len is not None:
        raise InputError("--input-len is for random prompts; leave out it or --file")
    concurrencies = arguments.concurrency or _CONCURRENCY
    if arguments.url is not None:
        return run_server(arguments, concurrencies)
    check_no_server_options(arguments)
    if arguments.model is None:
        raise InputError("give a MODEL, or the --url of a server")
    wanted, largest = arguments.num_requests, max(concurrencies)
    if wanted is not None and wanted < largest:
        raise InputError(
            f"--num-requests {wanted} cannot keep {largest} clients busy; give {largest} or more"
        )
    if arguments.plot is not None:
        from cbrs.cli.bench.plot import check_plot

        check_plot(arguments.plot)
    try:
        levels, settings = asyncio.run(_measure(arguments, concurrencies))
    except TypeError as error:
        if arguments.file is None:
            raise
        # A line of the file gave a parameter a value of another type.
        raise InputError(str(error)) from error
    from cbrs.cli.bench.figures import to_table

    print(format_table(to_table(levels)))
    if arguments.plot is not None:
        from cbrs.cli.bench.plot import draw_plot

        draw_plot(levels, _title(settings), arguments.plot)
        print(f"plot: {arguments.plot}")
    if arguments.json:
        print(json.dumps({**settings, "levels": [level.to_dict() for level in levels]}))
    errors = [error for level in levels for error in level.errors]
    if errors:
        logger.error("%d requests failed, the first with: %s", len(errors), errors[0])
    return EXIT_FAILURE if errors else 0


async def _measure(
    arguments: argparse.Namespace, concurrencies: tuple[int, ...]
) -> tuple[list[Level], dict[str, Any]]:
    """Loads the model, warms it up, and runs every level."""
    items = None if arguments.file is None else read_prompts(None, arguments.file, as_chat=False)
    from cbrs.async_llm import AsyncLLM
    from cbrs.cli.bench.workload import FileWorkload, RandomWorkload

    options = {
        "max_num_seqs": max(concurrencies),
        "enable_prefix_caching": items is not None,
        **given(arguments, EngineConfig, but="seed"),
    }
    output_len = arguments.output_len or _OUTPUT_LEN
    async with AsyncLLM(**options) as llm:
        input_len = arguments.input_len or _INPUT_LEN
        workload: Workload = (
            RandomWorkload(llm, input_len=input_len, output_len=output_len, seed=arguments.seed)
            if items is None
            else FileWorkload(llm, items, output_len=output_len)
        )
        await _warm_up(llm, workload, max(concurrencies))
        levels = []
        for concurrency in concurrencies:
            levels.append(await _run_level(llm, workload, concurrency, arguments))
        prompts = (
            {"file": arguments.file}
            if items is not None
            else {"input_len": input_len, "seed": arguments.seed}
        )
        return levels, {**_settings(llm), **prompts, "output_len": output_len}


async def _warm_up(llm: AsyncLLM, workload: Workload, concurrency: int) -> None:
    """Runs a few short requests, so that the first level measured finds everything in place."""
    from cbrs.cli.bench.closed_loop import run_level
    from cbrs.cli.bench.workload import BenchRequest

    concurrency = min(concurrency, _MAX_WARM_UP_REQUESTS)
    requests = [
        BenchRequest(
            request.prompt, replace(request.params, max_tokens=_WARM_UP_TOKENS, min_tokens=0)
        )
        for request in workload.requests(concurrency, concurrency)
    ]
    await run_level(llm, requests, concurrency, lambda: None)


async def _run_level(
    llm: AsyncLLM, workload: Workload, concurrency: int, arguments: argparse.Namespace
) -> Level:
    from tqdm import tqdm

    from cbrs.cli.bench.closed_loop import run_level

    num_requests = arguments.num_requests or max(_MIN_REQUESTS, _REQUESTS_PER_CLIENT * concurrency)
    requests = workload.requests(num_requests, concurrency)
    llm.reset_prefix_cache()
    name = f"concurrency {concurrency}"
    # disable=None: no bar where stderr is not a terminal; the line below says the same.
    with tqdm(
        total=num_requests, desc=name, unit=" requests", file=sys.stderr, disable=None, leave=False
    ) as bar:
        level = await run_level(llm, requests, concurrency, bar.update)
    logger.info(
        "%s: %d requests in %.1f s, %.1f output tokens/s",
        name,
        num_requests,
        level.duration_s,
        level.output_tokens_per_s,
    )
    return level


def _settings(llm: AsyncLLM) -> dict[str, Any]:
    """What was measured on what, for the JSON output and the title of the plot."""
    from cbrs.cli.info import collect_info

    config = llm.config()
    return {"model": config.model, "engine": asdict(config), "machine": collect_info()}


def _title(settings: dict[str, Any]) -> str:
    engine = settings["engine"]
    prompts = (
        f"prompts of {settings['file']}"
        if "file" in settings
        else f"{settings['input_len']} prompt tokens"
    )
    kind = engine["dtype"]
    if engine["quantization"] is not None:
        kind = f"{engine['quantization']} weights, else {kind},"
    if engine["kv_cache_dtype"] != engine["dtype"]:
        kind += f" with {engine['kv_cache_dtype']} keys and values"
    return (
        f"{settings['model']}, {kind} on {engine['device']}: {prompts}, "
        f"{settings['output_len']} output tokens"
    )
