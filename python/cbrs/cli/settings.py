"""Settings of a command: its options, from flags, the environment, a TOML file, or the default.

The table is made from the argument parser, so each option has all four forms: `--max-num-seqs 8`,
`CBRS_MAX_NUM_SEQS=8`, `max_num_seqs = 8`. The first of them that is given counts.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cbrs.cli.common import InputError

PREFIX = "CBRS_"
DEFAULT = "default"
_YES = frozenset({"1", "on", "yes", "true"})
_NO = frozenset({"0", "off", "no", "false"})
# Of the command line alone: help and logging of one run, and the file itself.
_NOT_SETTINGS = ("help", "verbose", "config")
# Variables of cbrs that are no options.
_OTHER_VARIABLES = ("CBRS_CACHE", "CBRS_API_KEY", "CBRS_CONFIG")


@dataclass(frozen=True)
class Value:
    """A setting's value, and where it is from: a flag, a variable, a file, or "default"."""

    value: Any
    source: str


@dataclass(frozen=True)
class _Option:
    """An option as a setting: from text or from TOML to its value."""

    name: str
    flag: str
    default: Any
    kind: str
    convert: Callable[[str], Any]
    choices: tuple[Any, ...]

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def from_text(self, text: str) -> Any:
        if self.kind == "bool":
            return _boolean(text)
        if self.kind == "list":
            return [self._one(part.strip()) for part in text.split(",")]
        return self._one(text)

    def from_toml(self, value: Any) -> Any:
        if self.kind == "bool":
            return _typed(value, bool, "true or false")
        if self.kind == "list":
            return [
                self._one(_text(item)) for item in (value if isinstance(value, list) else [value])
            ]
        if self.convert is int:
            _typed(value, int, "an integer")
        elif self.convert is float:
            _typed(value, (int, float), "a number")
        elif self.convert is str:
            _typed(value, str, "a string")
        return self._one(_text(value))

    def _one(self, text: str) -> Any:
        try:
            value = self.convert(text)
        except argparse.ArgumentTypeError:
            raise
        except (TypeError, ValueError):
            what = {int: "an integer", float: "a number"}.get(self.convert, "usable")  # type: ignore[call-overload]
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if self.choices and value not in self.choices:
            known = ", ".join(str(choice) for choice in self.choices)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {known}")
        return value


class Settings:
    """All options of one parser, which from now on leaves those at None that were not given."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """Takes over the defaults of the parser's options, and adds `--config`.

        Raises:
            TypeError: an option of a kind that has no form in a file.
        """
        parser.add_argument(
            "--config",
            metavar="FILE.toml",
            help="settings of this command by name, as max_num_seqs = 8; a flag or a variable "
            "CBRS_MAX_NUM_SEQS goes before it",
        )
        actions = [action for action in parser._actions if action.dest not in _NOT_SETTINGS]
        self.options = {action.dest: _option(action, parser) for action in actions}

    def resolve(
        self, arguments: argparse.Namespace, environ: Mapping[str, str]
    ) -> tuple[dict[str, Value], list[str]]:
        """Returns the value of each setting, and what in the environment is no use.

        Raises:
            InputError: a value that is unusable, or an unknown key of the file, named.
        """
        warnings = [*self._unknown_variables(environ)]
        path = arguments.config or environ.get(PREFIX + "CONFIG") or None
        table = {} if path is None else self._read(path)
        values = {}
        for name, option in self.options.items():
            flag = getattr(arguments, name, None)
            text = environ.get(option.variable, "")
            if text.startswith("tcp://"):
                # What Kubernetes sets for a service of the name "cbrs".
                warnings.append(f"{option.variable} is {text!r}, the link of a service; ignored")
                text = ""
            if flag is not None:
                values[name] = Value(flag, option.flag)
            elif text:
                values[name] = Value(
                    _read(option.variable, option.from_text, text), option.variable
                )
            elif name in table:
                value = _read(f"{path}: {name}", option.from_toml, table[name])
                values[name] = Value(value, str(path))
            else:
                values[name] = Value(option.default, DEFAULT)
        return values, warnings

    def _read(self, path: str) -> dict[str, Any]:
        try:
            with open(path, "rb") as file:
                table = tomllib.load(file)
        except (OSError, ValueError) as error:
            raise InputError(f"the settings cannot be read from {path}: {error}") from None
        for key in table:
            if key not in self.options:
                near = difflib.get_close_matches(key.replace("-", "_"), self.options, 1, 0.5)
                hint = (
                    f"did you mean {near[0]}?" if near else f"there are {', '.join(self.options)}"
                )
                raise InputError(f"{path}: {key} is no setting; {hint}")
        return table

    def _unknown_variables(self, environ: Mapping[str, str]) -> list[str]:
        known = {option.variable for option in self.options.values()} | {*_OTHER_VARIABLES}
        warnings = []
        for name in sorted(environ):
            if name.startswith(PREFIX) and name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.8)
                hint = f"; did you mean {near[0]}?" if near else ""
                warnings.append(f"the variable {name} is no setting of this command{hint}")
        return warnings


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> _Option:
    """Makes a setting of an option, and has the parser tell whether it was given."""
    is_switch = isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction)
    if is_switch:
        kind = "bool"
    elif isinstance(action, argparse._AppendAction):
        kind = "list"
    elif isinstance(action, argparse._StoreAction) and action.nargs in (None, "?"):
        kind = "one"
    else:
        raise TypeError(f"{action.dest} of {parser.prog} has no form in a file")
    default = action.default
    action.default = None
    parser._defaults.pop(action.dest, None)
    if action.help:
        action.help = action.help.replace("%(default)s", str(default))
    return _Option(
        name=action.dest,
        flag=action.option_strings[0] if action.option_strings else action.dest.upper(),
        default=default,
        kind=kind,
        convert=action.type if callable(action.type) else str,
        choices=tuple(action.choices or ()),
    )


def _read(place: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{place}: {error}") from None


def _boolean(text: str) -> bool:
    if text.lower() in _YES | _NO:
        return text.lower() in _YES
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _typed(value: Any, kind: type | tuple[type, ...], expected: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise argparse.ArgumentTypeError(f"{value!r} is not {expected}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise argparse.ArgumentTypeError(f"{value!r} is neither text nor a number")
    return str(value)
