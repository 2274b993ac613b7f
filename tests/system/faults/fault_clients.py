"""Clients that ask, load and unload all the time and write down what came of it."""

import contextlib
import http.client
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fault_cluster import FIXED, MODEL
from fault_history import ANSWERED, CUT, REFUSED, SILENT, TOLD, Operation, Recorder

PROMPTS = ("The court held that", "Book a table for", "In summary,")
FOLDERS = ("law", "intent", "summary", "translation")
NAMES = ("mine-0", "mine-1", "mine-2")  # loaded and unloaded at run time
LENGTHS = (4, 24)
PATIENCE_S = 40.0  # then the client gives up
_JSON = {"Content-Type": "application/json"}


class Told(Exception):
    """The server said what went wrong."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def completion(name: str, prompt: int, count: int, *, stream: bool) -> dict[str, Any]:
    """Return the body of a greedy request."""
    return {
        "model": MODEL.name if name == "base" else name,
        "prompt": PROMPTS[prompt],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": True,
    }


def tokens_of(answer: http.client.HTTPResponse, *, stream: bool) -> tuple[int, ...]:
    """Return the tokens of a whole answer. Raises Told, or OSError where it is cut off."""
    if not stream or answer.status != 200:
        text = answer.read()
        if answer.status != 200:
            raise Told(answer.status, text.decode(errors="replace"))
        return tuple(json.loads(text)["choices"][0]["token_ids"])
    found: list[int] = []
    for line in answer:
        if line.startswith(b"data: [DONE]"):
            return tuple(found)
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise Told(event["error"].get("code") or 500, json.dumps(event["error"]))
            for choice in event["choices"]:
                found += choice.get("token_ids") or ()
    raise ConnectionError("the stream ended without its last event")


class Server(Protocol):
    """What clients need of a server."""

    def connect(self, where: str, timeout: float) -> http.client.HTTPConnection: ...


class Clients:
    """Threads of traffic on one server; `start` and `stop` in the caller's thread."""

    def __init__(self, server: Server, seed: int, recorder: Recorder, askers: int = 3):
        self._server, self._recorder, self._stop = server, recorder, threading.Event()
        work = [(self._ask_on, seed * 100 + n) for n in range(askers)]
        work += [(self._change_on, seed * 100 + 99)]
        self._threads = [
            threading.Thread(target=run, args=(random.Random(n),), daemon=True) for run, n in work
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every client end what it does."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S + 5)
            assert not thread.is_alive(), "a client hangs"

    def _ask_on(self, choices: random.Random) -> None:
        names = ("base", "base", *FIXED, *NAMES)
        while not self._stop.wait(0.05):
            self.ask(
                choices.choice(names),
                choices.randrange(len(PROMPTS)),
                choices.choice(LENGTHS),
                stream=choices.random() < 0.5,
            )

    def _change_on(self, choices: random.Random) -> None:
        while not self._stop.wait(0.4):
            name = choices.choice(NAMES)
            if choices.random() < 0.7:
                self.load(name, choices.choice(FOLDERS))
            else:
                self.unload(name)

    def ask(self, name: str, prompt: int, count: int, *, stream: bool, where="front") -> Operation:
        """Ask once and record it."""
        # A body of its own: the front refuses for a while what two instances ended with, and
        # schedules that share a cluster would ask it again.
        body = completion(name, prompt, count, stream=stream) | {"user": uuid.uuid4().hex}

        def read(answer: http.client.HTTPResponse) -> dict[str, Any]:
            return {"tokens": tokens_of(answer, stream=stream)}

        known = {"kind": "ask", "name": name, "prompt": prompt, "where": where}
        return self._do("/v1/completions", body, read, known)

    def load(self, name: str, folder: str) -> Operation:
        """Load a folder under a name, in place, and record it."""
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        known = {"kind": "load", "name": name, "content": folder}
        return self._do("/v1/load_lora_adapter", body, _whole, known)

    def unload(self, name: str) -> Operation:
        """Unload a name and record it."""
        known = {"kind": "unload", "name": name}
        return self._do("/v1/unload_lora_adapter", {"lora_name": name}, _whole, known)

    def _do(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[http.client.HTTPResponse], dict[str, Any]],
        known: dict[str, Any],
    ) -> Operation:
        start = time.monotonic()
        more: dict[str, Any] = {}
        try:
            connection = self._server.connect(known.get("where", "front"), PATIENCE_S)
            with contextlib.closing(connection):
                connection.connect()
                connection.request("POST", path, json.dumps(body), _JSON)
                more = read(connection.getresponse())
            outcome, status = ANSWERED, 200
        except Told as error:
            outcome, status, more = TOLD, error.status, {"text": str(error)}
        except TimeoutError:
            outcome, status = SILENT, 0
        except (ConnectionRefusedError, FileNotFoundError):
            outcome, status = REFUSED, 0
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome, status, more = CUT, 0, {"text": repr(error)}
        end = time.monotonic()
        operation = Operation(
            start_s=start, end_s=end, outcome=outcome, status=status, **known | more
        )
        self._recorder.add(operation)
        return operation


def _whole(answer: http.client.HTTPResponse) -> dict[str, Any]:
    text = answer.read().decode(errors="replace")
    if answer.status != 200:
        raise Told(answer.status, text)
    return {}


def ask_all(clients: Clients, places: Iterable[str]) -> None:
    """Ask for every name at every place, once everything is well again."""
    for where in places:
        for name in ("base", *FIXED, *NAMES):
            clients.ask(name, 0, LENGTHS[0], stream=False, where=where)
