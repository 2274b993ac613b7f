"""The step of a model over several devices: one shard_map around all of it.

Every device runs the same program on its own weights, KV heads and rank rows, and has everything
else whole: tokens, tables, logits, samples.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lora_jax.sharding import Split

WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class StepSplit:
    """A split of the model, and how it splits KV pages."""

    split: Split
    pages: PartitionSpec

    def over_devices(
        self, step: Callable, leaves: Sequence[PartitionSpec], donated: Any, rest: Any
    ) -> Callable:
        """Return step(leaves, donated, rest) -> (cache, state, samples, status) over the devices.

        `leaves` says where the weights lie; the trees are those of CompiledStep's arguments: of
        (cache, ...), and of ((slots, ...), ...).
        """
        cache, *_ = donated.children()
        donated_specs = _of_leaves(donated, self.pages, cache.num_leaves)
        slots, *_ = rest.children()[0].children()
        rest_specs = _of_leaves(rest, self.split.rows.spec, _num_pools(slots))
        return jax.shard_map(
            step,
            mesh=self.split.mesh,
            in_specs=(tuple(leaves), donated_specs, rest_specs),
            out_specs=(self.pages, WHOLE, WHOLE, WHOLE),
            check_vma=False,
        )

    def on_every_device(self, sample: Callable) -> Callable:
        """Return sample(donated, rest) -> (state, samples), the same on each device."""
        return jax.shard_map(
            sample,
            mesh=self.split.mesh,
            in_specs=(WHOLE, WHOLE),
            out_specs=(WHOLE, WHOLE),
            check_vma=False,
        )


def encode_on_every_device(encode: Callable, slots: Any, split: Split) -> Callable:
    """Return encode(leaves, cache, inputs, slots' leaves, slot, targets) of a whole tower.

    `slots` is the tree of the adapter slots; all devices give the same (cache, number).
    """
    adapters = _of_leaves(slots, split.rows.spec, _num_pools(slots))
    return jax.shard_map(
        encode,
        mesh=split.mesh,
        in_specs=(WHOLE, WHOLE, WHOLE, adapters, WHOLE, WHOLE),
        out_specs=(WHOLE, WHOLE),
        check_vma=False,
    )


def weight_specs(leaves: Sequence[Any]) -> tuple[PartitionSpec, ...]:
    """Return how each weight of a split model is split."""
    return tuple(leaf.sharding.spec for leaf in leaves)


def _of_leaves(tree: Any, first: PartitionSpec, count: int) -> list[PartitionSpec]:
    """Return a spec for each leaf: `first` for the first `count`, the others are whole."""
    return [first] * count + [WHOLE] * (tree.num_leaves - count)


def _num_pools(slots: Any) -> int:
    """Return how many leaves are pools of rank rows, which are the first of AdapterSlots."""
    return slots.children()[0].num_leaves if slots.num_leaves else 0
