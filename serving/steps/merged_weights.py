"""Weights of a model with one adapter merged into them, beside the plain ones.

Only dense maps have a second copy, the shadow; all other weights are shared.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.layers import Linear
from lora_jax.ops.merge import merge
from lora_jax.typing import Array, Float, Int
from serving.api.request import Merged, StepPlan
from serving.steps.operands import MergedOperands
from serving.steps.shadow import Shadow

logger = logging.getLogger(__name__)

PLAIN, MERGED, MIXTURE = MODES = ("plain", "merged", "mixture")  # of steps
_HEAD = "lm_head"  # read by rows, not by layers; a tied one is the embedding too


class DenseMap(NamedTuple):
    """A linear map that adapters can be merged into: its leaf, and where adapters name it."""

    leaf: int
    module: str
    layer: int


def dense_maps(model: AbstractCausalLM) -> tuple[DenseMap, ...]:
    """Return the maps of a model's layers whose adapters may be merged, in order of its leaves."""
    params = nnx.split(model, graph=False)[1]
    dtype = model.embed.weight[...].dtype
    maps = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0]):
        *owner, name = (key.key for key in path if hasattr(key, "key"))
        if name != "weight":
            continue
        module = functools.reduce(_child, owner, model)
        names = model.module_names
        if not isinstance(module, Linear) or module.module not in names or leaf.dtype != dtype:
            continue
        if module.module != _HEAD:
            maps.append(DenseMap(number, module.module, module.layer))
    return tuple(maps)


def dense_map_bytes(model: AbstractCausalLM) -> int:
    """Return the bytes of all those maps."""
    leaves = jax.tree.leaves(nnx.split(model, graph=False)[1])
    return sum(leaves[m.leaf].nbytes for m in dense_maps(model))


def merge_into(model: AbstractCausalLM, weights: AdapterWeights, max_rank: int) -> None:
    """Put an adapter into a model's own dense maps, for good: the bits are those of a switch."""
    params = nnx.split(model, graph=False)[1]
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    for m in dense_maps(model):
        site = weights.sites.get((m.module, m.layer))
        if site is None:
            continue
        *owner, _ = (key.key for key in paths[m.leaf] if hasattr(key, "key"))
        linear = functools.reduce(_child, owner, model)
        w = linear.weight[...]
        pools = (jnp.asarray(np.asarray(p[0], np.float32), w.dtype) for p in (site.a, site.b))
        rows = jnp.asarray([[0, 0, site.rank]], jnp.int32)
        scaling = jnp.asarray([site.scaling], jnp.float32)
        linear.weight[...] = _merge_one(w[None], *pools, rows, scaling, max_rank=max_rank)[0]


_merge_one = jax.jit(merge, static_argnames=("max_rank", "implementation"))


def _child(module: Any, key: str | int) -> Any:
    return module[key] if isinstance(key, int) else getattr(module, key)


class MergedWeights:
    """The shadow of one model; the engine's thread uses it."""

    def __init__(self, model: AbstractCausalLM, max_rank: int):
        """`max_rank` bounds the adapters' ranks. Takes the memory of the dense maps at once."""
        self._plain = tuple(jax.tree.leaves(nnx.split(model, graph=False)[1]))
        self._maps = dense_maps(model)
        names, self._num_modules = model.module_names, len(model.module_names)
        sites = tuple((names.index(m.module), m.layer) for m in self._maps)
        self._shadow = Shadow(self._of_maps(self._plain), sites, max_rank)
        self.merged: Merged | None = None
        self.slot: Int[Array, ""] | None = None  # of the adapter, on the device
        self.num_switches = 0
        self.steps = dict.fromkeys(MODES, 0)

    def close(self) -> None:
        """Let go of all weights; only counts are asked for after it."""
        del self._plain, self._shadow
        self.slot = None

    @property
    def modules(self) -> frozenset[str]:
        """The modules that adapters can be merged into."""
        return frozenset(m.module for m in self._maps)

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._shadow.maps)

    @property
    def operands(self) -> MergedOperands:
        """The arguments that a step takes in the place of the plain model."""
        assert self.slot is not None, "warm_up comes first"
        leaves = list(self._plain)
        for m, shadow in zip(self._maps, self._shadow.maps, strict=True):
            leaves[m.leaf] = shadow
        return MergedOperands(tuple(leaves), self.slot)

    @property
    def norms(self) -> dict[tuple[str, int], float]:
        """The Frobenius norm of each map's plain weights, by module and layer."""
        squares = _squares(self._of_maps(self._plain))
        pairs = zip(self._maps, squares, strict=True)
        return {(m.module, m.layer): float(square) ** 0.5 for m, square in pairs}

    def prepare(self, plan: StepPlan, slots: AdapterSlots) -> None:
        """Have the weights that this step takes; steps must be sent to the device in this order."""
        if plan.merged is not None:
            self._follow(plan.merged, slots)
        mode = PLAIN if plan.merged is None else MIXTURE if plan.is_mixture else MERGED
        self.steps[mode] += 1

    def _follow(self, merged: Merged, slots: AdapterSlots) -> None:
        if self.merged == merged:
            return
        changes = self.merged is None or self.merged.digest != merged.digest
        slot = jax.device_put(np.int32(merged.slot), self._plain[0].sharding)
        self.slot = self._shadow.merge(slots, slot) if changes else slot
        if changes:
            self.num_switches += 1
            if merged.digest:
                logger.info("Adapter %s is merged into the weights now.", merged.name)
        self.merged = merged

    def warm_up(self, slots: AdapterSlots) -> None:
        """Compile the switch; the slots hold no adapter yet."""
        assert slots.entries.shape[0] == self._num_modules, "the slots have other modules"
        self._follow(Merged("", 0, "none"), slots)
        self.wait()
        self.merged, self.num_switches = None, 0

    def wait(self) -> None:
        """Wait until the newest switch has written the shadow."""
        assert self.slot is not None, "warm_up comes first"
        self._shadow.wait(self.slot)

    def _of_maps(self, leaves: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(leaves[m.leaf] for m in self._maps)


@jax.jit
def _squares(maps: tuple[Float[Array, "d_out d_in"], ...]) -> tuple[Float[Array, ""], ...]:
    return tuple(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in maps)
