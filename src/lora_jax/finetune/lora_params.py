"""LoRA matrices as they are trained: one stacked pair per module, and what they add to a map."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.typing import Array, Float

GATE, UP, FUSED = "experts.gate_proj", "experts.up_proj", "experts.gate_up_proj"


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Trained parameters: `modules` are names of the base model's catalogue.

    With `fused_experts` gate and up of the experts share their A and are one module on disk, as
    in transformers 5; otherwise each expert has its own A for either.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    use_rslora: bool = False
    fused_experts: bool = True

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"rank {self.rank} and alpha {self.alpha} must be positive")
        if self.fused_experts and (GATE in self.modules) != (UP in self.modules):
            raise ValueError(f"fused experts need both {GATE} and {UP}, or neither")

    @property
    def scaling(self) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraPair:
    """y += scaling * (x A^T) B in each of a module's layers; experts is 1 for a dense map."""

    a: Float[Array, "layers experts rank d_in"]
    b: Float[Array, "layers experts rank d_out"]


LoraParams = dict[str, LoraPair]


def init_lora(spec: LoraSpec, catalogue: LoraCatalogue, seed: int) -> LoraParams:
    """Return float32 pairs that add nothing yet: A uniform in +-1/sqrt(d_in), B zero.

    Raises ValueError naming a module that the base model has not.
    """
    unknown = sorted(set(spec.modules) - set(catalogue.modules))
    if unknown or not spec.modules:
        names = ", ".join(catalogue.module_names)
        raise ValueError(f"{catalogue.model_type} has no module {unknown}; it has {names}")
    params = {}
    for index, (name, module) in enumerate(sorted(trained_modules(spec, catalogue).items())):
        lead = (len(module.layers), max(module.num_experts, 1), spec.rank)
        key = jax.random.fold_in(jax.random.key(seed), index)
        bound = 1.0 / math.sqrt(module.d_in)
        a = jax.random.uniform(key, (*lead, module.d_in), jnp.float32, -bound, bound)
        params[name] = LoraPair(a=a, b=jnp.zeros((*lead, module.d_out), jnp.float32))
    return params


def trained_modules(spec: LoraSpec, catalogue: LoraCatalogue) -> dict[str, LoraModule]:
    """Return the modules as they are trained: gate and up of fused experts as one."""
    chosen = {name: catalogue.modules[name] for name in spec.modules}
    if spec.fused_experts and GATE in chosen:
        gate, up = chosen.pop(GATE), chosen.pop(UP)
        chosen[FUSED] = dataclasses.replace(gate, name=FUSED, d_out=gate.d_out + up.d_out)
    return chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Site:
    """One module in one layer: y += scaling * (x A_e^T) B_e; a lone matrix serves all experts."""

    a: Float[Array, "a_experts rank d_in"]
    b: Float[Array, "b_experts rank d_out"]
    scaling: float = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraDelta:
    """Deltas of an adapter at each (module, layer) of the base model."""

    sites: dict[tuple[str, int], Site]

    def dense(
        self, x: Float[Array, "rows d_in"], module: str, layer: int
    ) -> Float[Array, "rows d_out"] | None:
        """Return scaling * (x A^T) B, or None where there is no adapter."""
        site = self.sites.get((module, layer))
        if site is None:
            return None
        h = jnp.einsum("ti,ri->tr", x, site.a[0])
        return jnp.einsum("tr,ro->to", h, site.b[0]) * site.scaling

    def each_expert(
        self, x: Float[Array, "rows d_in"], module: str, layer: int, experts: int
    ) -> Float[Array, "rows experts d_out"] | None:
        """Return scaling * (x A_e^T) B_e of every expert for the same x, or None."""
        site = self.sites.get((module, layer))
        if site is None:
            return None
        h = jnp.einsum("ti,eri->ter", x, for_each(site.a, experts))
        return jnp.einsum("ter,ero->teo", h, for_each(site.b, experts)) * site.scaling

    def sum_of_experts(
        self, x: Float[Array, "rows experts d_in"], module: str, layer: int
    ) -> Float[Array, "rows d_out"] | None:
        """Return the sum over experts of scaling * (x_e A_e^T) B_e, or None."""
        site = self.sites.get((module, layer))
        if site is None:
            return None
        h = jnp.einsum("tei,eri->ter", x, for_each(site.a, x.shape[1]))
        return jnp.einsum("ter,ero->to", h, for_each(site.b, x.shape[1])) * site.scaling


def for_each(
    matrix: Float[Array, "stored rank width"], experts: int
) -> Float[Array, "experts rank width"]:
    """Return one matrix per expert of a stack that may hold a shared one."""
    return jnp.broadcast_to(matrix, (experts, *matrix.shape[1:]))


def trained_delta(params: LoraParams, spec: LoraSpec, catalogue: LoraCatalogue) -> LoraDelta:
    """Return what pairs in training add: gate and up of fused experts are halves of one B."""
    sites = {}
    for name, pair in params.items():
        parts = ((GATE, 0), (UP, 1)) if name == FUSED else ((name, None),)
        for module, half in parts:
            b = pair.b if half is None else jnp.split(pair.b, 2, axis=-1)[half]
            for index, layer in enumerate(catalogue.modules[module].layers):
                sites[module, layer] = Site(pair.a[index], b[index], spec.scaling)
    return LoraDelta(sites)


def loaded_lora(weights: AdapterWeights, spec: LoraSpec, catalogue: LoraCatalogue) -> LoraParams:
    """Return the pairs of an adapter read from its files, in float32, to train on.

    Raises ValueError unless it has the spec's rank and scaling at every site of the spec's modules.
    """
    params = {}
    for name, module in trained_modules(spec, catalogue).items():
        sites = [weights.sites.get((name, layer)) for layer in module.layers]
        fit = [s for s in sites if s and (s.rank, s.scaling) == (spec.rank, spec.scaling)]
        if len(fit) < len(sites):
            raise ValueError(
                f"{weights.report.folder} has not {name} with rank {spec.rank} and scaling "
                f"{spec.scaling:g} in every layer; train it on with the settings it was made with"
            )
        a, b = ([np.asarray(getattr(s, side), np.float32) for s in fit] for side in "ab")
        params[name] = LoraPair(a=jnp.asarray(np.stack(a)), b=jnp.asarray(np.stack(b)))
    return params


def loaded_delta(weights: AdapterWeights) -> LoraDelta:
    """Return what an adapter read from its files adds, in float32."""
    return LoraDelta(
        {
            key: Site(jnp.asarray(s.a, jnp.float32), jnp.asarray(s.b, jnp.float32), s.scaling)
            for key, s in weights.sites.items()
        }
    )
