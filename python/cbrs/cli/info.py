"""`cbrs info`: what is installed, what this machine can do, and what cbrs makes of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cbrs
from cbrs.cli.common import add_command

if TYPE_CHECKING:
    from cbrs.cli.common import Commands

_PACKAGES = ("numpy", "tqdm", "matplotlib", "huggingface_hub", "triton")
_NO_TORCH = 'not installed; models need it: pip install "cbrs[engine]"'


def add_parser(commands: Commands) -> None:
    """Adds the command `info`."""
    parser = add_command(
        commands,
        "info",
        "print versions, CPU features, the kernels chosen, threads and the cache folder",
        "cbrs info",
        _run,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    info = collect_info()
    print(json.dumps(info) if arguments.json else _to_text(info))
    return 0


def collect_info() -> dict[str, Any]:
    """Returns what `cbrs info --json` prints; `torch` is None where it is not installed."""
    from cbrs import hub
    from cbrs._core import cpu_features

    features = cpu_features()
    num_cpus = len(os.sched_getaffinity(0))
    return {
        "version": cbrs.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "num_cpus": num_cpus,
            "features": {name: on for name, on in features.items() if isinstance(on, bool)},
        },
        "kernels": {
            "isa": features["isa"],
            "attention": features["kernel"],
            "int8": features["int8"],
        },
        "num_threads": num_cpus,
        "torch": _torch_info(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cache": str(hub.cache_dir()),
        "offline": hub.offline_variable(),
    }


def _torch_info() -> dict[str, Any] | None:
    """What torch is, and what `auto` and the linear layers come to with it."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    from cbrs.loading import choose_device, choose_dtype

    device = choose_device("auto")
    dtype = choose_dtype("auto", device, is_stored_in_full=False)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "linear": "native, packed" if device.type == "cpu" else "torch",
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _to_text(info: dict[str, Any]) -> str:
    cpu, kernels, torch = info["cpu"], info["kernels"], info["torch"]
    features = ", ".join(f"{name} {'yes' if on else 'no'}" for name, on in cpu["features"].items())
    installed = [f"{name} {version}" for name, version in info["packages"].items() if version]
    lines = {
        "cbrs": info["version"],
        "Python": f"{info['python']} on {info['platform']}",
        "CPU": f"{cpu['model']}, {cpu['num_cpus']} usable",
        "CPU features": features,
        "attention": f"{kernels['attention']} (instruction set: {kernels['isa']})",
        "int8": f"{kernels['int8']}, with quantization='int8'",
        "threads": f"{info['num_threads']} unless num_threads says otherwise",
        "torch": _NO_TORCH if torch is None else _torch_text(torch),
    }
    if torch is not None:
        full = ", float32 for checkpoints in float32" if torch["device"] == "cpu" else ""
        lines["default"] = (
            f"{torch['dtype']} on {torch['device']}{full}, linear layers: {torch['linear']}"
        )
    lines["packages"] = ", ".join(installed)
    lines["cache"] = info["cache"]
    lines["offline"] = "no" if info["offline"] is None else f"yes ({info['offline']})"
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name.ljust(width)}{value}" for name, value in lines.items())


def _torch_text(torch: dict[str, Any]) -> str:
    cuda = torch["cuda"]
    return f"{torch['version']}, {'no CUDA device' if cuda is None else f'CUDA {cuda}'}"
