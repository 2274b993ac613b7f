"""Weights of a model with one adapter merged into them, beside the plain ones.

Only dense maps have a second copy, the shadow; all other weights are shared. A switch writes the
whole shadow from the plain weights in one program: nothing is ever subtracted, so that plain steps
and merged ones give the same bits however often the adapter changes.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.slots import A_OFFSET, B_OFFSET, RANK, AdapterSlots
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.layers import Linear
from lora_jax.ops.merge import merge, merge_apart
from lora_jax.typing import Array, Float, Int
from serving.api.request import Merged, StepPlan
from serving.steps.compiled_step import MergedOperands

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
        self._maps, self._max_rank = dense_maps(model), max_rank
        names, self._num_modules = model.module_names, len(model.module_names)
        self._sites = tuple((names.index(m.module), m.layer) for m in self._maps)
        self._shadow = jax.tree.map(jnp.copy, self._of_maps(self._plain))
        self.merged: Merged | None = None
        self.slot: Int[Array, ""] | None = None  # of the adapter, on the device
        self.num_switches = 0
        self.steps = dict.fromkeys(MODES, 0)

    @property
    def modules(self) -> frozenset[str]:
        """The modules that adapters can be merged into."""
        return frozenset(m.module for m in self._maps)

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._shadow)

    @property
    def operands(self) -> MergedOperands:
        """The arguments that a step takes in the place of the plain model."""
        assert self.slot is not None, "warm_up comes first"
        leaves = list(self._plain)
        for m, shadow in zip(self._maps, self._shadow, strict=True):
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
        self.slot = jax.device_put(np.int32(merged.slot), self._plain[0].sharding)
        if changes:
            plain = self._of_maps(self._plain)
            self._shadow = switched(
                self._shadow, plain, slots, self.slot, sites=self._sites, max_rank=self._max_rank
            )
            self.num_switches += 1
            if merged.digest:
                logger.info("Adapter %s is merged into the weights now.", merged.name)
        self.merged = merged

    def warm_up(self, slots: AdapterSlots) -> None:
        """Compile the switch; the slots hold no adapter yet."""
        assert slots.entries.shape[0] == self._num_modules, "the slots have other modules"
        self._follow(Merged("", 0, "none"), slots)
        jax.block_until_ready(self._shadow)
        self.merged, self.num_switches = None, 0

    def _of_maps(self, leaves: Sequence[Array]) -> tuple[Array, ...]:
        return tuple(leaves[m.leaf] for m in self._maps)


@jax.jit
def _squares(maps: tuple[Float[Array, "d_out d_in"], ...]) -> tuple[Float[Array, ""], ...]:
    return tuple(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in maps)


@functools.partial(
    jax.jit, donate_argnums=0, keep_unused=True, static_argnames=("sites", "max_rank")
)
def switched(
    shadow: tuple[Float[Array, "d_out d_in"], ...],
    plain: tuple[Float[Array, "d_out d_in"], ...],
    slots: AdapterSlots,
    slot: Int[Array, ""],
    *,
    sites: tuple[tuple[int, int], ...],
    max_rank: int,
) -> tuple[Float[Array, "d_out d_in"], ...]:
    """Return every map with the slot's adapter, in the memory of `shadow` (donated).

    `sites` are the maps' places in the slots' table: module and layer.
    """
    del shadow  # its memory is what is wanted
    done: dict[int, Array] = {}
    shapes = [w.shape for w in plain]
    for shape in dict.fromkeys(shapes):
        members = [n for n, other in enumerate(shapes) if other == shape]
        at = np.array([sites[n] for n in members], np.int32)
        entries = slots.entries[at[:, 0], at[:, 1], slot]  # [maps, 5]
        scaling = slots.scaling[at[:, 0], at[:, 1], slot]
        site = jnp.stack([entries[:, n] for n in (A_OFFSET, B_OFFSET, RANK)], axis=1)
        pools = slots.pools[str(shape[1])], slots.pools[str(shape[0])]
        maps = tuple(plain[n] for n in members)
        merged = merge_apart(maps, *pools, site, scaling, max_rank=max_rank)
        done |= dict(zip(members, merged, strict=True))
    return tuple(done[n] for n in range(len(plain)))
