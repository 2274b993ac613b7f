"""Process of one LLM instance, and the supervisor's handle of it."""

import contextlib
import dataclasses
import functools
import json
import logging
import multiprocessing.connection
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from serving.adapters import journal
from serving.cli.options import Options
from serving.cli.serve import Started, StartError, serve
from serving.cluster.addresses import Address, FarAddress, headers_of, new_socket
from serving.cluster.node import NodeProcess, gang_of
from serving.cluster.server_place import ServerPlace, server_access
from serving.engine.metrics import logs
from serving.http.wire.uvicorn_server import bind
from serving.lora_server.calls import Caller
from serving.runtime.child_process import AbstractChild, Pulse
from serving.runtime.gang_stream import GangPlace
from serving.runtime.gpu_assignment import use_gpu
from serving.runtime.pulses import Echo, Hung, Pulses, Starting, wait_alive
from serving.runtime.role_host import THIS_HOST, AbstractRoleHost

logger = logging.getLogger(__name__)

_START_S = 600.0  # to load a model and compile, on a slow machine
_END_S = 45.0  # uvicorn lets running requests end
_FOLLOWER_S = 1.0  # for a process of another host, when rank 0 has ended
_REPLAY_S = 300.0  # to load all adapters of the journal
BUDGETS = "budgets"  # of keys, beside the sockets
_READY = b"ready "
_REPLAY = b"replay"
_OF_KILLED = "for want of memory, if nobody has sent the signal: dmesg says so."
_ARE_YOU_READY = b"GET /ready HTTP/1.1\r\nHost: instance\r\nConnection: close\r\n"


class InstanceProcess(AbstractChild):
    """A running instance; `stop` or the end of this process ends it."""

    def __init__(
        self,
        options: Options,
        number: int,
        path: str,
        place: ServerPlace | None,
        serve_leases: Callable[[str, Connection], object],
        hosts: Sequence[AbstractRoleHost] = (THIS_HOST,),
    ):
        """Start the process, which will listen at the Unix socket `path`, or on another host.

        On several hosts it has a process on each, the first of them for rank 0. `serve_leases` is
        given the instance's name and this side of its connection for leases. Raises ConnectionError
        when a host is not there.
        """
        host, *others = hosts
        self._life, life = host.pipe()
        asking, pulse = host.pipe()
        self._pulses = Pulses(asking)
        leases, theirs = host.pipe() if place is not None else (None, None)
        self.number, self.path = number, _address_on(host, path)
        self._talking = threading.Lock()
        self.body_bytes = 0  # largest body; known when it is ready
        self.digests: dict[str, str] = {}  # of the adapters given, as it has read them; then too
        name = f"instance-{number} {secrets.token_hex(4)}"
        gang, self._followers = _places_on(hosts), []
        if isinstance(self.path, FarAddress):
            http = dataclasses.replace(options.http, front_secret=self.path.secret)
            options = dataclasses.replace(options, http=http)
        devices = options.engine.tensor_parallel_size // len(hosts)
        first_gpu = 0 if host.has_own_gpus else number * devices
        seat = InstanceSeat(name, number, self.path, first_gpu, gang[0] if gang else None)
        args = life, pulse, theirs, options, seat, place
        super().__init__(host.process(instance_main, args, f"instance-{number}"), _END_S)
        life.close()
        pulse.close()
        if leases is not None and theirs is not None:
            theirs.close()
            serve_leases(name, leases)
        try:
            for one, where in zip(others, gang[1:], strict=True):
                self._followers.append(NodeProcess(options, where, one))
        except BaseException:
            self.kill()
            self.stop()
            raise

    def wait_ready(self) -> None:
        """Return when the instance answers. Raises ConnectionError if it ended or hung instead.

        This is so for each of its processes.
        """
        sentinels = {follower.sentinel: follower for follower in self._followers}
        news: list[Any] = []

        def has_news(seconds: float) -> bool:
            news[:] = multiprocessing.connection.wait([self._life, *sentinels], seconds)
            return bool(news)

        followers = [
            Starting(follower, f"Node {follower.rank} of instance {self.number}", follower.pulses)
            for follower in self._followers
        ]
        try:
            if self._wait(has_news, _START_S, followers) and self._life.poll(0):
                said = json.loads(self._life.recv_bytes().removeprefix(_READY))
                self.body_bytes, self.digests = int(said["body_bytes"]), said["digests"]
                if isinstance(self.path, FarAddress):
                    self.path = dataclasses.replace(self.path, port=int(said["port"]))
                self.is_ready = True
                return
        except Hung:
            raise
        except (EOFError, OSError, ValueError):
            pass
        ended = [sentinels[one] for one in news if one in sentinels]
        last = ended[0] if ended else self
        why = last.end_by_signal()
        where = f": the process of node {ended[0].rank} has ended" if ended else ""
        if why and not ended:
            where = ": its process has ended"
        hint = _OF_KILLED if why else "its log says why."
        raise ConnectionError(f"Instance {self.number} did not start{where}{why}; {hint}")

    def replay(self) -> dict[str, str]:
        """Let the instance repeat the journal of loads; return what it could not load, and why.

        What it has already is not read again. Raises ConnectionError when it does not answer.
        """
        with self._talking:
            try:
                self._life.send_bytes(_REPLAY)
                if self._wait(self._life.poll, _REPLAY_S):
                    return json.loads(self._life.recv_bytes())
            except (EOFError, OSError, ValueError):
                pass
        raise ConnectionError(f"Instance {self.number} did not repeat the journal.")

    def _wait(
        self,
        is_there: Callable[[float], bool],
        limit_s: float,
        followers: Sequence[Starting] = (),
    ) -> bool:
        own = Starting(self, f"Instance {self.number}", self._pulses)
        return wait_alive([own, *followers], is_there, limit_s)

    def pulse(self, limit_s: float) -> Pulse:
        """See AbstractChild: the answer to GET /ready."""
        sock, where = new_socket(self.path)
        with contextlib.suppress(OSError), sock:
            sock.settimeout(limit_s)
            sock.connect(where)
            heads = [b"%s: %s\r\n" % header for header in headers_of(self.path)]
            sock.sendall(b"".join([_ARE_YOU_READY, *heads, b"\r\n"]))
            answer = sock.recv(64)
            if answer:
                return Pulse.UP if answer.startswith(b"HTTP/1.1 200 ") else Pulse.UNWELL
        return Pulse.SILENT

    def kill(self) -> None:
        """See AbstractChild; on all of its hosts."""
        super().kill()
        for follower in self._followers:
            follower.kill()

    def stop(self, end_s: float | None = None) -> None:
        """See AbstractChild: rank 0 tells the others; they do not outlive it."""
        super().stop(end_s)
        for follower in self._followers:
            follower.stop(_FOLLOWER_S)

    def hang_up(self) -> None:
        """Close the connections that keep the process, which then finishes what it does.

        One that has not started yet ends at once.
        """
        self._life.close()
        self._pulses.close()


def _address_on(host: AbstractRoleHost, path: Address) -> Address:
    """Return the address of a new process: another host's has a secret of its own."""
    if host.address is None:
        return path
    return FarAddress(host.address, 0, secrets.token_hex(32))


def _places_on(hosts: Sequence[AbstractRoleHost]) -> list[GangPlace]:
    """Return the places of an instance's processes in a new gang; none for a single one."""
    if len(hosts) == 1:
        return []
    assert hosts[0].address is not None, "several hosts without addresses"
    where, secret = (hosts[0].address, hosts[0].free_port()), secrets.token_bytes(32)
    return [GangPlace(rank, len(hosts), where, secret) for rank in range(len(hosts))]


@dataclasses.dataclass(frozen=True)
class InstanceSeat:
    """The settings that an instance's process gets."""

    name: str
    number: int
    address: Address  # where it is to listen
    first_gpu: int
    gang: GangPlace | None  # of an instance over several hosts that others placed


def instance_main(
    life: Connection,
    pulse: Connection,
    leases: Connection | None,
    options: Options,
    seat: InstanceSeat,
    place: ServerPlace | None,
) -> None:
    """Be an instance until the other side of `life` has gone; exit status 1: it cannot start.

    Until it answers, it ends at once with the other side of `pulse`, whatever it waits for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us closes `life`
    logs.configure(options.log_level)
    echo = Echo(pulse, functools.partial(_leave, seat.address, orphaned=True))
    devices = options.engine.tensor_parallel_size // options.cluster.nnodes
    use_gpu(seat.first_gpu, devices)
    try:
        with ExitStack() as stack:
            starting = stack.enter_context(ExitStack())
            starting.enter_context(echo.ending_the_process())
            orphaned = threading.Event()
            sock = stack.enter_context(_listening(seat.address, orphaned))
            access = None
            if place is not None and leases is not None:
                caller = Caller(leases)
                stack.callback(caller.close)
                access = server_access(place, caller, seat.name)
            announce = functools.partial(
                _announce, life, sock, orphaned=orphaned, starting=starting
            )
            if options.functions.functions is not None:
                from serving.cluster.functions_front import serve_functions  # here: of few

                serve_functions(options, sock, announce)
                return
            serve(options, sock, access, gang_of(options, seat.gang), announce=announce)
    except StartError as error:
        logger.error("Instance %d: %s", seat.number, error)
        if seat.gang is not None:  # jax's farewell to the other members, which wait, takes seconds
            os._exit(1)
        raise SystemExit(1) from None


def _announce(
    life: Connection,
    sock: socket.socket,
    started: Started,
    *,
    orphaned: threading.Event,
    starting: ExitStack,
) -> None:
    """Report that the instance answers, repeat the journal on demand, end with the parent.

    `starting` is closed: from then on the process ends in order.
    """
    port = 0 if sock.family == socket.AF_UNIX else sock.getsockname()[1]
    said = {"body_bytes": started.body_bytes, "port": port, "digests": started.digests}
    life.send_bytes(_READY + json.dumps(said).encode())

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            while life.recv_bytes() == _REPLAY:
                life.send_bytes(json.dumps(started.replay()).encode())
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="life", daemon=True).start()
    starting.close()


def _listening(
    address: Address, orphaned: threading.Event
) -> contextlib.AbstractContextManager[socket.socket]:
    """Return a context with a bound socket: a free port of this host, or a Unix socket."""
    if isinstance(address, str):
        return _listening_at(address, orphaned)
    return bind(address.host, address.port)


@contextlib.contextmanager
def _listening_at(path: str, orphaned: threading.Event) -> Iterator[socket.socket]:
    """Yield a Unix socket at `path` that only this user can reach.

    It is removed at the end; see `_leave`.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(path)
        os.chmod(path, 0o600)
        try:
            yield sock
        finally:
            _leave(path, orphaned=orphaned.is_set())


def _leave(address: Address, *, orphaned: bool) -> None:
    """Remove an instance's Unix socket.

    Who started us removes its folder; orphaned instances do, the last one.
    """
    if not isinstance(address, str):
        return
    folder = os.path.dirname(address)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    with contextlib.suppress(OSError):  # others are still in the folder, or it has gone
        left = set(os.listdir(folder)) - {BUDGETS}
        if orphaned and all(map(journal.is_ours, left)):
            shutil.rmtree(os.path.join(folder, BUDGETS), ignore_errors=True)
            journal.remove(folder)
        os.rmdir(folder)
