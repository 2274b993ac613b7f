"""Cost of requests that cannot be answered, or hardly, to a server and its other callers.

`python -m bench.bad_requests --out DIR` serves the shipped model and sends structures, tools and
streams that are hostile, one after the other. Another caller asks for two tokens all the while. A
row has the status, the time to the answer, the time of the next request with a new structure
("next_s"), the other caller's longest wait, the memory of the process that checks structures, and
by how much the server's grew. The command fails if a next or other request fails.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import socket
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import record
from bench.end_to_end.server import Server

MODEL = Path(__file__).parents[1] / "assets" / "tiny-moe"
CHECKER = b"serving.text.structured.check_process"
MOST_BODY_S = 60.0
CUT_STREAMS = 40
_EVERY_S = 0.01
_MIB = 1 << 20
Body = dict[str, Any]


def nested(depth: int) -> Body:
    """Return a schema of objects in objects."""
    schema: Body = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chained_references(count: int) -> Body:
    """Return definitions that each need the next one: the library recurses over them."""
    chain = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def crossed_patterns(count: int) -> Body:
    """Return patterns whose meet has states without number: hours, and all memory."""
    return {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(count)]}


def _tools(count: int, parameters: Body | None = None) -> list[Body]:
    more = {} if parameters is None else {"parameters": parameters}
    return [{"type": "function", "function": {"name": f"t{i}", **more}} for i in range(count)]


def structures() -> dict[str, Body]:
    """Return `structured_outputs` by what is bad about them."""
    one = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
    keys = [{"properties": {f"k{i}": {}}} for i in range(4000)]
    pairs = [{"anyOf": [{"properties": {f"a{i}{j}": {"const": i}}} for j in range(3)]}
             for i in range(14)]  # fmt: skip
    rules = "".join(f'r{i}: r{i + 1} "x" | "y"\n' for i in range(3000))
    return {
        "40 objects in objects": {"json": nested(40)},
        "JSON 20,000 levels deep": {"json": '{"a":' * 20_000 + "1" + "}" * 20_000},
        "10,000 alternatives": {"json": {"anyOf": [{"const": i} for i in range(10_000)]}},
        "7,000 alternatives": {"json": {"anyOf": [{"const": i} for i in range(7_000)]}},
        "enum of 10,000": {"json": {"enum": [f"v{i}" for i in range(10_000)]}},
        "10,000 choices": {"choice": [f"c{i}" for i in range(10_000)]},
        "4,000 objects as alternatives": {"json": {"anyOf": keys}},
        "3 to the power of 14 objects": {"json": {"allOf": pairs}},
        "regex (a+)+b": {"regex": "(a+)+b"},
        "regex .*a.{1000}": {"regex": ".*a.{1000}"},
        "regex of powers": {"regex": "((a{0,1000}){0,1000}){0,1000}b"},
        "30 patterns that cross": {"json": crossed_patterns(30)},
        "a reference to itself": {"json": {"$ref": "#"}},
        "references in a circle": {"json": one},
        "a list that recurses": {"json": {"$defs": {"n": node}, "$ref": "#/$defs/n"}},
        "1,500 references in a chain": {"json": chained_references(1500)},
        "3,000 rules that recurse": {"grammar": f'start: r0\n{rules}r3000: "z"'},
        "5,000 schemas in a grammar": {"grammar": "start: " + "%json {} " * 5000},
        "GBNF after 60,000 lines": {"grammar": "\n" * 60_000 + "x ::="},
        "a schema elsewhere": {"json": {"$ref": "http://example.com/schema.json"}},
    }


def chats() -> dict[str, Body]:
    """Return tools of chats by what is bad about them."""
    fields = {f"p{i}": {"type": "string", "maxLength": 50} for i in range(40)}
    required: Body = {"tool_choice": "required"}
    large, bomb = {"type": "object", "properties": fields}, {"p": crossed_patterns(30)}
    crossed = {"type": "object", "properties": bomb, "required": ["p"]}
    small = {"type": "object", "maxProperties": 0}
    return {
        "a tool without a name": {"tools": [{"type": "function", "function": {}}]},
        "two tools of one name": {"tools": [*_tools(1), *_tools(1)]},
        "129 tools": {"tools": _tools(129)} | required,
        "100,000 tools": {"tools": _tools(100_000)} | required,
        "128 tools of 40 fields": {"tools": _tools(128, large)} | required,
        "128 tools": {"tools": _tools(128, small)} | required,
        "a tool with patterns that cross": {"tools": _tools(1, crossed)} | required,
    }


def post(url: str, body: Body) -> tuple[int, Body]:
    """Return status and JSON of an answer, also of one that is an error.

    A server may answer to a large body and close before it has read it.
    """
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=MOST_BODY_S)
    with contextlib.closing(connection):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", parts.path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer)


def cut_streams(url: str) -> tuple[int, Body]:
    """Begin streams of bound answers and demanded calls, and close each after some bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    bound = {"prompt": "x", "structured_outputs": {"regex": "[a-z]{400}"}}
    demanded = {"messages": [{"role": "user", "content": "x"}], **chats()["128 tools"]}
    for number in range(CUT_STREAMS):
        route, body = ("completions", bound) if number % 2 else ("chat/completions", demanded)
        data = json.dumps({"max_tokens": 300, "stream": True, **body}).encode()
        lines = [f"POST /v1/{route} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(data)}", "Connection: close", "", ""]
        with socket.create_connection((host, int(port)), timeout=MOST_BODY_S) as stream:
            stream.sendall("\r\n".join(lines).encode() + data)
            left = 150 + 60 * number
            while left > 0 and (piece := stream.recv(left)):
                left -= len(piece)
    return 200, {}


@dataclasses.dataclass
class Watch:
    """Measures another caller's waits, and memory, while `on`."""

    url: str
    pid: int
    worst_s: float = 0.0
    num_asked: int = 0
    failed: str = ""
    checker_bytes: int = 0
    server_bytes: int = 0

    @contextlib.contextmanager
    def on(self):
        """Watch until the block ends."""
        ended = threading.Event()
        threads = [threading.Thread(target=f, args=(ended,)) for f in (self._ask, self._look)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def _ask(self, ended: threading.Event) -> None:
        body = {"prompt": "x", "max_tokens": 2, "temperature": 0}
        while not ended.wait(_EVERY_S):
            began = time.perf_counter()
            try:
                status, answer = post(f"{self.url}/v1/completions", body)
            except OSError as error:
                status, answer = 0, {"error": str(error)}
            self.worst_s = max(self.worst_s, time.perf_counter() - began)
            self.num_asked += 1
            self.failed = self.failed or ("" if status == 200 else str(answer))

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(_EVERY_S):
            self.server_bytes = max(self.server_bytes, resident(self.pid))
            checker = checker_of(self.pid)
            self.checker_bytes = max(self.checker_bytes, resident(checker) if checker else 0)


def resident(pid: int) -> int:
    """Return the bytes of a process in memory, 0 for one that has ended."""
    with contextlib.suppress(OSError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    return 0


def checker_of(pid: int) -> int | None:
    """Return the process of a server that checks structures, if it runs."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                if CHECKER in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    return int(child)
    return None


def measure(server: Server) -> list[dict[str, Any]]:
    """Return a row for each bad request; RuntimeError if another request fails."""
    url = server.url
    asked: dict[str, Callable[[], tuple[int, Body]]] = {
        "none, for comparison": lambda: post(f"{url}/v1/completions", {"prompt": "x"})
    }
    for name, outputs in structures().items():
        body = {"prompt": "x", "max_tokens": 64, "structured_outputs": outputs}
        asked[name] = lambda body=body: post(f"{url}/v1/completions", body)
    for name, fields in chats().items():
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 64, **fields}
        asked[name] = lambda body=body: post(f"{url}/v1/chat/completions", body)
    asked[f"{CUT_STREAMS} streams cut by the client"] = lambda: cut_streams(url)
    ask_next(url, 0)
    return [row_of(server, number, *one) for number, one in enumerate(asked.items(), 1)]


def row_of(
    server: Server, number: int, name: str, ask: Callable[[], tuple[int, Body]]
) -> dict[str, Any]:
    """Send one bad request and the next good one, and return the row."""
    before, watch = resident(server.pid), Watch(server.url, server.pid)
    with watch.on():
        began = time.perf_counter()
        status, answer = ask()
        taken = time.perf_counter() - began
        next_s = ask_next(server.url, number)
    if watch.failed:
        raise RuntimeError(f"{name}: another request failed: {watch.failed}")
    return {
        "request": name,
        "status": status,
        "s": round(taken, 2),
        "next_s": round(next_s, 2),
        "others_worst_ms": round(1e3 * watch.worst_s),
        "others": watch.num_asked,
        "checker_mib": watch.checker_bytes // _MIB,
        "server_grew_mib": max(0, watch.server_bytes - before) // _MIB,
        "message": answer.get("error", {}).get("message", ""),
    }


def ask_next(url: str, number: int) -> float:
    """Ask for a structure that is new; return the time to its answer, RuntimeError without."""
    choice = f"fine {number}"
    began = time.perf_counter()
    body = {"prompt": "x", "max_tokens": 32, "structured_outputs": {"choice": [choice]}}
    status, answer = post(f"{url}/v1/completions", body)
    if status != 200 or answer["choices"][0]["text"] != choice:
        raise RuntimeError(f"the next request failed: {status} {answer}")
    return time.perf_counter() - began


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.bad_requests", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of bad_requests_cpu.json")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    about = record.about()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(MODEL, args.port, [], Path(folder) / "log.txt")
        try:
            rows = measure(server)
        finally:
            server.stop()
    record.write(args.out / "bad_requests_cpu.json", about | {"rows": rows})
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
