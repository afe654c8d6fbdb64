"""Where the settings of `cbrs serve` are from, and what is told of them."""

import argparse
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from server_kit import Client
from server_process import server_process

import cbrs.cli
from cbrs.api_keys import environment_key, read_api_keys
from cbrs.cli import main
from cbrs.cli.common import InputError
from cbrs.cli.settings import Settings, Value


def parser() -> argparse.ArgumentParser:
    """A parser with an option of each kind."""
    made = argparse.ArgumentParser()
    made.add_argument("model", nargs="?", default="null")
    made.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    made.add_argument("--ratio", type=float)
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--name", action="append")
    made.add_argument("--is-open", action=argparse.BooleanOptionalAction, default=False)
    made.add_argument("--format", choices=("text", "json"), default="text")
    return made


def resolve(
    *arguments: str, config: Path | None = None, **environ: str
) -> tuple[dict[str, Value], list[str]]:
    made = parser()
    settings = Settings(made)
    options = [] if config is None else ["--config", str(config)]
    return settings.resolve(made.parse_args([*arguments, *options]), environ)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text('port = 3\nhost = "::1"\nname = ["a", "b"]\nis_open = true\nformat = "json"\n')
    return file


def test_a_flag_goes_before_a_variable_before_a_file_before_the_default(toml: Path) -> None:
    values, _ = resolve("--port", "1", config=toml, CBRS_PORT="2", CBRS_HOST="0.0.0.0")
    assert values["port"] == Value(1, "--port")
    assert values["host"] == Value("0.0.0.0", "CBRS_HOST")
    assert values["name"] == Value(["a", "b"], str(toml))
    assert values["model"] == Value("null", "default")
    values, _ = resolve(CBRS_CONFIG=str(toml), CBRS_PORT="2")
    assert (values["port"], values["format"].value) == (Value(2, "CBRS_PORT"), "json")


def test_each_kind_is_read_from_each_place(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("port = 1\nratio = 2\nmodel = 'm'\nname = 'a'\nis_open = true\nformat = 'json'")
    from_file = {name: item.value for name, item in resolve(config=file)[0].items()}
    variables = {
        "CBRS_PORT": "1",
        "CBRS_RATIO": "2",
        "CBRS_MODEL": "m",
        "CBRS_NAME": "a",
        "CBRS_IS_OPEN": "Yes",
        "CBRS_FORMAT": "json",
        "CBRS_HOST": "",
    }
    from_environment = {name: item.value for name, item in resolve(**variables)[0].items()}
    flags = ["m", "--port=1", "--ratio=2", "--name=a", "--is-open", "--format=json"]
    from_flags = {name: item.value for name, item in resolve(*flags)[0].items()}
    assert from_file == from_environment == from_flags
    assert from_file["ratio"] == 2.0
    assert from_file["name"] == ["a"]
    assert resolve(CBRS_NAME="a, b")[0]["name"].value == ["a", "b"]


def test_a_switch_of_the_file_is_turned_off_by_a_flag(toml: Path) -> None:
    assert resolve(config=toml)[0]["is_open"].value is True
    assert resolve("--no-is-open", config=toml)[0]["is_open"] == Value(False, "--is-open")
    assert resolve(config=toml, CBRS_IS_OPEN="0")[0]["is_open"].value is False


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ["prot", "did you mean port"]),
        ("is-open = true", ["is-open", "did you mean is_open"]),
        ("zzzzz = 1", ["zzzzz", "there are model, port"]),
        ('port = "1"', ["port", "integer"]),
        ("port = true", ["port", "integer"]),
        ("port = 1.5", ["port", "integer"]),
        ("host = 1", ["host", "string"]),
        ("is_open = 1", ["is_open", "true or false"]),
        ("ratio = 'x'", ["ratio", "number"]),
        ("name = [true]", ["name", "text"]),
        ("format = 'xml'", ["format", "text, json"]),
        ("[port]\nx = 1", ["port", "integer"]),
        ("port = \n", ["cannot be read", "line 1"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        resolve(config=file)
    assert all(part in str(caught.value) for part in [str(file), *parts])


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [("PORT", "x", "integer"), ("IS_OPEN", "maybe", "true"), ("FORMAT", "xml", "text, json")],
)
def test_a_wrong_variable_is_refused_by_name(name: str, text: str, part: str) -> None:
    with pytest.raises(InputError, match=f"CBRS_{name}.*{part}"):
        resolve(**{f"CBRS_{name}": text})


def test_an_unknown_variable_is_told() -> None:
    _, warnings = resolve(CBRS_PROT="1", CBRS_ELSE="1", CBRS_CACHE="x", HOME="/")
    assert len(warnings) == 2
    assert "CBRS_ELSE" in warnings[0]
    assert re.search("CBRS_PROT .*did you mean CBRS_PORT", warnings[1])


def test_the_link_of_a_kubernetes_service_is_no_port() -> None:
    values, warnings = resolve(CBRS_PORT="tcp://10.0.0.1:8000")
    assert values["port"] == Value(8000, "default")
    assert "CBRS_PORT" in warnings[0]


def test_an_option_without_a_form_in_a_file_is_a_mistake_of_ours() -> None:
    made = parser()
    made.add_argument("--pair", nargs=2)
    with pytest.raises(TypeError, match="pair"):
        Settings(made)


def test_the_help_tells_the_defaults_still(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser()
    Settings(made)
    assert "(default: 8000)" in made.format_help()
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "127.0.0.1" in capsys.readouterr().out


def serve_parser() -> tuple[argparse.ArgumentParser, Settings]:
    whole = cbrs.cli._make_parser()
    commands = next(
        action for action in whole._actions if isinstance(action, argparse._SubParsersAction)
    )
    made: argparse.ArgumentParser = commands.choices["serve"]
    return made, made.get_default("settings")


def test_every_option_of_the_command_is_a_setting() -> None:
    made, settings = serve_parser()
    options = {action.dest for action in made._actions} - {"help", "verbose", "config"}
    assert set(settings.options) == options
    assert {"host", "port", "max_num_seqs", "policy", "enable_prefix_caching"} <= options


def test_settings_are_printed_and_told_with_their_source(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max_num_seqs = 5\nserved_model_name = "mine"\nprefix_caching = false\n')
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(main(["serve", "null", "--config", str(file)]))
    assert caught.value.code == 2
    file.write_text('max_num_seqs = 5\nserved_model_name = "mine"\nenable_prefix_caching = false\n')
    arguments = ("null", "--config", str(file), "--port", "0")
    with server_process(*arguments, CBRS_BLOCK_SIZE="8", CBRS_MAX_NUM_SEQ="1") as server:
        told = Client(server.url).get("/version").json()
        assert told["engine"]["max_num_seqs"] == 5
        assert told["engine"]["enable_prefix_caching"] is False
        assert told["server"]["max_num_seqs"] == {"value": 5, "source": str(file)}
        assert told["server"]["block_size"] == {"value": 8, "source": "CBRS_BLOCK_SIZE"}
        assert told["server"]["port"] == {"value": 0, "source": "--port"}
        assert told["server"]["host"] == {"value": "127.0.0.1", "source": "default"}
        assert f"  max_num_seqs = 5 ({file})\n" in server.output
        assert "  block_size = 8 (CBRS_BLOCK_SIZE)\n" in server.output
        # What nobody gave is told as it was decided.
        assert re.search(r"  num_threads = \d+ \(default\)\n", server.output)
        assert "  log_level = info (default)\n" in server.output
        assert "CBRS_MAX_NUM_SEQ is no setting" in server.output
        assert Client(server.url).get("/v1/models").json()["data"][0]["id"] == "mine"


def write_keys(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(0o600)
    return file


SECRET = "sk-0123456789abcdef"
GOOD = f"""
[[keys]]
name = "alice"
key = "{SECRET}"
tenant = "gold"
max_priority = "standard"
priority = "batch"
weight = 2.5
requests_per_min = 60

[[keys]]
name = "alice-2"
sha256 = "{hashlib.sha256(b"x").hexdigest()}"
tenant = "gold"
max_tokens = 100

[[keys]]
name = "root"
key = "{SECRET}-root"
admin = true
"""


def test_a_file_of_keys_is_read(tmp_path: Path) -> None:
    read = read_api_keys(write_keys(tmp_path, GOOD))
    told = [(key.name, key.tenant, key.max_priority, key.priority) for key in read.keys]
    assert told == [
        ("alice", "gold", "standard", "batch"),
        ("alice-2", "gold", "interactive", None),
        ("root", None, "interactive", None),
    ]
    assert [key.is_admin for key in read.keys] == [False, False, True]
    assert read.tenants == {"gold": {"weight": 2.5, "requests_per_min": 60, "max_tokens": 100}}
    assert read.warnings == []


def entry(**settings: Any) -> str:
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    return "\n".join(["[[keys]]", *lines, ""])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "[[keys]]"),
        ("keys = []", "[[keys]]"),
        ("keys = [1]", "keys[1] is no table"),
        ("[keys]\na = 'x'", "[[keys]]"),
        ("[[keys]]\nname = 'a'\n[other]\n", "[[keys]]"),
        (entry(key=SECRET), "keys[1]: name must be 1 to 128"),
        (entry(name="", key=SECRET), "name must be 1 to 128"),
        (entry(name="a"), "either key or sha256"),
        (entry(name="a", key=SECRET, sha256="0" * 64), "either key or sha256"),
        (entry(name="a", key=""), "1 to 1024 visible"),
        (entry(name="a", key=f"{SECRET} x"), "1 to 1024 visible"),
        (entry(name="a", key=f"{SECRET}ä"), "1 to 1024 visible"),
        (entry(name="a", key=7), "1 to 1024 visible"),
        (entry(name="a", sha256="0" * 63), "64 hexadecimal"),
        (entry(name="a", key=SECRET, tenant=""), "tenant must be 1 to 128"),
        (entry(name="€" * 86, key=SECRET), "256 bytes at most"),
        (entry(name="a", key=SECRET, max_priority="high"), "max_priority must be one of"),
        (
            entry(name="a", key=SECRET, max_priority="batch", priority="standard"),
            "priority is above max_priority",
        ),
        (entry(name="a", key=SECRET, admin="yes"), "true or false"),
        (entry(name="a", key=SECRET, tennant="x"), "did you mean 'tenant'"),
        (entry(name="a", key=SECRET, wieght=1), "did you mean 'weight'"),
        (entry(name="a", key=SECRET) * 2, "there twice"),
        (entry(name="a", key=SECRET) + entry(name="b", key=SECRET), "the secret of 'a'"),
        (
            entry(name="a", key=SECRET, tenant="t", weight=1)
            + entry(name="b", key=SECRET + "b", tenant="t", weight=2),
            "another weight",
        ),
        (f"[[keys]]\nname = {SECRET}\n", "no TOML file in UTF-8 (at line 2"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_without_a_secret(
    tmp_path: Path, text: str, part: str
) -> None:
    file = write_keys(tmp_path, text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_api_keys(file)
    message = str(caught.value)
    assert part in message
    assert str(file) in message
    assert SECRET not in message


def test_a_secret_in_place_of_a_file_is_not_shown(tmp_path: Path) -> None:
    for path in (SECRET, tmp_path / "none.toml"):
        with pytest.raises(ValueError, match="cannot be read") as caught:
            read_api_keys(path)
        assert SECRET not in str(caught.value)


def test_weak_secrets_and_open_files_are_told(tmp_path: Path) -> None:
    file = write_keys(tmp_path, entry(name="a", key="short"))
    file.chmod(0o644)
    first, second = read_api_keys(file).warnings
    assert "may be guessed" in first
    assert "short" not in first
    assert "others than its owner may read" in second


def test_the_key_of_the_environment_has_all_rights() -> None:
    assert environment_key({}) is None
    assert environment_key({"CBRS_API_KEY": ""}) is None
    read = environment_key({"CBRS_API_KEY": SECRET})
    assert read is not None
    (key,) = read.keys
    assert (key.is_admin, key.tenant, read.warnings) == (True, None, [])
    with pytest.raises(ValueError, match="CBRS_API_KEY") as caught:
        environment_key({"CBRS_API_KEY": f"{SECRET} {SECRET}"})
    assert SECRET not in str(caught.value)


def test_a_wrong_setting_of_a_tenant_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_keys(tmp_path, entry(name="a", key=SECRET, tenant="t", weight=-1))
    assert main(["serve", "null", "--api-keys", str(file)]) == 2
    told = capsys.readouterr().err
    assert "tenants.t" in told
    assert "weight" in told
    assert SECRET not in told
