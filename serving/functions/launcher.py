"""Launches an agent's processes: forks, orders, descriptors and turns. No jax."""

import dataclasses
import logging
import socket
import time
from typing import Any

from lora_jax.memory.wire import send_fds, send_header
from serving.functions import jail
from serving.functions.processes import SEND_S, Ends, Stuck, Zygote, expect, is_stuck
from serving.functions.published import Published
from serving.functions.turns.keeper import TurnKeeper
from serving.runtime.program_files import step_keys

logger = logging.getLogger(__name__)

_START_S = 600.0  # for the rest of a message that has begun


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
    """Settings that all processes of an agent are told of."""

    model: str
    fields: dict[str, Any]  # of EngineConfig
    isolation: str
    tenant_sizes: dict[str, Any] | None  # None: no adapter is in a process of its own
    http: dict[str, Any] | None  # None: no function answers HTTP
    slo_s: float | None  # target of the first token in seconds
    memory_bytes: int | None  # bound of one process; None: none


class Launcher:
    """Starts processes by orders; any thread may call."""

    def __init__(
        self,
        settings: LaunchSettings,
        zygote: Zygote,
        backbone: Published,
        turns: TurnKeeper | None,
        ends: Ends,
    ):
        """Start nothing yet. All parts stay the caller's; `ends` notes each process."""
        self._settings, self._zygote, self._backbone = settings, zygote, backbone
        self._turns, self._ends = turns, ends
        self._steps: list[str] = []  # that the last process asked for, for the next one to read

    def launch(
        self,
        order: dict[str, Any],
        *,
        backbone: bool = True,
        programs: dict[str, bool] | None = None,
    ) -> tuple[socket.socket, int, dict[str, Any]]:
        """Fork a process for an order; return its socket, its pid and what it says when ready.

        Without `backbone` it is one of an adapter alone. `programs` says what it may do with those
        of functions. Raises ValueError with its reason, ConnectionError where it ends, or is stuck
        and is ended here.
        """
        device, fields = self._backbone.device, self._settings.fields
        asked = time.monotonic()
        ours, pid = self._zygote.fork(
            {
                "device": device,
                "tenants": self._settings.tenant_sizes is not None,
                "model": self._settings.model,
                "dtype": fields.get("dtype"),
            }
        )
        fork_s = time.monotonic() - asked
        self._ends.note(ours, pid)
        makes = backbone and not order.get("guard")  # an engine
        try:
            order = self._completed(order, programs, makes=makes)
            self._send(ours, order, backbone=backbone)
            ready = self._ready(ours, order, pid)
            if makes:
                self._steps = step_keys(ready.get("steps")) or self._steps
        except BaseException as error:
            if is_stuck(error):
                raise self._given_up(ours, pid, order["name"], error) from error
            ours.close()
            raise
        return ours, pid, ready | {"fork_s": fork_s}

    def _given_up(
        self, ours: socket.socket, pid: int, name: str, error: BaseException
    ) -> ConnectionError:
        """End a process that is stuck in its start; return the error that says so."""
        unread = isinstance(error, BlockingIOError)
        why = f"process {pid} has read nothing for {SEND_S:g} s" if unread else str(error)
        text = f"The start of {name!r} is given up, and its process is killed: {why}."
        logger.error("%s", text)
        self._ends.kill(ours)
        ours.close()
        return ConnectionError(text)

    def _completed(
        self, order: dict[str, Any], programs: dict[str, bool] | None, *, makes: bool
    ) -> dict[str, Any]:
        """Return the order with all that its process needs; tenants and guards make no engine."""
        of_agent, device = self._settings, self._backbone.device
        # Tenants and guards answer no HTTP: its settings name files of keys.
        http = of_agent.http if makes else None
        order = {"model": of_agent.model, "fields": of_agent.fields, "http": http} | order
        order["programs"] = self._programs(programs or ({} if makes else {"writes": False}))
        order["device"] = device
        order["jail"] = jail.limits(order, of_agent.isolation, device, of_agent.memory_bytes)
        order["steps"] = self._steps
        takes_turns = self._turns is not None and makes
        order["turns"] = {"slo_s": of_agent.slo_s} if takes_turns else None
        return order

    def _send(self, ours: socket.socket, order: dict[str, Any], *, backbone: bool) -> None:
        if backbone:
            self._backbone.send(ours, order | {"tenants": self._settings.tenant_sizes})
        else:
            send_header(ours, order)
        if order["turns"] is not None and self._turns is not None:
            with self._turns.open(order["name"]) as end:
                send_fds(ours, [end.fileno()])

    def _ready(self, ours: socket.socket, order: dict[str, Any], pid: int) -> dict[str, Any]:
        """Return what a process says when it is ready; it may begin a message and not end it."""
        ours.settimeout(_START_S)
        try:
            ready = expect(ours, "ready", pid)
        except Stuck:
            raise
        except ConnectionError as error:
            raise ConnectionError(f"{error}{jail.bound_of(order['jail'])}") from error
        ours.settimeout(None)
        return ready

    def _programs(self, given: dict[str, bool]) -> dict[str, Any] | None:
        """Return how a process keeps programs. None: as a server of this user does.

        The engine of isolation "server" has a folder of its own, which nothing else reads.
        """
        if self._settings.isolation == "none":
            return None
        kind = "functions" if self._settings.isolation == "process" else "engines"
        return {"kind": kind, "writes": True, **given}
