"""Keeps a backbone's descriptors, starts functions over it and starts them again. No jax.

The agent holds no weights and maps nothing: it has the manifest, a descriptor per block, and the
zygote. Each function is sent the descriptors once, over a socket pair that nobody else can open.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from lora_jax.memory.wire import (
    ShareError,
    close_all,
    receive_fds,
    receive_header,
    send_fds,
    send_header,
)
from serving.api.functions_config import ISOLATIONS
from serving.functions.handle import Function
from serving.functions.policies.predict import stays
from serving.functions.room import Room
from serving.functions.running import Running
from serving.functions.tenants import DEFAULTS, Tenant, Tenants
from serving.functions.turn_keeper import TurnKeeper

_LOOK_S = 1.0  # between two looks for functions that nobody calls
_START_S = 600.0  # to build an engine, on a slow machine
_END_S = 10.0  # for a process to leave by itself
# Sizes of one function, where nothing else is asked for.
FIELDS = {
    "max_loras": 1,
    "structured_outputs": False,
    "enable_prefix_caching": True,
    "max_num_seqs": 16,
}


class Agent:
    """One backbone and its functions; any thread may call any method."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        keep_alive_s: float | None = None,
        memory_bytes: int | None = None,
        http: dict[str, Any] | None = None,
        ttft_slo_s: float | None = None,
        isolation: str = "process",
        max_tenants: int | None = None,
        **fields: Any,
    ):
        """Load the backbone and start the zygote; `fields` are those of `EngineConfig` for every
        function.

        With `memory_bytes` processes of functions hold no more together, the backbone aside: idle
        ones of little value end for one that is called; where all are busy it is DeviceFull.

        With `http` (settings of `messages.http_fields`, and budgets_folder) functions answer HTTP
        too, over the connections of `Function.connect`.

        Functions that promise a first token in `ttft_slo_s` have the device in turns, those first
        that have least time left. None: on an accelerator 5 times the measured prefill of one
        request; a CPU's cores are shared without turns.

        By `isolation` "process" each function has an engine of its own. By "server" all are rows of
        one engine, and each adapter is in a process of its own (`tenants`); by "none" the adapters
        are in the engine too. `max_tenants` are the most adapters of that engine at a time.

        With `keep_alive_s` a function without calls for so long loses its process, unless its next
        call is expected by the rate of the last ones (`policies.predict`); when that call is
        expected, the process is started ahead of it. None: functions stay.

        Raises ValueError for a model that cannot be shared, ConnectionError where a process ends.
        """
        self.model = str(Path(model).resolve())
        if not Path(self.model, "config.json").is_file():
            raise ValueError(f"Cannot share {self.model}: there is no config.json.")
        self._fields = FIELDS | fields | ({} if dtype is None else {"dtype": dtype})
        if ttft_slo_s is not None and not 0 < ttft_slo_s < 1e6:
            raise ValueError(f"ttft_slo_s must be in (0, 1e6) seconds, got {ttft_slo_s}.")
        if isolation not in ISOLATIONS:
            allowed = ", ".join(ISOLATIONS)
            raise ValueError(f"isolation must be one of {allowed}, got {isolation!r}.")
        if isolation == "process" and max_tenants is not None:
            raise ValueError(
                "max_tenants is a size of isolation 'server' and 'none': leave it out."
            )
        self._tenants: Tenants | None = None
        self._tenant_sizes: dict[str, Any] | None = None
        if isolation != "process":
            if ttft_slo_s is not None:
                raise ValueError(
                    f"ttft_slo_s gives functions turns; with isolation {isolation!r} one engine "
                    "batches them all: leave it out."
                )
            most = DEFAULTS["max_tenants"] if max_tenants is None else max_tenants
            apart = isolation == "server"
            self._tenant_sizes = DEFAULTS | {"max_tenants": most} if apart else None
            self._fields = {**self._fields, "max_loras": most}
            self._tenants = Tenants(self._launch, apart=apart)
        self._isolation = isolation
        self._http, self._room = http, Room(memory_bytes)
        self._turns: TurnKeeper | None = None
        self._slo_s = ttft_slo_s
        self._functions: dict[str, Function] = {}
        self._folders: dict[str, str | None] = {}  # of the functions' adapters
        self._starting = threading.Lock()  # functions start one at a time
        self._lock = threading.Lock()  # the zygote's connection
        self._zygote, self._control = _spawn("serving.functions.zygote")
        self._closing = threading.Event()
        self._fds: list[int] = []
        try:
            self._manifest, self._fds, self._device = self._load_backbone(dtype)
            if self._tenants is None and (ttft_slo_s is not None or self._device != "cpu"):
                self._turns = TurnKeeper()
            _expect(self._control, "ready")
        except BaseException:
            self._zygote.kill()
            self.close()
            raise
        _agents.add(self)
        if keep_alive_s is not None:
            args = weakref.ref(self), self._closing, keep_alive_s
            threading.Thread(target=_keep, args=args, name="keep-alive", daemon=True).start()

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def backbone_bytes(self) -> int:
        """Bytes of the backbone's memory, once for all functions."""
        return sum(self._manifest["blocks"])

    @property
    def engine(self) -> Running | None:
        """The process of the engine that all functions share, by isolation "server" or "none"."""
        return None if self._tenants is None else self._tenants.engine

    @property
    def functions(self) -> dict[str, Function]:
        """The functions by name."""
        return dict(self._functions)

    def function(
        self,
        adapter: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        lazy: bool = False,
    ) -> Function:
        """Start a function of one adapter folder, or of the base model; return when it is ready.

        A `lazy` one is not started before its first call. `name` is the folder's own where none is
        given. A name that runs already is that function.
        Raises ValueError for an adapter that cannot be served, and for a name that another
        adapter's function has.
        """
        folder = None if adapter is None else str(Path(adapter).resolve())
        name = name or (Path(folder).name if folder else "base")
        with self._starting:
            if name not in self._functions:
                self._functions[name] = Function(name, lambda: self._start(name, folder), lazy=lazy)
                self._folders[name] = folder
            if self._folders[name] != folder:
                raise ValueError(
                    f"Function {name!r} has the adapter {self._folders[name]}, not {folder}: give "
                    "another name."
                )
            return self._functions[name]

    def close(self) -> None:
        """End all functions, and give the backbone's memory back. A second call does nothing."""
        self._closing.set()
        for function in self._functions.values():
            function.close()
        self._functions.clear()
        if self._tenants is not None:
            self._tenants.close()
        with self._lock:  # no fork is under way, and none begins
            self._control.close()
            _end(self._zygote)
        if self._turns is not None:
            self._turns.close()
        close_all(self._fds)
        self._fds = []

    def _load_backbone(self, dtype: str | None) -> tuple[dict[str, Any], list[int], str]:
        process, connection = _spawn("serving.functions.backbone")
        try:
            with connection:
                send_header(connection, {"model": self.model, "dtype": dtype})
                answer = _expect(connection, "manifest")
                fds = receive_fds(connection, len(answer["manifest"]["blocks"]))
                send_header(connection, {"received": len(fds)})
        finally:
            _end(process)
        return answer["manifest"], fds, answer["device"]

    def _start(self, name: str, folder: str | None) -> Running | Tenant:
        """Return a new process of a function that is ready for calls."""
        self._room.make(name, self.functions)
        if self._tenants is not None:
            running = self._tenants.start(name, folder)
        else:
            running = Running(*self._launch({"name": name, "adapter": folder}))
        self._room.ready(name, running.about["private_bytes"], running.about["start_s"])
        return running

    def _launch(
        self, order: dict[str, Any], *, backbone: bool = True
    ) -> tuple[socket.socket, int, dict[str, Any]]:
        """Fork a process for an order; return its socket, its pid and what it says when ready.

        Without `backbone` it is one of an adapter alone. Raises ValueError with its reason,
        ConnectionError where it ends.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._fork(theirs.fileno())
            order = {"model": self.model, "fields": self._fields, "http": self._http} | order
            jailed = self._device == "cpu" and self._isolation != "none"
            order["jail"] = {"memory_bytes": self._room.limit} if jailed else None
            turns = None if self._turns is None else {"slo_s": self._slo_s}
            if backbone:
                shared = {"manifest": self._manifest, "turns": turns}
                order |= shared | {"tenants": self._tenant_sizes}
            send_header(ours, order)
            if backbone:
                send_fds(ours, self._fds)
                if self._turns is not None:
                    with self._turns.open(order["name"]) as end:
                        send_fds(ours, [end.fileno()])
            ours.settimeout(_START_S)
            ready = _expect(ours, "ready")
            ours.settimeout(None)
        except BaseException:
            ours.close()
            raise
        return ours, pid, ready

    def _fork(self, end: int) -> int:
        """Return the process id of a new function; a zygote that has gone is replaced."""
        with self._lock:
            order = {
                "fork": True,
                "device": self._device,
                "tenants": self._tenant_sizes is not None,
            }
            for attempt in range(2):
                try:
                    send_header(self._control, order)
                    send_fds(self._control, [end])
                    return receive_header(self._control)["pid"]
                except OSError:
                    if attempt or self._closing.is_set():
                        raise
                    self._control.close()
                    _end(self._zygote)
                    self._zygote, self._control = _spawn("serving.functions.zygote")
                    _expect(self._control, "ready")
        raise AssertionError("unreachable")


def _keep(agent: "weakref.ref[Agent]", closing: threading.Event, keep_alive_s: float) -> None:
    """Offload functions that nobody calls, and start those whose next call is expected."""
    while not closing.wait(min(_LOOK_S, keep_alive_s)):
        held = agent()
        if held is None:
            return
        functions = held.functions
        for function in functions.values():
            if not stays(function.arrivals, time.monotonic(), keep_alive_s):
                function.offload()
        for name in held._room.worth_starting(functions, time.monotonic()):
            if not closing.is_set():
                with contextlib.suppress(ConnectionError):  # its next call says why
                    functions[name].warm()
        del held, functions


_agents: "weakref.WeakSet[Agent]" = weakref.WeakSet()
_connected: dict[tuple[str, str], Agent] = {}
_connecting = threading.Lock()


def connect(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    **fields: Any,
) -> Function:
    """Return a function over the model's backbone, which this process loads once.

    Functions of the same model and `fields` share one backbone; all end with this process. Raises
    what Agent and Agent.function raise.
    """
    key = str(Path(model).resolve()), json.dumps(fields, sort_keys=True)
    with _connecting:
        if key not in _connected:
            _connected[key] = Agent(model, **fields)
    return _connected[key].function(adapter, name=name)


@atexit.register
def _close_all() -> None:
    for agent in list(_agents):
        agent.close()


def _spawn(module: str) -> tuple[subprocess.Popen, socket.socket]:
    """Start a module as a process; return it with our end of its only connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        try:
            process = subprocess.Popen([sys.executable, "-m", module, str(end)], pass_fds=[end])
        except BaseException:
            ours.close()
            raise
    return process, ours


def _expect(connection: socket.socket, key: str) -> dict[str, Any]:
    """Return the next message, which has `key`. Raises ValueError with the other side's reason."""
    try:
        answer = receive_header(connection)
    except (ShareError, TimeoutError) as error:
        raise ConnectionError(f"A process ended before it was ready: {error}.") from error
    if key not in answer:
        raise ValueError(answer.get("error", f"unexpected answer {answer}"))
    return answer


def _end(process: subprocess.Popen) -> None:
    """Wait for a process whose connection is closed; kill it if it does not leave."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
