"""A process that tries grammars before the engine's process takes them.

Some grammars take hours, or all memory, or end the process that compiles them: the library recurses
over rules and references. So each is compiled there first, within bounds of time, memory and stack;
the engine's process compiles only what came through, with a larger stack. See check_process.
"""

import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lora_jax
from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.vocabulary import Vocabulary

START_S = 120.0  # for the tokenizer of a large vocabulary on a busy machine
# Packages are named by their folders: an isolated function may not look into those above.
_PACKAGES = [str(Path(__file__).parents[2]), str(Path(lora_jax.__file__).parent)]
_START = """
import importlib.util, os, runpy, sys
for folder in sys.argv[1:]:
    name = os.path.basename(folder)
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
runpy.run_module("serving.text.structured.check_process", run_name="__main__")
"""


class GrammarRefused(ValueError):
    """A structure that cannot bind an answer; the message names what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """A grammar that compiles within the bounds."""

    text: str  # llguidance's
    bytes: int  # memory that it took to compile, roughly


class Checker:
    """The handle of the process, which is started for the first grammar; one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float):
        """A grammar that takes longer than `limit_s` is refused, and the process started anew."""
        self._vocabulary, self._limit_s = vocabulary, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._pending = b""
        self._closed = False

    def check(self, outputs: StructuredOutputs) -> Checked:
        """Return the grammar of a structure. Raises GrammarRefused, and EOFError when closed."""
        with self._lock:
            if self._process is None:
                self._start()
            fields: dict[str, Any] = {"kind": outputs.kind, "text": outputs.text}
            fields["disable_any_whitespace"] = outputs.disable_any_whitespace
            fields["whitespace_pattern"] = outputs.whitespace_pattern
            fields["thoughts"] = outputs.thoughts
            answer = self._ask(fields, self._limit_s)
        if "refused" in answer:
            raise GrammarRefused(answer["refused"])
        return Checked(answer["text"], answer["bytes"])

    def close(self) -> None:
        """End the process; a check under way fails."""
        self._closed = True
        self._end()

    def _start(self) -> None:
        if self._closed:
            raise EOFError("The engine has stopped.")
        path = os.pathsep.join(filter(None, sys.path))
        # One arena, so that the address space taken is what was asked for.
        env = os.environ | {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-P", "-c", _START, *_PACKAGES]
        self._pending = b""
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the library's last words when it ends the process
        )
        words = [token.decode("latin-1") for token in self._vocabulary.tokens]
        ids = [list(self._vocabulary.special_ids), list(self._vocabulary.end_ids)]
        self._ask({"tokens": words, "special_ids": ids[0], "end_ids": ids[1]}, START_S)

    def _ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the process's answer, or a refusal when it gives none; then it is ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, time.monotonic() + limit_s)
        except (OSError, ValueError):  # it has ended
            line = b""
        if line:
            return json.loads(line)
        self._end()
        if self._closed:
            raise EOFError("The engine has stopped.")
        if "tokens" in question:
            raise RuntimeError("The process that checks grammars does not start.")
        if line is None:
            return {"refused": f"The structure takes longer than {limit_s:g} s to compile."}
        return {"refused": "The structure is too large or too deeply nested to compile."}

    def _line(self, process: subprocess.Popen[bytes], until: float) -> bytes | None:
        """Return the next line, b"" when the process ends, None when there is none in time."""
        assert process.stdout is not None
        fd, poll = process.stdout.fileno(), select.poll()  # select takes no descriptor above 1023
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._pending:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                return b""
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what it was not told
                    continue
