"""A rank's requests as programs of its device: taken, computed and answered without the host.

A program is a loop on the device. It looks for messages, takes all that wait of one site, so that
instances which come at the same moment share its launches (the bits of a row do not depend on its
neighbours), answers them and looks again: a message costs the host nothing. It ends when nothing
has come for a while, when it has given as many answers as it may, and when there is a message that
only the host can answer. The host enqueues the next one while it runs, with the table of what the
rank holds by then.

On a GPU there are as many copies of the program as are under way, because a CUDA graph holds
addresses and is written anew, node by node, where one has changed: each finds its arrays where they
were.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.typing import Array, Bool, Int
from serving.lora_server.rank import ServerRank
from serving.lora_server.transport.device_server import (
    DeviceServer,
    Found,
    RankTable,
    Verdict,
    Word,
    no_ticket,
)

_AHEAD = 2  # programs under way: one runs, one is behind it
_NOBODY = -1
# A program is one CUDA graph on a GPU, its loop included, and that only where it is asked for: else
# the host waits for every look to decide whether there is one more.
ONE_GRAPH = {
    "xla_gpu_graph_min_graph_size": "1",
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Said:
    """Report of a program: the lines of its last look, and the number of messages it answered."""

    lines: tuple[Int[Array, "messages 8"], ...]  # of each site
    answered: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of messages: the number answered, and the lines of those left to the host."""

    answered: int
    left: tuple[tuple[int, ...], ...] = ()

    def __add__(self, later: "Report") -> "Report":
        return Report(self.answered + later.answered, self.left + later.left)


class DeviceLoop:
    """The programs of one rank and its server; one thread uses it, `interrupt` is for any."""

    def __init__(self, rank: ServerRank, layers: Sequence[int], server: DeviceServer):
        """Compile, so that no request waits for that. `layers` are RankServer's."""
        self._rank, self._server = rank, server
        local_layers = [layer if layer in rank.shard.layers else _NOBODY for layer in layers]
        self._layers = np.asarray(local_layers, np.int32)
        self._device = jax.local_devices()[0]
        copies = _AHEAD if jax.default_backend() == "gpu" else 1
        self._programs = [_program(rank, server) for _ in range(copies)]
        self._lines = self._new_lines()
        self._said = [_Said(self._new_lines(), self._put(np.int32(0))) for _ in range(_AHEAD)]
        self._under_way: collections.deque[int] = collections.deque()  # places, oldest first
        self._turns = 0
        self._limits: dict[tuple[float, int], Array] = {}
        self._table: RankTable | None = None
        self._known: tuple[int, int] | None = None  # the rank's changes and the version in it
        self._interrupted, self._lock = False, threading.Lock()
        with ThreadPoolExecutor(_AHEAD) as pool:  # each takes seconds to compile
            list(pool.map(self._compile, self._programs))
        self.turn(0, 0.0, 0)
        self.drain()

    def turn(self, version: int, seconds: float, answers: int) -> Report:
        """Have enough programs under way; return what the oldest one says when it has ended.

        `version` is that of the server's table now. A program ends when it has given so many
        answers, or has waited as many seconds for a message; of both there are few different
        values. After `interrupt`, and where a message is left to the host, none is under way then.
        """
        while len(self._under_way) < _AHEAD:
            self._enqueue(version, seconds, answers)
        report = self._read()
        return report + self.drain() if report.left or self._interrupted else report

    def drain(self) -> Report:
        """Return what all programs under way say, when they have ended."""
        report = Report(0)
        while self._under_way:
            report += self._read()
        self._lines = _forget(self._lines)
        return report

    def interrupt(self) -> None:
        """Let all programs end at their next look, until `resume`."""
        with self._lock:
            self._interrupted = True
            self._server.pause(True)

    def resume(self) -> None:
        """Let programs look again."""
        with self._lock:
            if self._interrupted:
                self._interrupted = False
                self._server.pause(False)

    def _enqueue(self, version: int, seconds: float, answers: int) -> None:
        turn, self._turns = self._turns % _AHEAD, self._turns + 1
        if (seconds, answers) not in self._limits:
            self._limits[seconds, answers] = self._put(
                np.asarray([seconds * 1e6, answers], np.int32)
            )
        self._lines, self._said[turn] = self._programs[turn % len(self._programs)](
            self._rank.slots,
            self._current(version),
            self._lines,
            self._said[turn],
            self._limits[seconds, answers],
        )
        for array in jax.tree.leaves(self._said[turn]):
            array.copy_to_host_async()
        self._under_way.append(turn)

    def _read(self) -> Report:
        answer = self._said[self._under_way.popleft()]
        lines = np.concatenate(answer.lines)
        left = lines[(lines[:, 0] != _NOBODY) & (lines[:, Word.VERDICT] == Verdict.LEAVE)]
        return Report(int(answer.answered), tuple(map(tuple, left.tolist())))

    def _compile(self, program: Callable) -> None:
        """Compile a program by running it on nothing."""
        said = _Said(self._new_lines(), self._put(np.int32(0)))
        arguments = self._rank.slots, self._current(0), self._new_lines(), said
        jax.block_until_ready(program(*arguments, self._put(np.zeros(2, np.int32))))

    def _new_lines(self) -> tuple[Array, ...]:
        nothing = no_ticket(self._rank.most_messages)
        return tuple(self._put(nothing) for _ in self._rank.sites)

    def _current(self, version: int) -> RankTable:
        key = (self._rank.changes, version)
        if self._table is None or key != self._known:
            arrays = (array.astype(np.int32) for array in self._rank.table())
            table = *arrays, np.int32(version), self._layers
            self._table = RankTable(*map(self._put, table))
            self._known = key
        return self._table

    def _put(self, array: np.ndarray | np.int32) -> Array:
        return jax.device_put(array, self._device)


@functools.partial(jax.jit, donate_argnums=0)
def _forget(lines: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return lines, in their place, of nothing: no number of theirs is below -1.

    They have to come of what was there, or they are not in its place.
    """
    return tuple(jnp.minimum(line, _NOBODY) for line in lines)


def _program(rank: ServerRank, server: DeviceServer) -> Callable:
    """Return (slots, table, lines, said, limits) -> (lines, said), both in their place.

    `lines` are those of the last look of the program before. Where one of them is left to the host
    there is no look until the host has dealt with it. `limits` are microseconds and answers.
    """
    options = ONE_GRAPH if jax.default_backend() == "gpu" else None

    @functools.partial(jax.jit, compiler_options=options, donate_argnums=(2, 3))
    def serve(
        slots: AdapterSlots,
        table: RankTable,
        lines: tuple[Int[Array, "messages 8"], ...],
        said: _Said,
        limits: Int[Array, "2"],
    ) -> tuple[tuple[Array, ...], _Said]:
        def goes_on(lines):
            some, left = (_any_found(lines, what) for what in (Found.ALL_WELL, Found.LEFT))
            return some & ~left & (lines[-1][0, Word.ANSWERS] < limits[1])

        def look(lines):
            return _look(rank, server, slots, table, lines[-1], limits[0])

        waits = _any_found(lines, Found.LEFT)
        begin = lines[-1].at[0, Word.ANSWERS].set(0)
        begin = begin.at[0, Word.FOUND].set(jnp.where(waits, Found.LEFT, Found.ALL_WELL))
        lines = jax.lax.while_loop(goes_on, look, (*lines[:-1], begin))
        # Of what the program before has left, it has told itself.
        told = tuple(jnp.where(waits, _NOBODY, one) for one in lines)
        return lines, _Said(told, lines[-1][0, Word.ANSWERS])

    return serve


def _any_found(lines: tuple[Int[Array, "messages 8"], ...], what: Found) -> Bool[Array, ""]:
    """Return whether a look for messages of one of the sites has come to this."""
    matches = [one[0, Word.FOUND] == what for one in lines]
    return functools.reduce(jnp.logical_or, matches)


def _look(
    rank: ServerRank,
    server: DeviceServer,
    slots: AdapterSlots,
    table: RankTable,
    last: Int[Array, "messages 8"],
    limit: Int[Array, ""],
) -> tuple[Array, ...]:
    """Take and answer what waits of each site in turn; return the lines of each.

    Without branches: those of a CUDA graph take longer than kernels that find nothing to do.
    """
    lines = []
    for site in rank.sites:
        messages, x = server.take(last, limit, site)
        judged = server.judge(messages, last, table, rank.share)
        messages = judged.messages
        layer = None if rank.share.slots_per_layer else table.layers[messages.layers[0]]
        owners = judged.row_to_slot, messages.experts
        deltas = rank.traced_deltas(slots, site, layer, x, *owners)
        last = server.answer(messages, judged.verdicts, deltas, site).info
        lines.append(last)
    return tuple(lines)
