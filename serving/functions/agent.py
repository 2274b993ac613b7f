"""Keeps a backbone's descriptors, starts functions over it and starts them again. No jax.

The agent holds no weights and maps nothing: it has the manifest, a descriptor per block, and the
zygote. Each function is sent the descriptors once, over a socket pair that nobody else can open.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from lora_jax.adapters.formats import esft_format
from serving.api.functions_config import check_options, checked_fields
from serving.functions import jail
from serving.functions.guard import Guard
from serving.functions.handle import Function
from serving.functions.launcher import Launcher, LaunchSettings
from serving.functions.processes import Ends, Zygote
from serving.functions.program_maker import ProgramMaker
from serving.functions.published import Published
from serving.functions.room import Room
from serving.functions.running import Running
from serving.functions.seen_memory import SeenMemory
from serving.functions.shared_adapters import check_processes, shared_on
from serving.functions.tenants import DEFAULTS, Tenant, Tenants
from serving.functions.turns.keeper import TurnKeeper

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks for functions that nobody calls


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
        tenant_processes: str | None = None,
        verify_s: float | None = None,
        **fields: Any,
    ):
        """Load the backbone and start the zygote; `fields` are those of `EngineConfig` for every
        function.

        `memory_bytes` limits the memory of all function processes together, without the backbone:
        idle functions of least value end for one that is called; if all are busy, its call raises
        DeviceFull.

        With `http` (settings of `messages.http_fields`, and budgets_folder) functions answer HTTP
        too, over the connections of `Function.connect`.

        With `ttft_slo_s`, the target of the first token in seconds, functions use the device in
        turns; the one with the least time left is first. None: on an accelerator 5 times the
        measured prefill of one request; on a CPU no turns.

        With `isolation` "process" each function has its own engine. With "server" one engine
        batches the rows of all functions, and adapters are in other processes (`tenants`): by
        `tenant_processes` "each" in one for each adapter, the default on CPUs, or by "one" in one
        for all, which has a device of its own, the default on GPUs and all that they can. With
        "none" the adapters are in the engine too. `max_tenants` is the largest number of adapters
        of that engine at a time.

        With `verify_s` a process hashes the backbone at this interval, in seconds, and when a
        function dies (`guard`). If bytes have changed, the backbone is loaded again and functions
        are restarted.

        With `keep_alive_s` the process of a function ends after so many seconds without a call,
        unless the rate of the last calls predicts the next one (`policies.predict`). A process is
        also started ahead of a predicted call. None: functions stay.

        Raises ValueError for a model that cannot be shared and for an unknown field,
        ConnectionError if a process ends.
        """
        options = {"keep_alive_s": keep_alive_s, "memory_bytes": memory_bytes}
        options |= {"ttft_slo_s": ttft_slo_s, "verify_s": verify_s}
        check_options(options | {"isolation": isolation, "max_tenants": max_tenants})
        check_processes(tenant_processes, isolation)
        self.model = str(Path(model).resolve())
        dtype = None if dtype == "auto" else dtype
        self._fields = checked_fields(self.model, dtype, fields)
        most = DEFAULTS["max_tenants"] if max_tenants is None else max_tenants
        if isolation != "process":
            self._fields["max_loras"] = most
        self._functions: dict[str, Function] = {}
        self._folders: dict[str, str | None] = {}  # of the functions' adapters, as given
        self._read: dict[str, str | None] = {}  # where they led when the last processes started
        self._naming = threading.Lock()
        self._ends, self._closing = Ends(), threading.Event()
        self._guard: Guard | None = None
        self._tenants: Tenants | None = None
        self._tenant_processes, self._max_tenants = tenant_processes, most
        self._published: Published | None = None
        self.turns: TurnKeeper | None = None
        self._zygote = Zygote()
        self._seen = SeenMemory(self._zygote)
        self._room = Room(memory_bytes, self._seen.least_of)
        settings = LaunchSettings(
            model=self.model,
            fields=self._fields,
            isolation=isolation,
            tenant_sizes=None,
            http=http,
            slo_s=ttft_slo_s,
            memory_bytes=self._room.limit,
        )
        try:
            self._load(settings, dtype, verify_s)
        except BaseException:
            self._zygote.kill()
            self.close()
            raise
        _agents.add(self)
        if keep_alive_s is not None:
            args = weakref.ref(self), self._closing, keep_alive_s
            threading.Thread(target=_keep, args=args, name="keep-alive", daemon=True).start()

    def _load(self, settings: LaunchSettings, dtype: str | None, verify_s: float | None) -> None:
        """Load the backbone beside the zygote's start, and make what starts processes over both."""
        self._published = Published(self.model, dtype)
        self._seen.shared_bytes = self._published.num_bytes
        on_device, isolation = self._published.device != "cpu", settings.isolation
        shared = None
        if isolation == "server":
            device, sizes = self._published.device, (self._end, self._max_tenants)
            shared = shared_on(device, self._tenant_processes, *sizes)
            tenants = DEFAULTS | {"max_tenants": self._max_tenants}
            tenants |= {} if shared is None else {"address": shared.address}
            settings = dataclasses.replace(settings, tenant_sizes=tenants)
        if isolation == "process" and (settings.slo_s is not None or on_device):
            self.turns = TurnKeeper()
        parts = self._zygote, self._published, self.turns, self._ends
        launch = Launcher(settings, *parts).launch
        self._maker = ProgramMaker(launch, self._end)
        if isolation != "process":
            self._tenants = Tenants(launch, apart=isolation == "server", shared=shared)
        self._zygote.expect_ready()
        if verify_s is not None:
            self._guard = Guard(launch, verify_s, self._fail_over)

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def backbone_bytes(self) -> int:
        """Bytes of the backbone's memory, once for all functions."""
        return self._backbone.num_bytes

    @property
    def _backbone(self) -> Published:
        assert self._published is not None, "an agent without a backbone"
        return self._published

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

        A `lazy` function is started at its first call. The default of `name` is the folder's name.
        If the name already has a function of this adapter, that function is returned, or a new one
        where it was closed. If the folder is a link that leads elsewhere by now, the function's
        process ends once no call is under way; the next one reads the new folder.
        Raises ValueError for an adapter that cannot be served, and for a name that another
        adapter's function has; DeviceFull where there is no room for its process or adapter now.
        """
        if not isinstance(name, str | None):
            raise TypeError(f"The name of a function must be a str, got {name!r}.")
        folder = None if adapter is None else os.path.abspath(adapter)
        name = name or ("base" if folder is None else Path(folder).resolve().name)
        with self._naming:
            held = self._functions.get(name)
            is_new = held is None or held.state == "closed"
            if is_new:
                start = functools.partial(self._start_from, name, folder)
                self._functions[name] = Function(name, start, lazy=True)
                self._folders[name] = folder
            self._check_folder(name, folder)
            function = self._functions[name]
        if self._read.get(name) not in (None, _followed(folder)):
            function.offload()  # the next process reads what the link leads to now
        if is_new and not lazy:
            self._begin(function)
        elif not lazy and function.state == "starting":
            function.warm()
        return function

    def _check_folder(self, name: str, folder: str | None) -> None:
        """Raise ValueError where a function of this name has another adapter than this folder's."""
        held = self._folders[name]
        if folder != held and _followed(folder) != _followed(held):
            serves, wanted = (
                "the base model" if one is None else f"the adapter {one}" for one in (held, folder)
            )
            raise ValueError(f"Function {name!r} has {serves}, not {wanted}: give another name.")

    def _begin(self, function: Function) -> None:
        """Start a new function's first process; one that does not start has no name here."""
        try:
            function.begin()
        except BaseException:
            with self._naming:
                if self._functions.get(function.name) is function:
                    del self._functions[function.name]
            function.close()
            raise

    def close(self) -> None:
        """End all functions, and give the backbone's memory back. A second call does nothing."""
        self._closing.set()
        if self._guard is not None:
            self._guard.close()
        for function in self.functions.values():  # a copy: a start that fails takes its name away
            function.close()
        self._functions.clear()
        if self._tenants is not None:
            self._tenants.close()
        self._zygote.close()
        if self.turns is not None:
            self.turns.close()
        if self._published is not None:
            self._published.close()

    def _fail_over(self, changed: list[str]) -> None:
        """Load the backbone anew; its functions end, and start again over the new pages.

        Raises what `Published.renew` raises; functions then stay without processes.
        """
        logger.error(
            "%d arrays of the backbone have changed, %s first: loading it again.",
            len(changed),
            changed[0],
        )
        why = "The bytes of the backbone have changed, and it has to be loaded anew."
        users = self._backbone.condemn(why)  # also those that still start
        for connection in users:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._tenants is not None and (engine := self._tenants.engine) is not None:
            engine.close()
        for function in self.functions.values():
            if (running := function.running) is not None:
                running.close()
        self._ends.wait(users)  # they hold the old pages, beside which new ones may have no room
        self._backbone.renew()

    def _start_from(self, name: str, folder: str | None) -> Running | Tenant:
        """Return a new process of what a folder is now, which may be a link."""
        self._read[name] = _followed(folder)
        return self._start(name, self._read[name])

    def _start(self, name: str, folder: str | None) -> Running | Tenant:
        """Return a new process of a function that is ready for calls."""
        if self._closing.is_set():
            raise ConnectionError("The agent is closed: make another one.")
        if folder is not None and (Path(folder) / esft_format.CONFIG_FILE).is_file():
            raise ValueError(
                f"Function {name!r} cannot start: {folder} is an ESFT adapter, and functions serve "
                "LoRA adapters alone; use an engine, or a server without functions."
            )
        self._room.make(name, self.functions)
        try:
            function = self._functions.get(name)
            if self._guard is not None and function is not None and function.starts:  # one ended
                self._guard.look()
            begun = time.monotonic()
            running = self._process(name, folder)
            start_s = min(time.monotonic() - begun, running.about["start_s"])
            self._grown(name, running.own_pid, running.about["private_bytes"])
            self._room.ready(name, start_s)
        except BaseException:
            self._room.failed(name)
            raise
        return running

    def _process(self, name: str, folder: str | None) -> Running | Tenant:
        """Return a new process of an adapter's folder, read as it is now."""
        if self._tenants is not None:
            return self._tenants.start(name, folder)
        compiles = not jail.stops_compiling(self._backbone.device)
        order = {"name": name, "adapter": folder}
        launched = self._maker.start(order, self._fields, compiles=compiles)
        running = Running(*launched)
        running.on_end = functools.partial(self._ends.see_off, name, running.pid, launched[0])
        running.on_lack = functools.partial(self._maker.lacked, folder)
        running.on_grown = functools.partial(self._grown, name, running.pid)
        return running

    def _grown(self, name: str, pid: int | None, said: Any) -> None:
        """A function's process says what it holds, which counts as far as it can be."""
        self._room.grown(name, self._seen.bytes_of(pid, said))

    def _end(self, connection: socket.socket) -> None:
        """Close a process' connection; return when its memory is free."""
        connection.close()
        self._ends.wait([connection])


def _followed(folder: str | None) -> str | None:
    return None if folder is None else os.path.realpath(folder)


def _keep(agent: "weakref.ref[Agent]", closing: threading.Event, keep_alive_s: float) -> None:
    """Offload functions that nobody calls, and start those whose next call is expected."""
    while not closing.wait(min(_LOOK_S, keep_alive_s)):
        held = agent()
        if held is None:
            return
        functions = held.functions
        for function in functions.values():
            if not function.arrivals.stays(time.monotonic(), keep_alive_s):
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
    key = str(Path(model).resolve()), json.dumps(fields, sort_keys=True, default=repr)
    with _connecting:
        if key not in _connected:
            _connected[key] = Agent(model, **fields)
    return _connected[key].function(adapter, name=name)


@atexit.register
def _close_all() -> None:
    for agent in list(_agents):
        agent.close()
