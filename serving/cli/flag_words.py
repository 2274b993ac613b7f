"""Converts vLLM's spellings of flags to those that argparse takes. No jax."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_CONFIG = "--compilation-config"
PREFIX = "SERVING_"  # of variables in the environment
_RENAMED = {  # flags of 0.1.0
    "lora_aside": "lora_separate_stream",
    "lora_server_carrier": "lora_server_transport",
    "no_specialize_lora": "no_compile_base_only_steps",
    "specialize_lora": "compile_base_only_steps",
}
# Of a name on the command line, in a file and in the environment.
_SPELLINGS = (lambda n: "--" + n.replace("_", "-"), str, lambda n: PREFIX + n.upper())
_NOW = {spell(old): spell(new) for old, new in _RENAMED.items() for spell in _SPELLINGS}


def plain_words(argv: Sequence[str]) -> list[str]:
    """Return the words with dashes for a flag's underscores.

    -O3 becomes --optimization-level 3, and --flag.key.key VALUE the JSON of --flag; -O.key is of
    --compilation-config.
    """
    words: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    rest = iter(argv)
    for given in rest:
        word = _CONFIG + given[2:] if given.startswith("-O.") else given
        flag, equals, value = word.partition("=")
        if word.startswith("-O") and word != "-O":
            words += ["--optimization-level", word[2:].removeprefix("=")]
        elif flag == "--help":
            words.append(flag)  # vLLM shows a section of it: --help=Frontend
        elif _is_flag(word) and "." in flag:
            _put(nested, flag, value if equals else next(rest, ""))
        elif word.startswith("--"):
            words.append(_dashes(flag) + equals + value)
        else:
            words.append(word)
    return words + [word for flag, value in nested.items() for word in (flag, json.dumps(value))]


def _is_flag(word: str) -> bool:
    return (word.startswith("-") and word[1:2].isalpha()) or word.startswith("--")


def _dashes(flag: str) -> str:
    return "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag


def _put(nested: dict[str, dict[str, Any]], path: str, text: str) -> None:
    flag, *keys = path.split(".")
    level: dict[str, Any] = nested.setdefault(_dashes(flag), {})
    *outer, last = keys
    for key in outer:
        level = level.setdefault(key, {})
    try:
        level[last] = json.loads(text)
    except json.JSONDecodeError:
        level[last] = text


def unknown_flags(words: Iterable[str], known: Sequence[str]) -> str:
    """Return what to say of words that no flag takes, with the nearest flag for each."""
    shown = [f"{word}{did_you_mean(word, known)}" for word in words]
    return f"unrecognized arguments: {' '.join(shown)}"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean ...?)` with the nearest known words, "" where none is near.

    Of a flag that has another name since 0.1.0 it is ` (now ...)`.
    """
    flag = word.partition("=")[0]
    if flag in _NOW:
        return f" (now {_NOW[flag]})"
    near = list(_near(flag, known))
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _near(word: str, known: Sequence[str]) -> Iterator[str]:
    yield from difflib.get_close_matches(word, known, n=2, cutoff=0.8)
