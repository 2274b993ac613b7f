"""The three places that flags come from: the command line, the environment, a YAML file. No jax."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from serving.cli.flag_words import PREFIX, did_you_mean, plain_words, unknown_flags

_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_TRUTH |= {"": False, "0": False, "false": False, "no": False, "off": False}


class Store(argparse._StoreAction):
    """Stores a value that no other flag of the same setting contradicts."""

    def __call__(self, parser: Any, namespace, values, option_string=None) -> None:
        if option_string is not None:
            parser.note(self, option_string, namespace, values)
        super().__call__(parser, namespace, values, option_string)


class Switch(argparse.BooleanOptionalAction):
    """--flag and --no-flag, which no other flag of the same setting contradicts.

    A spelling that was added later, as -ep, turns it on.
    """

    def __call__(self, parser: Any, namespace, values, option_string=None) -> None:
        spelled = str(option_string)
        value = not spelled.startswith("--no-")
        parser.note(self, spelled, namespace, value)
        setattr(namespace, self.dest, value)


class Off(argparse._StoreFalseAction):
    """Turns a switch off by another name of it, which the switch does not contradict."""

    def __call__(self, parser: Any, namespace, values, option_string=None) -> None:
        parser.note(self, str(option_string), namespace, False)
        super().__call__(parser, namespace, values, option_string)


class ParserWithSource(argparse.ArgumentParser):
    """Says in errors where a wrong value came from, and which flag an unknown one is close to."""

    source = ""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._refused: list[str] = []
        self._given: dict[str, tuple[argparse.Action, str]] = {}
        for action in (None, "store"):
            self.register("action", action, Store)
        self.register("action", "store_false", Off)

    def refuse(self, flag: str, reason: str) -> None:
        """Note a flag that is not offered: parse_args names all of them in one error."""
        self._refused.append(f"{flag}: {reason}")

    def note(self, action: argparse.Action, flag: str, namespace: Any, value: Any) -> None:
        """Note the flag that gives a setting this value; another one with another is an error.

        The same flag may come again, as behind a script's own: its last value counts.
        """
        first, spelled = self._given.setdefault(action.dest, (action, flag))
        if first is not action and getattr(namespace, action.dest) != value:
            self.error(
                f"{spelled} and {flag} are one setting, and their values differ: give one of them"
            )

    def error(self, message: str) -> NoReturn:
        super().error(f"{self.source}{message}")

    def parse_args(self, args=None, namespace=None):
        """Return what was given; an unknown flag is an error that names its neighbours."""
        self._refused.clear()
        self._given.clear()
        parsed, unknown = self.parse_known_args(plain_words(args or []), namespace)
        wrong = list(self._refused)
        if unknown:
            wrong.append(unknown_flags(unknown, list(self._option_string_actions)))
        if len(wrong) > 1:
            lines = "".join(f"\n  {text}" for text in wrong)
            self.error(f"{len(wrong)} flags are not offered; change or remove them:{lines}")
        if wrong:
            self.error(wrong[0])
        return parsed


def read_layers(
    parser: ParserWithSource, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return what was given, by name: the config file, over it the environment, over it argv.

    A first word `serve`, as behind `vllm`, says nothing.
    """
    from_argv = vars(parser.parse_args(argv[1:] if argv[:1] == ["serve"] else argv))
    tag, model = from_argv.get("model_tag"), from_argv.get("model")
    if tag and model and tag != model:
        parser.error(f"MODEL is {tag} and --model is {model}: give one of them")
    parser.source = "in the environment: "
    from_environ = vars(parser.parse_args(_environ_argv(parser, environ)))
    path = from_argv.get("config") or from_environ.get("config")
    parser.source = "in the config file: "
    from_file = vars(parser.parse_args(_file_argv(parser, path))) if path else {}
    parser.source = ""
    return from_file | from_environ | from_argv


def _long_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return every long spelling by its name with underscores."""
    return {
        flag.lstrip("-").replace("-", "_"): flag
        for flag in parser._option_string_actions
        if flag.startswith("--") and flag != "--help"
    }


def _environ_argv(parser: ParserWithSource, environ: Mapping[str, str]) -> list[str]:
    flags, argv = _long_flags(parser), []
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        flag = flags.get(variable.removeprefix(PREFIX).lower())
        if flag is None:
            variables = [PREFIX + name.upper() for name in flags]
            parser.error(f"unknown variable {variable}{did_you_mean(variable, variables)}")
        is_list = _is_list(parser, flag)
        argv += _flag_argv(parser, flag, shlex.split(value) if is_list else value)
    return argv


def _file_argv(parser: ParserWithSource, path: str) -> list[str]:
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"{path}: {getattr(error, 'strerror', None) or error}")
    if not isinstance(content, dict):
        parser.error(f"{path} must map flags to values.")
    flags, argv = _long_flags(parser), []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            parser.error(f"unknown flag {key!r}{did_you_mean(name, list(flags))}")
        if value is None:  # as if it were left out: no key is called None
            continue
        if isinstance(value, list) and None in value:
            parser.error(f"{key} has an entry that is null")
        if isinstance(value, dict) and _is_list(parser, flags[name]):
            value = [f"{name}={entry}" for name, entry in value.items()]
        elif isinstance(value, dict):
            value = json.dumps(value)
        argv += _flag_argv(parser, flags[name], value)
    return argv


def _is_list(parser: argparse.ArgumentParser, flag: str) -> bool:
    return parser._option_string_actions[flag].nargs in ("+", "*")


def _flag_argv(parser: ParserWithSource, flag: str, value: Any) -> list[str]:
    """Return the words that say the same on the command line."""
    action = parser._option_string_actions[flag]
    if action.nargs != 0:
        if _is_list(parser, flag):
            return [flag, *map(_word, value if isinstance(value, list) else [value])]
        return [f"{flag}={json.dumps(value) if isinstance(value, list) else value}"]
    wanted = _TRUTH.get(str(value).lower())
    if wanted is None:
        parser.error(f"{flag} must be true or false, not {value!r}")
    return [flag] if wanted else _opposite(action, flag)


def _word(value: Any) -> str:
    """Return an entry of a list as it stands on the command line."""
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _opposite(action: argparse.Action, flag: str) -> list[str]:
    """Return the form of a switch that says the contrary, nothing where there is none."""
    forms = action.option_strings
    off = getattr(action, "negatives", [form for form in forms if form.startswith("--no-")])
    on = getattr(action, "positives", [form for form in forms if form not in off])
    return list(on if flag in off else off)[:1]
