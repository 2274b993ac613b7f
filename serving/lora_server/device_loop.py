"""A rank's requests as programs of its device: taken, computed and answered without the host.

The host enqueues programs before there is a message, and reads later what became of it. A program
takes one message of each site in turn, as a layer sends them, and has no branches: those of a CUDA
graph cost more than kernels that find nothing to do (ten of them took a message a millisecond on an
H200). On a GPU there are as many copies of a program as are under way, because a graph holds
addresses and is written anew, node by node, where one has changed: each copy finds its tickets
where they were.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.typing import Array, Int
from serving.lora_server.rank import ServerRank
from serving.lora_server.shards import ServerPlan
from serving.transport.device_server import Arrived, DeviceServer, Verdict

_AHEAD = 3  # programs under way, of which the host reads the oldest before it enqueues one more
_VERDICT = 5  # its place in what a program says
_NOBODY = -1
# However short, a program is one CUDA graph on a GPU.
ONE_GRAPH = {"xla_gpu_graph_min_graph_size": "1"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankTable:
    """What a rank holds, by place: number modulo the number of places."""

    numbers: Int[Array, "places"]
    slots: Int[Array, "places"]
    num_ready: Int[Array, "places"]  # layers that are here
    version: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a message; `info` says which one."""

    verdict: Verdict
    info: tuple[int, ...]


class DeviceLoop:
    """The programs of one rank and its server; one thread uses it."""

    def __init__(self, rank: ServerRank, plan: ServerPlan, server: DeviceServer):
        """Compile, so that no request waits for that."""
        self._rank, self._server = rank, server
        if jax.default_backend() == "gpu":
            self._programs = [_program(rank, plan, server) for _ in range(_AHEAD)]
        else:
            self._programs = [_program(rank, plan, server)] * _AHEAD
        self._device = jax.local_devices()[0]
        self._tickets = [self._new_tickets() for _ in range(_AHEAD)]
        self._sent = [False] * _AHEAD
        self._turns = 0
        self._limits: dict[float, Array] = {}
        self._table: RankTable | None = None
        self._known: tuple[int, int] | None = None  # the rank's changes and the version in it
        distinct = list(dict.fromkeys(self._programs))
        with ThreadPoolExecutor(len(distinct)) as pool:  # each takes seconds to compile
            list(pool.map(self._compile, distinct))
        for _ in range(_AHEAD):
            self.turn(0, 0.0)
        self.drain()

    def turn(self, version: int, seconds: float) -> list[Outcome]:
        """Enqueue one more program; return what the oldest one says of the messages it took.

        `version` is that of the server's table now; a program waits as many seconds for a message
        of each site, of which there are few different values.
        """
        place = self._turns % _AHEAD
        outcomes = self._read(place)
        if seconds not in self._limits:
            self._limits[seconds] = self._put(np.int32(seconds * 1e6))
        self._tickets[place] = self._programs[place](
            self._rank.slots, self._current(version), self._tickets[place], self._limits[seconds]
        )
        self._sent[place] = True
        self._turns += 1
        return outcomes

    def drain(self) -> list[Outcome]:
        """Return what all programs under way say, when they have ended."""
        places = [(self._turns + place) % _AHEAD for place in range(_AHEAD)]
        return [outcome for place in places for outcome in self._read(place)]

    def _new_tickets(self) -> Array:
        return self._put(np.zeros((len(self._rank.sites), 8), np.int32))

    def _compile(self, program: Callable) -> None:
        """Compile a program by running it on nothing."""
        tickets, no_time = self._new_tickets(), self._put(np.int32(0))
        jax.block_until_ready(program(self._rank.slots, self._current(0), tickets, no_time))

    def _read(self, place: int) -> list[Outcome]:
        """Return what a program under way says of each message when it has ended."""
        if not self._sent[place]:
            return []
        self._sent[place] = False
        said = np.asarray(self._tickets[place]).tolist()
        return [
            Outcome(Verdict(info[_VERDICT]), tuple(info)) for info in said if info[0] != _NOBODY
        ]

    def _current(self, version: int) -> RankTable:
        known = (self._rank.changes, version)
        if self._table is None or known != self._known:
            arrays = (array.astype(np.int32) for array in self._rank.table())
            self._table = RankTable(*map(self._put, (*arrays, np.int32(version))))
            self._known = known
        return self._table

    def _put(self, array: np.ndarray | np.int32) -> Array:
        return jax.device_put(array, self._device)


def _program(rank: ServerRank, plan: ServerPlan, server: DeviceServer) -> Callable:
    """Return (slots, table, tickets, limit in us) -> tickets, in their place: one for each site."""
    moe_layers = np.asarray(plan.moe_layers, np.int32)
    options = ONE_GRAPH if jax.default_backend() == "gpu" else None

    @functools.partial(jax.jit, compiler_options=options, donate_argnums=2)
    def serve(
        slots: AdapterSlots,
        table: RankTable,
        tickets: Int[Array, "sites 8"],
        limit: Int[Array, ""],
    ) -> Int[Array, "sites 8"]:
        ticket = tickets[-1]
        for place, site in enumerate(rank.sites):
            message = server.accept(ticket, limit, site)
            layer = jnp.asarray(moe_layers)[message.layer]
            verdict, row_to_slot = judge(rank, table, message, layer)
            ticket = _answer(rank, server, site, slots, message, layer, row_to_slot, verdict)
            tickets = tickets.at[place].set(ticket.at[_VERDICT].set(verdict))
        return tickets

    return serve


def judge(
    rank: ServerRank, table: RankTable, message: Arrived, layer: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, "max_rows"]]:
    """Return whether a message is answered or left to the host, and the slots of its rows.

    Nothing is refused here: the table is that of when the program was enqueued, and an adapter may
    have come since. The host, which knows, answers or refuses what is left.
    """
    shard = rank.shard
    real = jnp.arange(message.adapters.shape[0]) < message.rows
    place = jnp.where(real, message.adapters % len(table.numbers), 0)
    expert = message.experts - shard.first_expert
    mine = (table.numbers[place] == message.adapters) & (expert >= 0) & (expert < shard.num_experts)
    here = jnp.isin(layer, jnp.asarray(shard.layers, jnp.int32))
    well = jnp.all(mine | ~real) & here & (message.table_version <= table.version)
    ready = jnp.all((table.num_ready[place] > layer) | ~real)
    verdict = jnp.where(well & ready, Verdict.ANSWER, Verdict.LEAVE)
    row_to_slot = jnp.where(real & (verdict == Verdict.ANSWER), table.slots[place], _NOBODY)
    return verdict.astype(jnp.int32), row_to_slot


def _answer(
    rank: ServerRank,
    server: DeviceServer,
    site: int,
    slots: AdapterSlots,
    message: Arrived,
    layer: Int[Array, ""],
    row_to_slot: Int[Array, "max_rows"],
    verdict: Int[Array, ""],
) -> Array:
    """Compute a message's rows and push them back, if it is of this site and to be answered."""
    x = server.rows_of(message, site, server.shapes.max_rows)
    deltas = rank.traced_deltas(slots, site, layer, x, row_to_slot, message.experts)
    return server.answer(message, verdict, deltas, site).info
