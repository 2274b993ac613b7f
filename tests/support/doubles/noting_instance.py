"""An instance behind the front that notes what it is asked."""

import asyncio
import json
import threading


class Instance:
    """An application that notes what it is asked; `fail` is a status for what changes adapters."""

    def __init__(self, number):
        self.number, self.asked, self.fail, self.gone = number, [], None, threading.Event()
        self.status = 200

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        message = await receive()
        body = message.get("body", b"")
        self.asked.append((scope["method"], scope["path"], scope["query_string"], body))
        if scope["path"] == "/endless":
            await self._endless(receive, send)
            return
        if scope["path"] == "/cut":
            await self._cut(send)
            return
        while message.get("more_body"):
            message = await receive()
        if scope["path"] == "/slow":
            await asyncio.sleep(0.3)
        status = self.fail if self.fail and "adapter" in scope["path"] else self.status
        text = json.dumps({"instance": self.number, "path": scope["path"]}).encode()
        if scope["path"] == "/metrics":
            text = b"# TYPE up gauge\nup 1.0\n"
        headers = [(b"content-length", str(len(text)).encode()), (b"x-number", b"%d" % self.number)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def _cut(self, send):
        """A stream whose process ends."""
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})

    async def _endless(self, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watch = asyncio.ensure_future(receive())
        while not watch.done():
            await send({"type": "http.response.body", "body": b"more\n", "more_body": True})
            await asyncio.sleep(0.01)
        assert watch.result()["type"] == "http.disconnect"
        self.gone.set()
