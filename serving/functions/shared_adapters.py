"""The one process with all adapters of an engine, as its agent starts it and starts it again.

Isolation `server` on GPUs: the engine is on one GPU, this process on the next one. No jax.
"""

import contextlib
import itertools
import logging
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from serving.functions.messages import DeviceFull, value_of_start
from serving.functions.running import Running
from serving.runtime.socket_folder import socket_folder
from serving.runtime.visible_gpus import VISIBLE, count_visible

logger = logging.getLogger(__name__)

Launch = Callable[..., tuple[socket.socket, int, dict[str, Any]]]
EACH, ONE = "each", "one"
TENANT_PROCESSES = EACH, ONE  # a process for each adapter, or one for all
_LOAD_S = 120.0  # to read an adapter and to write it to the device, which is done one by one
_PLACE_S = 2.0  # for an adapter that has left to be out of all steps
_NAME = "The process of all adapters"
_CLOSED = "The agent is closed."
_GPU = 1  # among those of the agent; the engine has the first one


class Loaded(NamedTuple):
    """An adapter in the process."""

    process: Running
    life: int  # of the process: the engine connects to each once
    number: int  # of the adapter, never given twice
    report: dict[str, Any]


class SharedAdapters:
    """That process; any thread may call."""

    def __init__(self, end: Callable[[socket.socket], None], most: int):
        """`end` waits for the end of a process by its connection; `most` is the number of adapters
        at a time.
        """
        self._launch: Launch | None = None
        self._end, self._most = end, most
        self._folder = socket_folder("lora-jax-")
        self.address = str(self._folder / "adapters")
        self._starting = threading.Lock()
        self._places = threading.Condition()
        self._taken: dict[int, int] = {}  # numbers by place
        self._loaded: set[int] = set()  # those that the process has read
        self._heard = 0.0  # when it last answered a load, of time.monotonic
        self._rounds = itertools.count()
        self._process: Running | None = None
        self._connection: socket.socket | None = None
        self._life = 0
        self._closed = False
        self._on_end: Callable[[Running], None] = lambda process: None

    def use(self, launch: Launch, on_end: Callable[[Running], None]) -> None:
        """Start processes by `launch`, which is Tenants'; tell `on_end` of each that ends."""
        self._launch, self._on_end = launch, on_end

    @property
    def process(self) -> Running | None:
        """The process that is ready now."""
        process = self._process
        return None if process is None or process.ended else process

    def load(self, name: str, folder: str, sizes: dict[str, Any]) -> Loaded:
        """Have the process hold an adapter; `sizes` are the engine's, for a process to begin with.

        Raises ValueError for an adapter that cannot be served, DeviceFull where it has no place
        now, and another ConnectionError where the process ends, or reads nothing for _LOAD_S.
        """
        process, life = self._running(sizes)
        number = self._take_number()
        try:
            call = {"call": "load", "number": number, "name": name, "folder": folder}
            answer = self._answer_to_load(name, process, process.send(call))
            report = value_of_start(name, _NAME, answer)
            with self._places:
                if self._taken.get(number % self._most) == number:
                    self._loaded.add(number)
        except BaseException:
            self.free(number)
            raise
        return Loaded(process, life, number, report)

    def free(self, number: int) -> None:
        """Hold an adapter no more; a number that is not held is left alone."""
        place = number % self._most
        with self._places:
            if self._taken.get(place) != number:
                return
            if (process := self.process) is not None:
                process.send({"call": "unload", "number": number})
            del self._taken[place]
            self._loaded.discard(number)
            self._places.notify_all()

    def stop(self) -> None:
        """End the process; the next `load` starts another one."""
        if (process := self._process) is not None:
            process.give_up()

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer_to_load(
        self, name: str, process: Running, answers: "queue.SimpleQueue[dict[str, Any]] | None"
    ) -> dict[str, Any] | None:
        """Return the process' answer; None: it had ended before. Raises ConnectionError.

        The time counts from its last answer: loads wait for those before them.
        """
        if answers is None:
            return None
        asked = time.monotonic()
        while (left := max(asked, self._heard) + _LOAD_S - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=left)
                self._heard = time.monotonic()
                return answer
        with self._places:
            serves = bool(self._loaded)
        if not serves:  # else calls of the others would end; they find out whether it hangs
            process.give_up()
        ends = f" If that lasts, end process {process.pid}: it is started again." if serves else ""
        raise ConnectionError(
            f"{_NAME} (pid {process.pid}) did not load {name!r} within {_LOAD_S:g} s: see that its "
            f"folder can be read, and try again.{ends}"
        )

    def _running(self, sizes: dict[str, Any]) -> tuple[Running, int]:
        with self._starting:
            if self._process is None or self._process.ended:
                if self._closed or self._launch is None:
                    raise ConnectionError(_CLOSED)
                if self._connection is not None:
                    self._end(self._connection)  # it listened at the same address
                order = {"shared": True, "name": "adapters", "adapter": None, "gpu": _GPU}
                order |= {"address": self.address, **sizes}
                start = time.monotonic()
                made = self._launch(order, backbone=False, programs={"writes": True})
                self._connection, pid, about = made
                took, where = time.monotonic() - start, about.get("device", "")
                logger.info("Process %d holds all adapters (%s, %.1f s).", pid, where, took)
                with self._places:
                    self._taken.clear()
                    self._loaded.clear()
                self._process, self._life = Running(*made), self._life + 1
                args = (self._process,)
                threading.Thread(
                    target=self._watch, args=args, name="adapters", daemon=True
                ).start()
                if self._closed:  # meanwhile, when there was nothing to end
                    self.stop()
                    raise ConnectionError(_CLOSED)
            return self._process, self._life

    def _watch(self, process: Running) -> None:
        process.read()
        self._on_end(process)

    def _take_number(self) -> int:
        """Return a new number. Raises DeviceFull: as many adapters are there as may be."""
        places = range(self._most)
        with self._places:
            if not self._places.wait_for(lambda: len(self._taken) < self._most, _PLACE_S):
                raise DeviceFull(
                    f"All {self._most} places of the process of all adapters are taken: try again "
                    "when a function has ended, close one, or start with a larger max_tenants."
                )
            place = next(place for place in places if place not in self._taken)
            number = self._taken[place] = place + self._most * next(self._rounds)
            return number


def check_processes(tenant_processes: str | None, isolation: str) -> None:
    """Raise ValueError for a value that is none, or that the isolation has no use for."""
    if tenant_processes is None:
        return
    if tenant_processes not in TENANT_PROCESSES:
        allowed = ", ".join(TENANT_PROCESSES)
        raise ValueError(f"tenant_processes must be one of {allowed}, got {tenant_processes!r}.")
    if isolation != "server":
        raise ValueError(
            f"tenant_processes is for isolation 'server', not {isolation!r}: leave it out."
        )


def shared_on(
    device: str, tenant_processes: str | None, end: Callable[[socket.socket], None], most: int
) -> SharedAdapters | None:
    """Return what holds all adapters of an engine on such a device; None: each has a process.

    Raises ValueError where that device, or this host, does not serve it.
    """
    if device == "cpu":
        return SharedAdapters(end, most) if tenant_processes == ONE else None
    if device != "gpu":
        raise ValueError(
            f"isolation 'server' runs on CPUs and GPUs, not on {device}: use 'process'."
        )
    if tenant_processes == EACH:
        raise ValueError(
            "tenant_processes 'each' is for CPUs: processes on one GPU run one after the other, "
            "which a step of many exchanges cannot wait for. Leave it out: one process on a GPU "
            "of its own then has all adapters."
        )
    visible = os.environ.get(VISIBLE)
    count = count_visible(visible)
    if count is not None and count < 2:
        raise ValueError(
            "isolation 'server' takes two GPUs, one for the base model and one for the process of "
            f"all adapters, and this process sees {count} ({VISIBLE} is {visible or 'not set'}): "
            "let it see another one, or use isolation 'process'."
        )
    return SharedAdapters(end, most)
