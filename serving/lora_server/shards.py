"""Splits an adapter between server ranks and the instance.

A rank holds the gate, up and down matrices of its layers and experts (a ShardLayout says which);
attention, router, shared experts and head stay in the instance's own slots. If attention is asked
for, the rank of a layer's first expert holds that layer's q, k, v and o too. No jax.
"""

import dataclasses
from typing import Protocol

import numpy as np

from lora_jax.adapters.catalogue import EXPERT_MODULES, LoraCatalogue
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from lora_jax.config import ModelConfig
from lora_jax.placement.ep_pp import ServerLayout, from_text
from lora_jax.placement.shape import AdapterShape, adapter_shape
from serving.lora_server.transport.shapes import DOWN, GATE_UP, OUT, QKV

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
SITES = {  # the modules of each exchange of a layer
    GATE_UP: EXPERT_MODULES[:2],
    DOWN: EXPERT_MODULES[2:],
    QKV: ATTENTION_MODULES[:3],
    OUT: ATTENTION_MODULES[3:],
}


@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's part: `layers` of the model and the experts from `first_expert` on."""

    rank: int
    layers: tuple[int, ...]
    first_expert: int
    num_experts: int
    attention: bool = False  # of its layers too

    @property
    def modules(self) -> tuple[str, ...]:
        """Part of an adapter that it holds."""
        return EXPERT_MODULES + ATTENTION_MODULES if self.attention else EXPERT_MODULES

    @property
    def sites(self) -> dict[int, tuple[str, ...]]:
        """Modules of each exchange that it answers, by the number of the site."""
        return {site: names for site, names in SITES.items() if {*names} <= {*self.modules}}

    @property
    def expert_slice(self) -> slice:
        """Its experts among all of the model."""
        return slice(self.first_expert, self.first_expert + self.num_experts)

    def catalogue(self, catalogue: LoraCatalogue) -> LoraCatalogue:
        """Return the catalogue of this part; see `shard_catalogue`."""
        return shard_catalogue(catalogue, self)


class AbstractShard(Protocol):
    """One rank's part of every adapter, of a plan or of whole adapters."""

    @property
    def rank(self) -> int: ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def first_expert(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def modules(self) -> tuple[str, ...]: ...

    @property
    def sites(self) -> dict[int, tuple[str, ...]]: ...

    @property
    def expert_slice(self) -> slice: ...

    def catalogue(self, catalogue: LoraCatalogue) -> LoraCatalogue: ...


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """A placement over the layers of one model that have experts."""

    placement: ServerLayout
    moe_layers: tuple[int, ...]  # layer numbers of the model, in order
    attention: bool = False  # of these layers too

    @property
    def num_ranks(self) -> int:
        """Devices of the server, each of which is a rank."""
        return self.placement.devices

    def has(self, module: str, layer: int) -> bool:
        """True if the server holds this module of the layer."""
        if module in EXPERT_MODULES:
            return True
        return self.attention and module in ATTENTION_MODULES and layer in self.moe_layers

    def has_any(self, report: AdapterReport) -> bool:
        """True if the server holds a part of an adapter, which needs it then."""
        modules = report.modules.items()
        return any(self.has(module, layer) for module, entry in modules for layer in entry.layers)

    def shard(self, rank: int) -> Shard:
        """Return what rank `rank` holds."""
        experts = self.placement.experts_of(rank)
        layers = tuple(self.moe_layers[index] for index in self.placement.layers_of(rank))
        attention = self.attention and experts.start == 0
        return Shard(rank, layers, experts.start, len(experts), attention)


def shard_layout(
    config: ModelConfig,
    placement: str,
    ranks: int,
    adapters: int,
    rank: int,
    itemsize: int,
    attention: bool = False,
) -> ShardLayout:
    """Return the layout that `placement` ("ep2-pp1") names for `adapters` adapters of `rank`.

    Raises ValueError for a model without experts, for a placement that does not fit `ranks`, and
    for data parallelism, which would have every rank answer for its own adapters.
    """
    shape: AdapterShape = adapter_shape(config, adapters, rank, itemsize)
    layout = from_text(placement, shape, ranks)
    if layout.dp > 1:
        raise ValueError(
            f"The placement {placement!r} gives whole adapters to ranks, which is not "
            f"supported; use epX-ppY with X * Y = {ranks}."
        )
    assert config.moe is not None, "a shape of experts without experts"
    return ShardLayout(layout, tuple(config.moe.layers), attention)


class Holds(Protocol):
    """A test of a layer's module: whether a server holds it."""

    def has(self, module: str, layer: int) -> bool: ...


def local_catalogue(catalogue: LoraCatalogue, layout: Holds) -> LoraCatalogue:
    """Return the catalogue of what an instance keeps itself."""
    kept = {}
    for name, module in catalogue.modules.items():
        layers = tuple(layer for layer in module.layers if not layout.has(name, layer))
        if layers:
            kept[name] = dataclasses.replace(module, layers=layers)
    return dataclasses.replace(catalogue, modules=kept)


def shard_catalogue(catalogue: LoraCatalogue, shard: Shard) -> LoraCatalogue:
    """Return the catalogue of one rank: the experts' modules, its layers and experts only.

    Raises ValueError for a model whose experts no adapter can change, and for attention of another
    kind.
    """
    if shard.attention and any(name not in catalogue.modules for name in ATTENTION_MODULES):
        raise ValueError(
            f"Attention of {catalogue.model_type} is not made of q_proj, k_proj, v_proj and "
            "o_proj; its adapters stay on the instances: --lora-attention local."
        )
    if any(name not in catalogue.modules for name in EXPERT_MODULES):
        raise ValueError(
            f"Adapters cannot change the experts of {catalogue.model_type}, so that there is "
            "nothing for a LoRA Server to hold; serve this model without one."
        )
    modules = {name: catalogue.modules[name] for name in shard.modules}
    for name, module in modules.items():
        experts = shard.num_experts if module.num_experts else 0
        modules[name] = dataclasses.replace(module, layers=shard.layers, num_experts=experts)
    return dataclasses.replace(catalogue, modules=modules)


def local_part(weights: AdapterWeights, layout: ShardLayout) -> AdapterWeights:
    """Return the adapter without what the server holds; the digest stays that of the files.

    The report still names all modules, but counts the bytes of what is kept.
    """
    kept = {site: matrices for site, matrices in weights.sites.items() if not layout.has(*site)}
    part = AdapterWeights(kept, weights.report)
    num_bytes = sum(matrix.nbytes for matrix in part.matrices())
    return AdapterWeights(kept, dataclasses.replace(weights.report, weight_bytes=num_bytes))


@dataclasses.dataclass(frozen=True, eq=False)
class SplitWeights(AdapterWeights):
    """The local part, and beside it the whole adapter, under a digest of its own."""

    whole: AdapterWeights

    def in_8_bits(self) -> "SplitWeights":
        """Return both in 8 bits; the part goes on sharing the matrices of the whole."""
        return self._of(self.whole.in_8_bits())

    def narrowed(self, dtype: np.dtype) -> "SplitWeights":
        """Return both with rank rows of a narrower dtype; the part goes on sharing the matrices."""
        return self._of(self.whole.narrowed(dtype))

    def _of(self, whole: AdapterWeights) -> "SplitWeights":
        sites = {key: whole.sites[key] for key in self.sites}
        size = whole.report.weight_bytes
        return SplitWeights(sites, dataclasses.replace(self.report, weight_bytes=size), whole)


def split(weights: AdapterWeights, layout: ShardLayout) -> AdapterWeights:
    """Return the local part, and with it the whole if that is more.

    The report counts the bytes of the whole.
    """
    part, report = local_part(weights, layout), weights.report
    if not layout.has_any(report):
        return part
    digest = f"{report.digest} with experts"
    whole = AdapterWeights(weights.sites, dataclasses.replace(report, digest=digest))
    return SplitWeights(part.sites, report, whole)


def shard_part(
    weights: AdapterWeights, shard: AbstractShard, *, copy: bool = True
) -> AdapterWeights:
    """Return one rank's part, each matrix [num_experts or 1, rank, width].

    A matrix that sites or experts share stays one array, so that it is stored once. The arrays are
    copies, so that those of the whole adapter may go; without `copy` views.
    """
    cut: dict[int, np.ndarray] = {}

    def part(matrix: np.ndarray) -> np.ndarray:
        if id(matrix) not in cut:
            whole = matrix.shape[0] == 1  # of all experts, or of none
            piece = matrix if whole else matrix[shard.expert_slice]
            cut[id(matrix)] = piece.copy() if copy else piece
        return cut[id(matrix)]

    sites = {
        (module, layer): SiteWeights(part(site.a), part(site.b), site.scaling)
        for (module, layer), site in weights.sites.items()
        if module in shard.modules and layer in shard.layers
    }
    return AdapterWeights(sites, weights.report)
