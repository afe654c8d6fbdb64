"""The wheel and the sdist, installed into fresh environments and used outside the checkout.

Run by `make test-package`, `make wheel-smoke` and `make dist`, which build both first and name
their folder in `CBRS_DIST`. The latter two build the release wheel, which `CBRS_RELEASE` says, and
`make dist` also names the platform it built for in `CBRS_MANYLINUX`.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DIST = os.environ.get("CBRS_DIST")
MANYLINUX = os.environ.get("CBRS_MANYLINUX")
IS_RELEASE = "CBRS_RELEASE" in os.environ
pytestmark = [
    pytest.mark.skipif(DIST is None, reason="needs a built wheel and sdist: make test-package"),
    pytest.mark.timeout(600),
]
MAX_WHEEL_BYTES = 10_000_000
# Builds from the sdist reuse what `make test` has compiled: same folder, same profile.
BUILD = [
    "--no-deps",
    "--ignore-installed",
    "--no-build-isolation",
    "--config-settings=build-args=--profile checked --locked",
]


def the_only(pattern: str) -> Path:
    """The one file in the folder of built packages that matches."""
    matches = sorted((ROOT / DIST).glob(pattern))
    assert len(matches) == 1, f"expected one {pattern} in {DIST}, found {matches}"
    return matches[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The release wheel."""
    return the_only("cbrs-*.whl")


class Environment:
    """A virtual environment of its own, and a working directory that is not the checkout."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        self.cwd = folder / "work"
        self.cwd.mkdir()

    def run(self, command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess:
        """Runs a command; neither this process's PATH nor its Python path leads to the checkout."""
        env = {**os.environ, **variables, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            env.pop(name, None)
        return subprocess.run(
            [str(part) for part in command], cwd=self.cwd, env=env, capture_output=True, text=True
        )

    def python(self, code: str) -> subprocess.CompletedProcess:
        """Runs Python code."""
        return self.run([self.bin / "python", "-c", code])

    def pip_install(self, *arguments: str | Path) -> None:
        """Installs with the pip of the interpreter that runs the tests."""
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet"]
        tools = sysconfig.get_path("scripts")
        result = self.run(
            [*pip, "--disable-pip-version-check", *arguments],
            CARGO_TARGET_DIR=str(ROOT / "target"),
            PATH=f"{tools}:{os.environ['PATH']}",
        )
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"

    def share_packages(self) -> None:
        """Puts the packages of this interpreter behind the environment's own: no second torch."""
        folder = Path(sysconfig.get_path("purelib"))
        # A set-up that uses another interpreter's torch has it behind a file of this name.
        linked = [path.read_text().strip() for path in folder.glob("cbrs-shared-torch.pth")]
        lines = [str(folder), *linked]
        site_packages = next(self.bin.parent.glob("lib/python*/site-packages"))
        (site_packages / "shared.pth").write_text("".join(f"{line}\n" for line in lines))


def assert_ran(result: subprocess.CompletedProcess) -> str:
    """The stdout of a run that must have succeeded."""
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `pip install cbrs` gives: the wheel and numpy."""
    environment = Environment(tmp_path_factory.mktemp("plain") / "env")
    environment.pip_install(wheel)
    return environment


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `pip install cbrs[engine,viz]` gives."""
    environment = Environment(tmp_path_factory.mktemp("full") / "env")
    environment.share_packages()
    # First the wheel, although the shared packages may hold a cbrs; then what its extras ask for.
    environment.pip_install("--no-deps", "--ignore-installed", wheel)
    environment.pip_install("cbrs[engine,viz]")
    return environment


def test_wheel_is_one_small_abi3_file(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    assert "linux" in wheel.name
    # Others have their symbols.
    assert wheel.stat().st_size < MAX_WHEEL_BYTES or not IS_RELEASE


@pytest.mark.skipif(MANYLINUX is None, reason="needs the release wheel: make dist")
def test_release_wheel_has_the_tag_that_was_asked_for(wheel: Path) -> None:
    assert wheel.name.endswith(f"-cp311-abi3-{MANYLINUX}_{platform.machine()}.whl")


def test_extension_needs_no_newer_glibc_than_the_tag_says(wheel: Path) -> None:
    tag = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if tag is None:
        pytest.skip(f"{wheel.name} promises no glibc version")
    extension = zipfile.ZipFile(wheel).read("cbrs/_core.abi3.so")
    # Names of the symbol versions that the dynamic linker looks for.
    needed = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", extension)}
    assert needed
    assert max(needed) <= (int(tag[1]), int(tag[2]))


def test_metadata_agree_with_the_sources(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(archive.read(name))
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert metadata["Version"] == cargo["version"] == the_only("cbrs-*.tar.gz").name[5:-7]
    assert metadata["License-Expression"] == sources["license"]
    assert metadata["Requires-Python"] == sources["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(sources["optional-dependencies"])
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_wheel_holds_types_licence_and_kernels_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"cbrs/py.typed", "cbrs/_core.pyi", "cbrs/_core.abi3.so"} <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    for kernel in kernel_files():
        assert f"cbrs/kernels/{kernel.name}" in names
    for name in names:
        assert name.startswith(("cbrs/", "cbrs-")), f"stray file in the wheel: {name}"


def kernel_files() -> list[Path]:
    """The kernel files of the checkout."""
    files = sorted((ROOT / "kernels").glob("*.py"))
    assert files
    return files


def test_plain_install_has_neither_torch_nor_tqdm(plain: Environment) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'tqdm') if u.find_spec(n)])"
    assert assert_ran(plain.python(code)).strip() == "[]"


def test_plain_install_schedules(plain: Environment) -> None:
    code = """
import numpy as np
import cbrs
config = cbrs.SchedulerConfig(
    max_num_seqs=2, max_num_batched_tokens=16, num_blocks=8, max_model_len=32
)
scheduler = cbrs.Scheduler(config)
scheduler.submit([1, 2, 3], max_tokens=2)
batch, num_steps = scheduler.step(), 0
while batch.num_seqs:
    num_steps += 1
    batch = scheduler.step(np.full(len(batch.sample_index), 7, dtype=np.int32))
print(num_steps, scheduler.stats()["num_used_blocks"])
"""
    assert assert_ran(plain.python(code)).split() == ["2", "0"]


def test_llm_without_torch_names_the_extra(plain: Environment) -> None:
    result = plain.python("import cbrs; cbrs.LLM")
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError")
    assert "cbrs[engine]" in last_line


def test_generate_without_torch_says_so_in_one_line(plain: Environment) -> None:
    result = plain.run(["cbrs", "generate", "null", "--prompt", "Hello"])
    assert result.returncode == 1
    assert "cbrs[engine]" in result.stderr
    assert "Traceback" not in result.stderr


def test_demo_without_torch_says_so_in_one_line(plain: Environment) -> None:
    result = plain.run(["cbrs", "demo", "--model", "null"])
    assert result.returncode == 1
    assert "cbrs[engine]" in result.stderr
    assert "Traceback" not in result.stderr


def test_info_without_torch_says_so(plain: Environment) -> None:
    info = json.loads(assert_ran(plain.run(["cbrs", "info", "--json"])))
    assert info["torch"] is None
    assert info["kernels"]["attention"]


def test_installed_package_says_what_it_is(plain: Environment, wheel: Path) -> None:
    code = "import cbrs, json; print(json.dumps([cbrs.__version__, cbrs.__file__, cbrs.__all__]))"
    version, file, names = json.loads(assert_ran(plain.python(code)))
    assert version == wheel.name.split("-")[1]
    assert Path(file).is_relative_to(plain.bin.parent)
    assert {"LLM", "SamplingParams", "Scheduler", "SchedulerConfig"} <= set(names)
    assert assert_ran(plain.run(["cbrs", "--version"])).strip() == f"cbrs {version}"


def test_every_name_in_all_can_be_loaded(full: Environment) -> None:
    code = "import cbrs; print(all(getattr(cbrs, name) is not None for name in cbrs.__all__))"
    assert assert_ran(full.python(code)).strip() == "True"


def test_every_kernel_file_can_be_imported(full: Environment) -> None:
    modules = [f"cbrs.kernels.{kernel.stem}" for kernel in kernel_files()]
    code = f"""
from importlib import import_module
for name in {modules!r}:
    print(import_module(name).__file__)
"""
    files = assert_ran(full.python(code)).split()
    assert len(files) == len(modules)
    assert all(Path(file).is_relative_to(full.bin.parent) for file in files)


def test_full_install_runs_the_demo(full: Environment) -> None:
    # One thread: on a busy machine, several spend their time waiting for each other.
    command = ["cbrs", "demo", "--json", "--out", "pictures", "--num-threads", "1"]
    stdout = assert_ran(full.run(command))
    figures = json.loads(stdout.splitlines()[-1])
    assert figures["continuous"]["occupancy"] > figures["static"]["occupancy"]
    pictures = sorted(path.name for path in (full.cwd / "pictures").iterdir())
    assert pictures == ["timeline.html", "timeline.png"]


def test_demo_without_matplotlib_writes_the_page_only(full: Environment) -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
from cbrs.cli import main
sys.exit(main(["demo", "--model", "null", "--out", "page-only"]))
"""
    assert "cbrs[viz]" in assert_ran(full.python(code))
    assert [path.name for path in (full.cwd / "page-only").iterdir()] == ["timeline.html"]


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(the_only("cbrs-*.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def test_sdist_holds_sources_and_no_build_output(unpacked_sdist: Path) -> None:
    for name in ("Cargo.lock", "LICENSE", "README.md", "pyproject.toml", "rust/core/src/lib.rs"):
        assert (unpacked_sdist / name).is_file(), name
    for kernel in kernel_files():
        assert (unpacked_sdist / "python/cbrs/kernels" / kernel.name).is_file(), kernel.name
    assert [*unpacked_sdist.rglob("*.so"), *unpacked_sdist.rglob("__pycache__")] == []


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_sdist_installs(unpacked_sdist: Path, tmp_path: Path, *, editable: bool) -> None:
    environment = Environment(tmp_path / "env")
    environment.share_packages()
    source = ["--editable", unpacked_sdist] if editable else [unpacked_sdist]
    environment.pip_install(*BUILD, *source)
    kernels = [f"cbrs.kernels.{kernel.stem}" for kernel in kernel_files()]
    code = f"""
from importlib import import_module
import cbrs
print(cbrs.__file__, cbrs.Scheduler.__name__, *map(import_module, {kernels!r}))
"""
    stdout = assert_ran(environment.python(code))
    home = unpacked_sdist if editable else environment.bin.parent
    assert stdout.startswith(str(home))
    shutil.rmtree(environment.bin.parent)
