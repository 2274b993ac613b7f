"""Measured plans: one layer's shape, its adapters, and placements for few GPUs."""

import dataclasses
import math

from lora_jax.ops.cases import MODELS
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.shapes import DOWN, GATE_UP, moe_shapes

REFUSE, ECHO, LORA = 0, 1, 2  # what servers do
SITES = {GATE_UP: ("gate", "up"), DOWN: ("down",)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Layers of a model, and adapters of all three matrices of all its experts."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    rank: int
    adapters: int
    layers: int  # of one program
    dtype: str = "bfloat16"

    def sizes(self, matrix: str) -> tuple[int, int]:
        """Return (d_in, d_out) of gate, up or down."""
        back = (self.width, self.hidden)
        return back if matrix == "down" else (self.hidden, self.width)

    def rows(self, tokens: int) -> int:
        """Return how many (token, expert) rows a layer has."""
        return tokens * self.top_k


def mixtral(adapters: int) -> Case:
    """Return layers of Mixtral 8x7B's shape with so many adapters of rank 64."""
    shape = MODELS["mixtral-8x7b"]
    sizes = shape.hidden, shape.intermediate, shape.num_experts, shape.top_k
    return Case("mixtral-8x7b", *sizes, rank=64, adapters=adapters, layers=4)


@dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """A placement; how many of its ranks, and how many instances, have a GPU here.

    A stage of which a rank has no GPU has its rows left out, or, where another stage is whole, its
    layers, unless `all_layers` are wanted: instances that meet at one stage more often than they
    would at two say nothing of what two are good for. With `all_rows` the batch is so much larger
    that the ranks that are there get as many rows as all would: the instance sends and adds up what
    it would with all of them, and each rank computes more. With `senders` above 1 every instance
    sends so many messages for each layer, of other experts and adapters each, as if so many
    instances were there and came at the same moment, and waits for all of the answers.
    """

    name: str
    ep: int
    pp: int
    servers: int
    instances: int = 1
    senders: int = 1
    all_rows: bool = False
    all_layers: bool = False
    pull: bool = False
    separate_stream: bool = True
    graph: bool = True  # of a server's programs; else the host launches their kernels one by one

    @property
    def gpus(self) -> int:
        return self.servers + self.instances

    def tokens(self, case: Case, tokens: int) -> int:
        """Return the tokens of a batch: those, or more, of which every expert gets as many rows."""
        if not self.all_rows:
            return tokens
        step = case.experts // math.gcd(case.experts, case.top_k)
        return -(-tokens * self.ep // (self.servers * step)) * step

    def layers(self, case: Case) -> list[int]:
        """Return the layers of a program."""
        whole = self.servers // self.ep  # stages
        every = self.all_layers or not whole
        return [n for n in range(case.layers) if every or n % self.pp < whole]

    def placement(self, case: Case) -> ServerLayout:
        """Return where the case's adapters lie."""
        shape = AdapterShape(case.adapters, case.layers, case.experts, 1)
        return ServerLayout(shape, ep=self.ep, pp=self.pp)

    def terms(self, case: Case, tokens: int) -> Terms:
        """Return what both sides of a batch of so many tokens agree on."""
        kinds = (case.dtype, case.dtype)
        shapes = moe_shapes(case.layers, case.rows(tokens), case.hidden, case.width, *kinds)
        return Terms("bench", self.placement(case), shapes)


PLANS = {
    plan.name: plan
    for plan in (
        # Two GPUs: an instance and a rank.
        MeasuredPlan("EP1-PP1", 1, 1, 1),
        MeasuredPlan("EP4-PP1, 1 of its ranks", 4, 1, 1),
        MeasuredPlan("EP1-PP1, pull", 1, 1, 1, pull=True),
        MeasuredPlan("EP4-PP1, 1 of its ranks, pull", 4, 1, 1, pull=True),
        MeasuredPlan("EP1-PP1, push in the stream", 1, 1, 1, separate_stream=False),
        MeasuredPlan("EP1-PP1, without graphs", 1, 1, 1, graph=False),
        MeasuredPlan("EP4-PP1, 1 of its ranks, without graphs", 4, 1, 1, graph=False),
        MeasuredPlan("EP4-PP1, 1 of its ranks, 2 at once", 4, 1, 1, senders=2),
        MeasuredPlan("EP4-PP1, 1 of its ranks, 3 at once", 4, 1, 1, senders=3),
        MeasuredPlan("EP1-PP1, 2 at once", 1, 1, 1, senders=2),
        MeasuredPlan("EP1-PP1, 3 at once", 1, 1, 1, senders=3),
        # Up to four.
        MeasuredPlan("EP4-PP1, 3 of its ranks", 4, 1, 3),
        MeasuredPlan("EP4-PP1, 3 of its ranks, all rows", 4, 1, 3, all_rows=True),
        MeasuredPlan("EP2-PP1", 2, 1, 2),
        MeasuredPlan("EP2-PP2, 1 of its stages", 2, 2, 2),
        MeasuredPlan("EP1-PP4, 3 of its ranks", 1, 4, 3),
        MeasuredPlan("EP1-PP2", 1, 2, 2),
        MeasuredPlan("EP2-PP1, pull", 2, 1, 2, pull=True),
        MeasuredPlan("EP4-PP1, 1 of its ranks, 2 instances", 4, 1, 1, 2),
        MeasuredPlan("EP4-PP1, 1 of its ranks, 3 instances", 4, 1, 1, 3),
        MeasuredPlan("EP1-PP1, 2 instances", 1, 1, 1, 2),
        MeasuredPlan("EP1-PP1, 3 instances", 1, 1, 1, 3),
        MeasuredPlan("EP2-PP1, 2 instances", 2, 1, 2, 2),
        # Up to eight.
        MeasuredPlan("EP4-PP1", 4, 1, 4),
        MeasuredPlan("EP4-PP1, pull", 4, 1, 4, pull=True),
        MeasuredPlan("EP2-PP2", 2, 2, 4),
        MeasuredPlan("EP1-PP4", 1, 4, 4),
        MeasuredPlan("EP4-PP1, 2 instances", 4, 1, 4, 2),
        MeasuredPlan("EP4-PP1, 3 instances", 4, 1, 4, 3),
        MeasuredPlan("EP4-PP1, 4 instances", 4, 1, 4, 4),
        MeasuredPlan("EP2-PP2, 2 instances", 2, 2, 4, 2),
        MeasuredPlan("EP2-PP2, 3 instances", 2, 2, 4, 3),
        MeasuredPlan("EP1-PP4, 3 instances", 1, 4, 4, 3),
        # A ninth GPU is what an instance beside all ranks of EP4-PP2 wants.
        MeasuredPlan("EP4-PP2, 7 of its ranks", 4, 2, 7),
        MeasuredPlan("EP4-PP2, 6 of its ranks, 2 instances", 4, 2, 6, 2, all_layers=True),
    )
}

_ALONE = "EP4-PP1, 1 of its ranks"
_MOST = "EP4-PP1, 3 of its ranks"
_MANY = ("", ", 2 instances", ", 3 instances")
# (adapters, plan, tokens) that are measured where nothing else is asked for, by the GPUs they want;
# in an order in which the first ones say most.
TABLES = {
    4: (
        *((256, name, 128) for name in (_MOST, f"{_MOST}, all rows", "EP2-PP2, 1 of its stages")),
        *((256, name, 128) for name in ("EP1-PP4, 3 of its ranks", "EP2-PP1", "EP2-PP1, pull")),
        *((256, f"{_ALONE}{more}", 128) for more in _MANY),
        (256, "EP2-PP1, 2 instances", 128),
        *((256, name, 256) for name in (_MOST, f"{_MOST}, all rows", "EP2-PP1", "EP2-PP1, pull")),
        (256, "EP1-PP4, 3 of its ranks", 256),
        *((256, f"{_ALONE}{more}", 256) for more in _MANY),
        *((512, name, 128) for name in (_MOST, f"{_MOST}, all rows", "EP2-PP1")),
        (512, "EP1-PP4, 3 of its ranks", 128),
    ),
    8: (
        *((256, f"EP4-PP1{more}", 128) for more in (*_MANY, ", pull")),
        *((256, name, 128) for name in ("EP2-PP2", "EP1-PP4", "EP4-PP2, 7 of its ranks")),
        (256, "EP4-PP2, 6 of its ranks, 2 instances", 128),
        *((256, f"EP4-PP1{more}", 256) for more in (*_MANY, ", pull")),
        *((256, name, 256) for name in ("EP2-PP2", "EP1-PP4")),
        *((512, name, 128) for name in ("EP4-PP1", "EP2-PP2", "EP1-PP4")),
        (512, "EP4-PP1", 256),
        *((256, f"EP2-PP2{more}", 128) for more in _MANY[1:]),
        (256, "EP4-PP2, 7 of its ranks", 256),
        (512, "EP4-PP1, 3 instances", 128),
    ),
}


def table_for(gpus: int) -> tuple[tuple[int, str, int], ...]:
    """Return the rows for a host of so many GPUs: those of the largest table that they fill."""
    return TABLES[max((n for n in TABLES if n <= gpus), default=min(TABLES))]
