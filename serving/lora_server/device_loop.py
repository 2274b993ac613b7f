"""A rank's requests as programs of its device: taken, computed and answered without the host.

The host enqueues a program before there is a message, and reads later what became of it. A program
takes all that wait of one site, so that instances which come at the same moment share its launches;
the bits of a row do not depend on its neighbours. It picks its branch by the site and the number of
rows, so it is compiled once for all of the rank's buckets; but on a GPU there are as many copies of
it as are under way, because a CUDA graph holds addresses and is written anew, node by node, where
one has changed: each copy finds its ticket where it was.
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
from serving.transport.device_server import Arrived, DeviceServer, Verdict, no_ticket

_AHEAD = 3  # programs under way, of which the host reads the oldest before it enqueues one more
_VERDICT = 5  # its place in what a program says
_NOBODY = -1
# However short, a program is one CUDA graph on a GPU, branches included: where XLA does not make it
# one, the host waits for every message to pick the branch, and then launches kernel by kernel.
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
        self._tickets = [self._new_ticket() for _ in range(_AHEAD)]
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
        """Enqueue one more program; return what the oldest one says of its messages.

        `version` is that of the server's table now; a program waits as many seconds for a message,
        of which there are few different values.
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
        return [o for place in range(_AHEAD) for o in self._read((self._turns + place) % _AHEAD)]

    def _new_ticket(self) -> Array:
        return self._put(no_ticket(self._rank.most_messages))

    def _compile(self, program: Callable) -> None:
        """Compile a program by running it on nothing."""
        ticket, no_time = self._new_ticket(), self._put(np.int32(0))
        jax.block_until_ready(program(self._rank.slots, self._current(0), ticket, no_time))

    def _read(self, place: int) -> list[Outcome]:
        """Return what a program under way says when it has ended, of each message."""
        if not self._sent[place]:
            return []
        self._sent[place] = False
        lines = np.asarray(self._tickets[place]).tolist()
        return [Outcome(Verdict(i[_VERDICT]), tuple(i)) for i in lines if i[0] != _NOBODY]

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
    """Return (slots, table, ticket, limit in us) -> ticket, in its place: messages or none."""
    buckets, moe_layers = rank.sizes.buckets, np.asarray(plan.moe_layers, np.int32)
    options = ONE_GRAPH if jax.default_backend() == "gpu" else None

    @functools.partial(jax.jit, compiler_options=options, donate_argnums=2)
    def serve(
        slots: AdapterSlots,
        table: RankTable,
        ticket: Int[Array, "messages 8"],
        limit: Int[Array, ""],
    ) -> Int[Array, "messages 8"]:
        messages = server.accept(ticket, limit)
        layers = jnp.asarray(moe_layers)[messages.layers]
        verdicts, row_to_slot = judge(rank, table, messages, layers)
        smaller = messages.rows > jnp.asarray(buckets[:-1], jnp.int32)
        branch = 1 + messages.site * len(buckets) + jnp.sum(smaller, dtype=jnp.int32)
        branch = jnp.where(jnp.any(verdicts == Verdict.ANSWER), branch, 0)
        answers = [
            functools.partial(_answer, rank, server, site, rows)
            for site in rank.sites
            for rows in buckets
        ]
        arguments = (slots, messages, layers, row_to_slot, verdicts)
        info = jax.lax.switch(branch, [_leave, *answers], *arguments)
        return info.at[:, _VERDICT].set(verdicts)

    return serve


def judge(
    rank: ServerRank, table: RankTable, messages: Arrived, layers: Int[Array, "messages"]
) -> tuple[Int[Array, "messages"], Int[Array, "max_rows"]]:
    """Return whether each message is answered or left to the host, and the slots of their rows.

    Nothing is refused here: the table is that of when the program was enqueued, and an adapter may
    have come since. The host, which knows, answers or refuses what is left.
    """
    shard, owner = rank.shard, messages.row_to_message
    real = owner >= 0
    place = jnp.where(real, messages.adapters % len(table.numbers), 0)
    expert = messages.experts - shard.first_expert
    mine = (table.numbers[place] == messages.adapters) & (expert >= 0)
    mine &= (expert < shard.num_experts) & (table.num_ready[place] > layers[owner])
    here = jnp.isin(layers, jnp.asarray(shard.layers, jnp.int32))
    known = here & (messages.table_versions <= table.version) & (messages.clients != _NOBODY)
    foreign = (owner[None] == jnp.arange(len(layers))[:, None]) & ~mine[None]
    well = known & ~jnp.any(foreign, axis=1)
    verdicts = jnp.where(well, Verdict.ANSWER, Verdict.LEAVE).astype(jnp.int32)
    return verdicts, jnp.where(real & well[owner], table.slots[place], _NOBODY)


def _leave(slots, messages: Arrived, layers, row_to_slot, verdicts) -> Array:
    """Do nothing: there is no message, or all are the host's."""
    del slots, layers, row_to_slot, verdicts
    return messages.info


def _answer(
    rank: ServerRank,
    server: DeviceServer,
    site: int,
    rows: int,
    slots: AdapterSlots,
    messages: Arrived,
    layers: Int[Array, "messages"],
    row_to_slot: Int[Array, "max_rows"],
    verdicts: Int[Array, "messages"],
) -> Array:
    """Compute at most `rows` rows of a site and push them back."""
    x = server.rows_of(messages, site, rows)
    owners = row_to_slot[:rows], messages.experts[:rows]
    row_to_layer = layers[messages.row_to_message[:rows]] if len(layers) > 1 else layers[0]
    deltas = rank.traced_deltas(slots, site, row_to_layer, x, *owners)
    dtype = server.shapes.result_dtype
    return server.answer(messages, verdicts, [d.astype(dtype) for d in deltas], site).info
