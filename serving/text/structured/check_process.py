"""The process that tries grammars; `checker` starts it.

It reads one line of JSON per structure and answers with one. The first line is the vocabulary. It
ends with its standard input, or by a structure that takes all its memory or stack.
"""

import ctypes
import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from llguidance import LLMatcher, LLTokenizer

from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.grammar_text import OPTIONS, grammar_text
from serving.text.structured.vocabulary import Vocabulary, parser_limits

STACK_BYTES = 1 << 20  # of the thread that tries; those of the engine have twice that at least
MEMORY_BYTES = 512 << 20  # address space beside what the tokenizer takes
_TOKENS_TRIED = 32
_GET_DUMPABLE, _SET_DUMPABLE = 3, 4  # of prctl
_NO_EXTENSION = "NoExtension"  # llguidance's word for the end of a grammar
# Its advice for oneOf; no request sets options.
_UNKNOWN_OPTION = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_PANIC, _BACKTRACE = "panic: ", "<backtrace>"  # its words around a check of its own that failed


def try_grammar(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> dict[str, Any]:
    """Return the line that answers: the grammar's text and bytes, or why it is refused."""
    before = _held_bytes()
    try:
        text = grammar_text(outputs)
    except ValueError as error:
        why = str(error)
        is_named = why.startswith(("structured_outputs", "structural_tag"))
        return {"refused": _shown(why) if is_named else _named(outputs.kind, why)}
    limits = parser_limits()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        return {"refused": _named(outputs.kind, matcher.get_error())}
    refused = _first_tokens(matcher.deep_copy())
    if refused is not None:
        return {"refused": _named(outputs.kind, refused)}
    return {"text": text, "bytes": max(_held_bytes() - before, 0) + len(text)}


def _first_tokens(matcher: LLMatcher) -> str | None:
    """Return what goes wrong within the first tokens of some answer, if anything does."""
    for _ in range(_TOKENS_TRIED):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            why = matcher.get_error()
            return "no answer fits." if why.startswith(_NO_EXTENSION) or not why else why
        if matcher.is_stopped():
            return None
        word = next(index for index, byte in enumerate(mask) if byte)
        if not matcher.consume_token(8 * word + (mask[word] & -mask[word]).bit_length() - 1):
            return matcher.get_error()
    return None


def _named(kind: str, why: str) -> str:
    return f"structured_outputs.{kind}: {_shown(why)}"


def _shown(why: str) -> str:
    """Return the message without what only llguidance's authors read, and not without end."""
    why, _, frames = why.partition(_BACKTRACE)
    if frames:
        why = f"llguidance cannot compile it: {why.removeprefix(_PANIC).strip()}."
    lines = [line for line in why.splitlines() if line.strip() and line != "<non-verbose/>"]
    text = "\n".join(line for line in lines if not line.endswith(f"| {OPTIONS.strip()}"))
    text = text.replace(_UNKNOWN_OPTION, "Use anyOf")
    return text if len(text) <= 500 else text[:500] + "..."


def _memory() -> list[int] | None:
    """Return bytes of address space and of resident memory; None in the jail of a function."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[:2]
    except PermissionError:
        return None
    return [int(count) * resource.getpagesize() for count in pages]


def shut_others_out() -> bool:
    """In the jail let no process of the same user read this one's memory; return whether one may.

    The function that started this process is not readable either, but a new program is.
    """
    prctl = ctypes.CDLL(None).prctl
    if _memory() is None:
        prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    return bool(prctl(_GET_DUMPABLE, 0, 0, 0, 0))


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class _MallocInfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd")
    _names += ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = list(zip(_names, [ctypes.c_size_t] * 10, strict=True))


def _allocated_bytes() -> int | None:
    """Return bytes that malloc has given out and not got back; None where glibc does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _MallocInfo
    info = ask()
    return info.uordblks + info.hblkhd


def _held_bytes() -> int:
    """Return resident bytes, in the jail allocated ones; the most so far where neither is known.

    The most does not tell what a second grammar of the same size takes.
    """
    if (memory := _memory()) is not None:
        return memory[1]
    allocated = _allocated_bytes()
    return _most_resident_bytes() if allocated is None else allocated


def _bound_memory() -> None:
    memory = _memory()
    kind = resource.RLIMIT_DATA if memory is None else resource.RLIMIT_AS
    limit = MEMORY_BYTES + (_most_resident_bytes() if memory is None else memory[0])
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(lines: TextIO, answers: TextIO) -> None:
    """Answer every line until there are no more."""
    first = json.loads(lines.readline())
    tokens = [token.encode("latin-1") for token in first["tokens"]]
    tokenizer = Vocabulary(tokens, first["special_ids"], first["end_ids"]).tokenizer()
    _bound_memory()
    print("{}", file=answers, flush=True)
    for line in lines:
        fields = json.loads(line)
        kind, text = fields.pop("kind"), fields.pop("text")
        value: Any = text
        if kind in ("choice", "json_object"):
            value = json.loads(text) if kind == "choice" else True
        try:
            answer = try_grammar(StructuredOutputs(**{kind: value}, **fields), tokenizer)
        except (MemoryError, RecursionError):
            answer = {"refused": "The structure is too large to compile."}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve standard input in a thread with a small stack."""
    shut_others_out()
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(sys.stdin, sys.stdout))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
