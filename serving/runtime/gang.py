"""Members of one instance over several hosts: rank 0 decides, the others follow.

All members end together: when one has gone or is silent, every other ends its process at once, for
what starts it to start a new generation. Nothing is waited for, since the devices wait too.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from serving.runtime.gang_stream import (
    BEAT_S,
    SILENT_S,
    STARTING_S,
    Connection,
    GangPlace,
    gather_followers,
    is_loopback,
    join_leader,
)

logger = logging.getLogger(__name__)

EXIT_LOST = 75  # status of a member that ends because another has gone
_END_S = 3  # for the others to leave, and then for jax's coordinator
_STOP = None  # command: the instance ends
_HERE = "here"


def end_process(why: str) -> None:
    """End this process without waiting for anything."""
    logger.error("The instance has lost a member (%s); this one ends too.", why)
    os._exit(EXIT_LOST)


class Gang:
    """This process's side; rank 0 tells and shares, the others follow and share."""

    def __init__(
        self,
        place: GangPlace,
        about: Mapping[str, Any],
        lost: Callable[[str], None] = end_process,
        silent_s: float = SILENT_S,
    ):
        """Meet the other members. `about` must be equal in all of them; see gang_stream.

        `lost` is called, with why, when a member has gone or is silent for `silent_s`.
        """
        self.rank, self.size = place.rank, place.size
        self._lost, self._silent_s = lost, silent_s
        self._is_far = not is_loopback(place.address[0])
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._serving = self._closed = False
        self._starting, self._all_serve = set(range(place.size)) - {place.rank}, threading.Event()
        if self.is_leader:
            self._coordinator = f"{place.address[0]}:{_free_port(place.address[0])}"
            self._peers = gather_followers(place, about, self._coordinator)
        else:
            connection, self._coordinator = join_leader(place, about)
            self._peers = {0: connection}
        self._listeners = [self._thread(self._listen, *peer) for peer in self._peers.items()]
        self._thread(self._beat)

    @property
    def is_leader(self) -> bool:
        """True if this is rank 0."""
        return self.rank == 0

    def start_jax(self) -> None:
        """Let jax see the devices of all members; before it looks at any."""
        if self._is_far and is_loopback(name := socket.gethostname()):
            logger.warning(
                "This host's name, %s, is an address of this host alone: CPU devices of other "
                "hosts cannot reach it. Let the name be the host's own address (/etc/hosts).",
                name,
            )
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # A lost member must not abort this process before it has said why it ends.
        jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(
            self._coordinator,
            self.size,
            self.rank,
            shutdown_timeout_seconds=_END_S,
            coordinator_bind_address=self._coordinator if self.is_leader else None,
        )

    def tell(self, command: Any) -> None:
        """Send a command to all others; they do it after what they were told before."""
        with self._sending:
            for connection in self._peers.values():
                try:
                    connection.send(command)
                except OSError as error:
                    self._gone(f"a command could not be sent: {error}")

    def shared[T](self, value: T) -> T:
        """Return rank 0's value in every member."""
        if self.is_leader:
            self.tell(value)
            return value
        return self._commands.get()

    def meet(self) -> None:
        """Return when every member has come here; what exchanges wait for each other is short."""
        if self.is_leader:
            for _ in self._peers:
                self._commands.get()
        self.tell(_HERE)
        if not self.is_leader:
            self._commands.get()

    def serve(self) -> None:
        """Say that this member has started: from now on it is never long silent.

        Rank 0 returns when all others have said so: one that hangs from then on is found soon.
        """
        self._serving = True
        self._beat_once()
        if self.is_leader:
            self._all_serve.wait()

    def commands(self) -> Iterator[Any]:
        """Yield what rank 0 tells until the instance ends."""
        while (command := self._commands.get()) is not _STOP:
            yield command

    def close(self) -> None:
        """End the instance, on rank 0, or leave it; a second call does nothing.

        The process of another rank must then end by os._exit: jax's farewell to a coordinator
        that leaves too would block or abort it.
        """
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        if self.is_leader:  # which has jax's coordinator, and so leaves last
            self.tell(_STOP)
            end = time.monotonic() + _END_S
            for listener in self._listeners:
                listener.join(max(0.0, end - time.monotonic()))
            try:
                jax.distributed.shutdown()
            except RuntimeError as error:
                logger.warning("jax's coordinator failed while it ended: %s", error)
        for connection in self._peers.values():
            connection.close()

    def _thread(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name="gang", daemon=True)
        thread.start()
        return thread

    def _listen(self, rank: int, connection: Connection) -> None:
        """Take what a member sends, and notice its end and its silence."""
        silent_s = STARTING_S
        try:
            while True:
                is_beat, value = connection.receive(silent_s)
                if is_beat:
                    if value:
                        silent_s = self._silent_s
                        self._note_start(rank)
                    continue
                if value is _STOP:
                    self._closing.set()
                self._commands.put(value)
        except Exception as error:  # whatever it is, no more is heard
            self._gone(f"node {rank}: {error}")

    def _note_start(self, rank: int) -> None:
        self._starting.discard(rank)
        if not self._starting:
            self._all_serve.set()

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            self._beat_once()

    def _beat_once(self) -> None:
        for rank, connection in self._peers.items():
            # While a long command is on its way, it says that this member is there.
            if self._sending.acquire(timeout=BEAT_S):
                try:
                    connection.beat(serving=self._serving)
                except OSError as error:
                    self._gone(f"node {rank}: {error}")
                finally:
                    self._sending.release()

    def _gone(self, why: str) -> None:
        self._all_serve.set()  # nobody is waited for any more
        if not self._closing.is_set():
            self._lost(why)


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]
