"""A server that ends: what is new is refused, what runs gets time, the rest is told."""

import asyncio
import json

from serving.http.wire.drain import Drain


class Client:
    """One request to an application, and what it was sent."""

    def __init__(self, app, path="/x"):
        self.sent, self.left = [], asyncio.Event()
        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def start(kind=b"text/plain"):
    headers = [(b"content-type", kind)]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


async def never(scope, receive, send):
    await asyncio.Event().wait()


async def stream(scope, receive, send):
    await send(start(b"text/event-stream; charset=utf-8"))
    await send(part(b"data: 1\n\n"))
    await never(scope, receive, send)


async def soon(scope, receive, send):
    await asyncio.sleep(0.05)
    await send(start())
    await send(part(b"done", more=False))


def end_of(app, seconds, path="/x"):
    """Return what a client of the app has got when the server has ended."""

    async def run():
        drain = Drain(app)
        client = Client(drain, path)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await drain.finish(seconds)
        late = Client(drain)
        await asyncio.wait({client.task, late.task}, timeout=60)
        assert client.task.done()
        assert client.task.exception() is None
        assert drain.running == 0
        assert late.status == 503
        assert (b"retry-after", b"5") in late.sent[0]["headers"]
        return client

    return asyncio.run(run())


def test_what_runs_is_answered():
    client = end_of(soon, 20.0)
    assert (client.status, client.text) == (200, "done")


def test_a_request_without_an_answer_gets_503():
    assert end_of(never, 0.05).status == 503


def test_a_stream_ends_with_an_error_event_and_without_done():
    client = end_of(stream, 0.05)
    first, event, rest = client.text.split("\n\n")
    assert (first, rest) == ("data: 1", "")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == 503
    assert not client.sent[-1].get("more_body", False)


def test_probes_are_answered_meanwhile():
    async def run():
        drain = Drain(soon)
        drain.is_draining = True
        probes = [
            Client(drain, path) for path in ("/live", "/ping", "/health", "/metrics", "/ready")
        ]
        await asyncio.wait({probe.task for probe in probes})
        return [probe.status for probe in probes]

    assert asyncio.run(run()) == [200, 200, 200, 200, 503]


def test_an_error_of_the_application_passes():
    async def broken(scope, receive, send):
        raise RuntimeError("broken")

    async def run():
        await asyncio.wait({(task := Client(Drain(broken)).task)})
        return task.exception()

    assert str(asyncio.run(run())) == "broken"
