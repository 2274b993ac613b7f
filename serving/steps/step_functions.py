"""A step and its two parts, forward and sample, as jitted functions of leaves.

Everything goes in as leaves: to lower a program, jax fills its arguments' trees with what is no
array, and checked dataclasses refuse that. `leaves` are the model's, `donated` those whose memory
the results take, `rest` all others; `trees` are the structures of the latter two.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from serving.lora_server.sides import RemoteLink
from serving.steps.device_state import RowState
from serving.steps.sampling.mask_board import MaskBoard
from serving.steps.sampling.token_masks import unpack_masks
from serving.steps.split_step import StepSplit, weight_specs
from serving.steps.step import (
    Sample,
    StepSizes,
    forward_step,
    history_with_drafts,
    sample_step,
    with_drafts,
)

Leaves = Sequence[Any]
Trees = tuple[Any, Any]


def jit_steps(
    model: nnx.Module,
    sizes: StepSizes,
    link: RemoteLink | None,
    sample: Sample,
    options: dict[str, str] | None,
    split: StepSplit | None,
    board: MaskBoard | None,
) -> tuple[tuple[Callable, Callable, Callable], tuple[jax.Array, ...]]:
    """Return the step, its forward and its sample part, and the model's leaves, held by no one.

    `options` are the compiler's for the former two.
    """
    graphdef, params = nnx.split(model, graph=False)
    leaves, treedef = jax.tree.flatten(params)
    specs = None if split is None else weight_specs(leaves)
    made = _StepFunctions(
        functools.partial(_merged, graphdef, treedef), specs, sizes, link, sample, split, board
    )
    options_of = {"donate_argnums": 1, "keep_unused": True, "compiler_options": options}
    names = ("trees", "bucket", "lora", "bound")
    step = jax.jit(made.step, static_argnames=names, **options_of)
    forward = jax.jit(made.forward, static_argnames=names[:2], **options_of)
    sample_part = jax.jit(
        made.sample_part, static_argnames="trees", donate_argnums=0, keep_unused=True
    )
    return (step, forward, sample_part), tuple(leaves)


def _merged(graphdef: Any, treedef: Any, leaves: Leaves) -> Any:
    """Return the model of these leaves."""
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


class _StepFunctions:
    """Functions to jit; a method behind `_local` runs on each device of a split model."""

    def __init__(
        self,
        merged: Callable[[Leaves], Any],
        specs: Any,
        sizes: StepSizes,
        link: RemoteLink | None,
        sample: Sample,
        split: StepSplit | None,
        board: MaskBoard | None,
    ):
        self._merged, self._specs, self._sizes, self._link = merged, specs, sizes, link
        self._sample, self._split, self._board = sample, split, board

    def step(
        self,
        leaves: Leaves,
        donated: Leaves,
        rest: Leaves,
        trees: Trees,
        *,
        bucket: int,
        lora: bool,
        bound: bool,
    ) -> Any:
        """Return cache, state's history, samples and servers' status after a step."""
        options = {"bucket": bucket, "lora": lora, "bound": bound}
        local = functools.partial(self._local_step, trees=trees, **options)
        return self._over_devices(local, trees)(leaves, donated, rest)

    def forward(
        self, leaves: Leaves, donated: Leaves, rest: Leaves, trees: Trees, *, bucket: int
    ) -> Any:
        """Return cache, logits, (rows, heads) and servers' status after a step's forward part.

        Of the donated results only the memory is used.
        """
        local = functools.partial(self._local_forward, trees=trees, bucket=bucket)
        return self._over_devices(local, trees)(leaves, donated, rest)

    def sample_part(self, donated: Leaves, rest: Leaves, trees: Trees) -> Any:
        """Return the state's history and samples after a step's sample part."""
        local = functools.partial(self._local_sample, trees=trees)
        if self._split is not None:
            local = self._split.on_every_device(local)
        return local(donated, rest)

    def _over_devices(self, local: Callable, trees: Trees) -> Callable:
        if self._split is None or self._specs is None:
            return local
        return self._split.over_devices(local, self._specs, *trees)

    def _local_step(
        self,
        leaves: Leaves,
        donated: Leaves,
        rest: Any,
        *,
        trees: Trees,
        bucket: int,
        lora: bool,
        bound: bool,
    ) -> Any:
        cache, history, *_ = jax.tree.unflatten(trees[0], donated)
        *rest, fixed, waits = jax.tree.unflatten(trees[1], rest)
        state = RowState(history, *fixed)
        if self._sizes.max_drafts:
            state = with_drafts(state, rest[1])
        done = self._run_forward(leaves, cache, state.history, rest, bucket, lora)
        cache, logits, (rows, heads), status = done
        masks = None
        if bound and self._board is not None:
            masks = self._board.read(waits[0], waits[1], logits)
        state, sampled = sample_step(logits, rows, state, self._sample, masks, heads)
        return cache, state.history, sampled, status

    def _local_forward(
        self, leaves: Leaves, donated: Leaves, rest: Any, *, trees: Trees, bucket: int
    ) -> Any:
        cache, *_ = jax.tree.unflatten(trees[0], donated)
        *rest, history = jax.tree.unflatten(trees[1], rest)
        if self._sizes.max_drafts:
            history = history_with_drafts(history, rest[1])
        return self._run_forward(leaves, cache, history, rest, bucket, True)

    def _run_forward(
        self, leaves: Leaves, cache: Any, history: Any, rest: Any, bucket: int, lora: bool
    ) -> Any:
        (slots, reroute_tables, remote_table), table, pages, images, merged, pooled = rest
        cache = pooled if cache is None else cache
        split = None if self._split is None else self._split.split
        remote = None
        if self._link is not None and lora:
            remote = self._link.start(remote_table, split)
        cache, logits, rows, heads = forward_step(
            self._merged(leaves),
            cache,
            history,
            slots,
            table,
            pages,
            bucket,
            self._sizes,
            reroute_tables,
            remote,
            lora,
            images,
            split,
            merged,
        )
        cache = cache if pooled is None else None
        return cache, logits, (rows, heads), None if remote is None else remote.status()

    def _local_sample(self, donated: Leaves, rest: Any, *, trees: Trees) -> Any:
        history, *_ = jax.tree.unflatten(trees[0], donated)
        (logits, rows, heads), packed, table, fixed = jax.tree.unflatten(trees[1], rest)
        state = RowState(history, *fixed)
        masks = unpack_masks(packed, self._sizes.num_masks, logits.shape[1])
        if table is not None:
            state = with_drafts(state, table)
        state, sampled = sample_step(logits, rows, state, self._sample, masks, heads)
        return state.history, sampled
