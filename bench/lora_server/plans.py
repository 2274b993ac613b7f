"""What is measured: Mixtral 8x7B's layers, and placements that fit few GPUs."""

import dataclasses

from lora_jax.ops.cases import MODELS
from lora_jax.placement.ep_pp import Placement
from lora_jax.placement.shape import AdapterShape
from serving.transport.shapes import moe_shapes
from serving.transport.terms import Terms

SHAPE = MODELS["mixtral-8x7b"]
EXPERTS, TOP_K, HIDDEN, WIDTH = SHAPE.num_experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate
MATRICES = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
RANK, ADAPTERS, SCALING = 64, 256, 0.5
LAYERS = 4  # of one program
REFUSE, ECHO, LORA = 0, 1, 2  # what servers do


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement; how many of its ranks, and how many instances, have a GPU here."""

    name: str
    ep: int
    pp: int
    servers: int
    instances: int = 1
    pull: bool = False
    aside: bool = True

    @property
    def placement(self) -> Placement:
        return Placement(AdapterShape(ADAPTERS, LAYERS, EXPERTS, 1), ep=self.ep, pp=self.pp)

    @property
    def gpus(self) -> int:
        return self.servers + self.instances

    def terms(self, tokens: int) -> Terms:
        """Return what both sides of a batch of so many tokens agree on."""
        rows = tokens * TOP_K
        shapes = moe_shapes(LAYERS, rows, HIDDEN, WIDTH, "bfloat16", "bfloat16")
        return Terms("bench", self.placement, shapes)


PLANS = {
    plan.name: plan
    for plan in (
        Plan("EP1-PP1", 1, 1, 1),
        Plan("EP2-PP1", 2, 1, 2),
        Plan("EP1-PP2", 1, 2, 2),
        Plan("EP4-PP1", 4, 1, 4),
        Plan("EP2-PP2", 2, 2, 4),
        Plan("EP4-PP1, 3 of its ranks", 4, 1, 3),
        Plan("EP1-PP1, 2 instances", 1, 1, 1, 2),
        Plan("EP1-PP1, 3 instances", 1, 1, 1, 3),
        Plan("EP2-PP1, 2 instances", 2, 1, 2, 2),
        Plan("EP1-PP1, push in the stream", 1, 1, 1, aside=False),
        Plan("EP2-PP1, push in the stream", 2, 1, 2, aside=False),
        Plan("EP1-PP1, pull", 1, 1, 1, pull=True),
        Plan("EP2-PP1, pull", 2, 1, 2, pull=True),
    )
}
