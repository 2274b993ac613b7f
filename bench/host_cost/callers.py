"""Callers of a server, each of which asks again when it has been answered; a process of its own.

`python -m bench.host_cost.callers PORT CALLERS ROUNDS TOKENS KIND STREAM` prints the tokens got.
"""

import asyncio
import json
import random
import sys

PROMPT = 64  # tokens
_ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def body_of(kind: str, caller: int, tokens: int, *, stream: bool) -> bytes:
    """Return a request whose answer has exactly so many tokens."""
    rng = random.Random(caller)
    body = {"model": "tiny-moe", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": f"{caller} " + "abc " * 10}]
    else:
        body["prompt"] = [rng.randrange(300, 3000) for _ in range(PROMPT)]
    return json.dumps(body | {"temperature": 0}).encode()


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: str, body: bytes
) -> int:
    """Return the completion tokens of one answer; RuntimeError for any status but 200."""
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    told = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in told.partition(b"\r\n")[0]:
        raise RuntimeError((told + await reader.read(2000)).decode())
    if b"chunked" in told:
        text = await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        text = await reader.readexactly(int(told.split(b"content-length:")[1].split()[0]))
    return int(text.rpartition(b'"completion_tokens":')[2].split(b",")[0])


async def call(port: int, caller: int, rounds: int, tokens: int, kind: str, stream: bool) -> int:
    """Return the tokens that one caller gets over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    body = body_of(kind, caller, tokens, stream=stream)
    got = sum([await ask(reader, writer, _ROUTES[kind], body) for _ in range(rounds)])
    writer.close()
    return got


async def main() -> None:
    """Run all callers at once."""
    port, callers, rounds, tokens = map(int, sys.argv[1:5])
    rest = rounds, tokens, sys.argv[5], sys.argv[6] == "stream"
    print(sum(await asyncio.gather(*(call(port, one, *rest) for one in range(callers)))))


if __name__ == "__main__":
    asyncio.run(main())
