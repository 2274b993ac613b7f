"""A process that follows rank 0 of an instance over several hosts."""

import contextlib
import logging
import os
import signal
import threading
from multiprocessing.connection import Connection

from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.engine.metrics import logs
from serving.runtime.about import about_of, environment_of
from serving.runtime.child_process import AbstractChild, Pulse
from serving.runtime.gang import EXIT_LOST, Gang
from serving.runtime.gang_stream import GangPlace
from serving.runtime.gpu_assignment import use_gpu
from serving.runtime.pulses import Pulses
from serving.runtime.role_host import AbstractRoleHost

logger = logging.getLogger(__name__)

_END_S = 5.0


def gang_of(options: Options, place: GangPlace | None) -> Gang | None:
    """Meet the other hosts' processes; None without a `place`, for an instance of one host.

    Raises StartError when they do not fit together.
    """
    if place is None:
        return None
    try:
        return Gang(place, about_of(options.engine) | environment_of())
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot serve on {place.size} nodes: {error}") from error


class NodeProcess(AbstractChild):
    """A process that follows rank 0; `stop` or the end of this process ends it."""

    def __init__(self, options: Options, place: GangPlace, host: AbstractRoleHost):
        """Start the process on `host`."""
        asking, life = host.pipe()
        self.rank, self.pulses = place.rank, Pulses(asking)
        process = host.process(node_main, (life, options, place), f"node-{place.rank}")
        super().__init__(process, _END_S)
        life.close()

    def pulse(self, limit_s: float) -> Pulse:
        """See AbstractChild: the answer of a thread of it."""
        return Pulse.UP if self.pulses.answered(limit_s) else Pulse.SILENT

    def hang_up(self) -> None:
        """Close the connection that keeps the process."""
        self.pulses.close()


def node_main(life: Connection, options: Options, place: GangPlace) -> None:
    """Follow rank 0 until it ends, or the other side of `life` has gone; status 1: cannot start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(options.log_level)
    threading.Thread(target=_answer, args=(life,), name="life", daemon=True).start()
    from serving.engine.parts.following import follow

    devices = options.engine.tensor_parallel_size // place.size
    try:
        use_gpu(0, devices)
        gang = gang_of(options, place)
        assert gang is not None, "a node of an instance of one host"
        follow(options.engine, gang)
    except (StartError, ValueError, OSError, NotImplementedError) as error:
        logger.error("Node %d: %s", place.rank, error)
        os._exit(1)
    os._exit(0)


def _answer(life: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            life.send_bytes(life.recv_bytes())
    os._exit(EXIT_LOST)
