"""Asks /health every 20 ms in a process of its own; prints its longest answers at SIGTERM.

python health_probe.py PORT: a JSON list of the longest answers in seconds, longest first.
"""

import contextlib
import heapq
import http.client
import json
import signal
import sys
import time

_KEPT = 20
_TIMEOUT_S = 30.0


def main(port: int) -> None:
    longest: list[float] = []

    def end(*_: object) -> None:
        print(json.dumps(sorted(longest, reverse=True)), flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    while True:
        start = time.monotonic()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, _TIMEOUT_S)) as to:
            to.request("GET", "/health")
            answer = to.getresponse()
            answer.read()
        took = time.monotonic() - start if answer.status == 200 else _TIMEOUT_S
        (heapq.heappush if len(longest) < _KEPT else heapq.heappushpop)(longest, took)
        time.sleep(0.02)


if __name__ == "__main__":
    main(int(sys.argv[1]))
