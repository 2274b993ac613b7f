"""What of an adapter lies where: experts on the ranks of a LoRA Server, the rest on the instance.

A rank holds the gate, up and down matrices of its layers and experts (a placement plan says which);
attention, router, shared experts and head stay in the instance's own slots. No jax.
"""

import dataclasses

import numpy as np

from lora_jax.adapters.catalogue import EXPERT_MODULES, LoraCatalogue
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from lora_jax.config import ModelConfig
from lora_jax.placement.ep_pp import Placement, from_text
from lora_jax.placement.shape import AdapterShape, adapter_shape


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's part: `layers` of the model and the experts from `first_expert` on."""

    rank: int
    layers: tuple[int, ...]
    first_expert: int
    num_experts: int

    @property
    def expert_slice(self) -> slice:
        return slice(self.first_expert, self.first_expert + self.num_experts)


@dataclasses.dataclass(frozen=True)
class ServerPlan:
    """A placement over the layers of one model that have experts."""

    placement: Placement
    moe_layers: tuple[int, ...]  # layer numbers of the model, in order

    @property
    def num_ranks(self) -> int:
        return self.placement.devices

    def shard(self, rank: int) -> Shard:
        """Return what rank `rank` holds."""
        experts = self.placement.experts_of(rank)
        layers = tuple(self.moe_layers[index] for index in self.placement.layers_of(rank))
        return Shard(rank, layers, experts.start, len(experts))

    def ranks_of(self, layer: int) -> range:
        """Return the ranks that share a layer of the model, in order of their experts."""
        return self.placement.group_of(self.moe_layers.index(layer))


def server_plan(
    config: ModelConfig, placement: str, ranks: int, adapters: int, rank: int, itemsize: int
) -> ServerPlan:
    """Return the plan that `placement` ("ep2-pp1") names for `adapters` adapters of `rank`.

    Raises ValueError for a model without experts, for a placement that does not fit `ranks`, and
    for data parallelism, which would have every rank answer for its own adapters.
    """
    shape: AdapterShape = adapter_shape(config, adapters, rank, itemsize)
    plan = from_text(placement, shape, ranks)
    if plan.dp > 1:
        raise ValueError(
            f"The placement {placement!r} deals out whole adapters, which this LoRA Server does "
            f"not do; use epX-ppY with X * Y = {ranks}."
        )
    assert config.moe is not None, "a shape of experts without experts"
    return ServerPlan(plan, tuple(config.moe.layers))


def has_experts(report: AdapterReport) -> bool:
    """Return whether the adapter changes any expert, and so needs the LoRA Server."""
    return any(module in EXPERT_MODULES for module in report.modules)


def local_catalogue(catalogue: LoraCatalogue) -> LoraCatalogue:
    """Return the catalogue of what an instance keeps itself: all modules but the experts'."""
    return catalogue.without_experts()


def shard_catalogue(catalogue: LoraCatalogue, shard: Shard) -> LoraCatalogue:
    """Return the catalogue of one rank: the experts' modules, its layers and experts only.

    Raises ValueError for a model whose experts no adapter can change.
    """
    if any(name not in catalogue.modules for name in EXPERT_MODULES):
        raise ValueError(
            f"Adapters cannot change the experts of {catalogue.model_type}, so that there is "
            "nothing for a LoRA Server to hold; serve this model without one."
        )
    mine = {
        name: dataclasses.replace(
            catalogue.modules[name], layers=shard.layers, num_experts=shard.num_experts
        )
        for name in EXPERT_MODULES
    }
    return dataclasses.replace(catalogue, modules=mine)


def local_part(weights: AdapterWeights) -> AdapterWeights:
    """Return the adapter without its experts; the digest stays that of the files.

    The report still names all modules, but counts the bytes of what is kept.
    """
    kept = {key: site for key, site in weights.sites.items() if key[0] not in EXPERT_MODULES}
    part = AdapterWeights(kept, weights.report)
    num_bytes = sum(matrix.nbytes for matrix in part.matrices())
    return AdapterWeights(kept, dataclasses.replace(weights.report, weight_bytes=num_bytes))


@dataclasses.dataclass(frozen=True, eq=False)
class SplitWeights(AdapterWeights):
    """The part without experts, and beside it the whole adapter, under a digest of its own."""

    whole: AdapterWeights


def split(weights: AdapterWeights) -> AdapterWeights:
    """Return the adapter without its experts, and with it the whole if it has any.

    The report counts the bytes of the whole.
    """
    part, report = local_part(weights), weights.report
    if not has_experts(report):
        return part
    digest = f"{report.digest} with experts"
    whole = AdapterWeights(weights.sites, dataclasses.replace(report, digest=digest))
    return SplitWeights(part.sites, report, whole)


def shard_part(weights: AdapterWeights, shard: Shard) -> AdapterWeights:
    """Return the experts of one rank, each matrix [num_experts or 1, rank, width].

    A matrix that sites or experts share stays one array, so that it is stored once. The arrays are
    copies: those of the whole adapter may go.
    """
    cut: dict[int, np.ndarray] = {}

    def mine(matrix: np.ndarray) -> np.ndarray:
        if id(matrix) not in cut:
            whole = matrix.shape[0] == 1
            cut[id(matrix)] = np.array(matrix if whole else matrix[shard.expert_slice])
        return cut[id(matrix)]

    sites = {
        (module, layer): SiteWeights(mine(site.a), mine(site.b), site.scaling)
        for (module, layer), site in weights.sites.items()
        if module in EXPERT_MODULES and layer in shard.layers
    }
    return AdapterWeights(sites, weights.report)
