"""A backbone's pages on this machine's device: attaching, bytes counted once, writes, the owner's
death. This process holds descriptors and has no device, as an agent."""

import itertools
import signal
import socket
import subprocess
import sys
from typing import Any

from lora_jax.memory.wire import close_all, receive_fds, receive_header, send_fds, send_header

GB = 10**9


class Worker:
    """A process with a context of its own."""

    def __init__(self, role: str):
        """Start it; returns when its context is there."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            command = [sys.executable, "-m", "bench.functions.page_worker", str(end), role]
            self.process = subprocess.Popen(command, pass_fds=[end])
        self.connection.settimeout(120)
        self.used = receive_header(self.connection)["used"]

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to an order; "gone" where the process has ended."""
        try:
            send_header(self.connection, order)
            return receive_header(self.connection)
        except OSError:
            return {"outcome": "the process has ended", "same": None}

    def kill(self) -> None:
        """End it at once."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def measure(sizes_gb: list[float], counts: list[int]) -> list[dict[str, Any]]:
    """Return a row per size: attach times of importers, and bytes of each beside its context.

    For the last size also what writes do, for the others whether pages outlive their owner.
    """
    rows = []
    for number, size in enumerate(sizes_gb):
        owner = Worker("owner")
        made = owner.ask({"bytes": int(size * GB)})
        fds = receive_fds(owner.connection, len(made["manifest"]["blocks"]))
        importers = [Worker("importer") for _ in range(max(counts))]
        told = [_attach(one, made["manifest"], fds) for one in importers]
        row = {
            "gb": size,
            "blocks": len(fds),
            "made_s": round(made["made_s"], 3),
            "attach_s": [round(one["attach_s"], 4) for one in told],
            "reads_right": all(one["same"] for one in told),
            "attach_bytes": [one["used"] - one["used_before"] for one in told],
            "process_bytes": [b.used - a.used for a, b in itertools.pairwise(importers)],
        }
        if number + 1 == len(sizes_gb):
            row |= _writes(importers, owner)
        else:
            row |= _orphans(importers, owner, made["manifest"], fds)
        for one in (*importers, owner):
            one.kill()
        close_all(fds)
        rows.append(row)
    return rows


def _attach(one: Worker, manifest: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    send_header(one.connection, {"manifest": manifest})
    send_fds(one.connection, fds)
    return receive_header(one.connection)


def _writes(importers: list[Worker], owner: Worker) -> dict[str, Any]:
    """Return what each way of writing did, and whether the owner's bytes are as they were."""
    found = {}
    for way, one in zip(("copy", "set", "grant"), importers, strict=False):
        outcome = one.ask({"write": way})["outcome"]
        found[f"write_{way}"] = f"{outcome}; owner's bytes the same: {owner.ask({})['same']}"
    return found


def _orphans(
    importers: list[Worker], owner: Worker, manifest: dict[str, Any], fds: list[int]
) -> dict[str, Any]:
    """Return whether a new importer attaches to pages whose owner and importers were killed."""
    for one in (*importers, owner):
        one.kill()
    late = Worker("importer")
    told = _attach(late, manifest, fds)
    late.kill()
    return {"orphan_attach_s": round(told["attach_s"], 4), "orphan_reads_right": told["same"]}
