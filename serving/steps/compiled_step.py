"""The engine's step as compiled programs: one per token bucket, with and without LoRA.

On an accelerator a program is one CUDA graph, sampling included: it decides on the device which
sampler the rows need. A graph holds addresses, and XLA writes it anew when one of them changes,
which takes the host longer than a small step takes the device; so there the programs read and write
the same memory every time: the host's tables are copied into arrays that stay, and results are
copied out of arrays that stay.

The masks of rows that a grammar binds follow from the tokens of the step before, so the host makes
them while the step runs. With a mask board the step waits for them late. Without one it is two
programs, forward and sample.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.stages import Lowered, Traced

from lora_jax.kv_cache import PagedKVCache
from lora_jax.sharding import put
from lora_jax.typing import Array, Int
from serving.lora_server.sides import RemoteLink
from serving.runtime.program_cache import forget_lowered
from serving.steps.device_state import RowState, history_and_rest, zeros
from serving.steps.forwarded import Forwarded, no_heads, no_logits
from serving.steps.host_inputs import HostInputs, make_holes
from serving.steps.kept_steps import KeptJit, KeptProgram, KeptSteps
from serving.steps.operands import Operands
from serving.steps.sampling import batch_sampler, sampler
from serving.steps.sampling.mask_board import MaskBoard
from serving.steps.sampling.sampler import Sampled, no_samples
from serving.steps.sampling.token_masks import HostMasks
from serving.steps.split_step import StepSplit
from serving.steps.step import StepSizes
from serving.steps.step_functions import jit_steps

# XLA takes the addresses of expert tensors for memory, finds more of it than there is, and would
# compute many things twice to save some. It still says once that the arguments exceed its limit.
NO_REMAT = {"xla_disable_hlo_passes": "rematerialization"}


@dataclasses.dataclass(frozen=True, eq=False)
class _Flat:
    """A step's arguments that stay from step to step, flattened."""

    parts: tuple[Any, ...]
    leaves: list[Any]
    trees: tuple[Any, Any]  # of what is donated, of the rest
    table: int  # place of the step's table among the leaves; block tables come next


class CompiledStep:
    """Runs steps of one model; the runner's thread uses it."""

    def __init__(
        self,
        model: nnx.Module,
        sizes: StepSizes,
        link: RemoteLink | None,
        vocab_size: int,
        *,
        in_place: bool,
        compiler_options: dict[str, str] | None = None,
        split: StepSplit | None = None,
        kept: KeptSteps | None = None,
        board: MaskBoard | None = None,
        largest_sent: int | None = None,
    ):
        """`in_place` samples all rows at once, and memory stays where it is; see the module.

        With `split` the model lies on several devices, and a step runs on all of them. With `kept`
        programs outlive the process; not together with `split` or `link`. With `board` steps may be
        bound by masks, on one device. `largest_sent` is make_holes'.
        """
        self._sizes, self._vocab_size, self._in_place = sizes, vocab_size, in_place
        self._pooled, self._is_split = sizes.pooled, split is not None
        sample = batch_sampler.sample if in_place else sampler.sample
        jitted = jit_steps(model, sizes, link, sample, compiler_options, split, board)
        steps, self._leaves = jitted
        self.lazy = kept is not None and kept.lazy
        if kept is not None:
            facts = sizes, vocab_size, in_place, compiler_options
            named = zip(("step", "forward", "sample"), steps, strict=True)
            steps = tuple(kept.keep(name, one, *facts) for name, one in named)
        self._step, self._forward, self._sample = steps
        self.sharding = self._leaves[0].sharding if split is None else split.split.whole
        self.inputs = HostInputs(sizes, self._place, in_place=in_place)
        self._board = None if board is None else self._place(board.address)
        self._spacers = make_holes(self._place, largest_sent) if in_place else []
        self._results: dict[int, Sampled] = {}  # by number of logit rows
        self._forwarded: dict[int, Forwarded] = {}  # by bucket
        self._sent: np.ndarray | jax.Array | None = None  # the table of a forward part
        self._flat: _Flat | None = None  # of the last step
        self._status: jax.Array | None = None  # of a LoRA Server's ranks
        if in_place and link is not None:
            self._status = self._place(np.zeros(link.client.servers, np.int32))

    def close(self) -> None:
        """Let go of the programs and of all arrays, the model's leaves too; nothing runs after."""
        for step in (self._step, self._forward, self._sample):
            if isinstance(step, KeptJit):
                step.close()
        vars(self).clear()
        forget_lowered()

    @property
    def num_warm_runs(self) -> int:
        """Return the runs of a program before its first step.

        On a GPU the second call makes its CUDA graph, for which CUDA may wait for an idle device.
        """
        return 2 if self._in_place else 1

    def trace(
        self, operands: Operands, table: np.ndarray, bucket: int, *, lora: bool, bound: bool = False
    ) -> Traced | KeptProgram:
        """Return the program that `run` runs for the same arguments, ready to lower."""
        source = self.inputs.table if self._in_place else table
        arguments = self._arguments(operands, source, bucket, lora=lora, bound=bound)
        return self._step.trace(*arguments, bucket=bucket, lora=lora, bound=bound)

    def run(
        self,
        operands: Operands,
        table: np.ndarray,
        bucket: int,
        *,
        lora: bool,
        bound: bool = False,
        number: int = 0,
    ) -> tuple[PagedKVCache, RowState, Sampled, jax.Array | None]:
        """Return cache and state after the step, its samples and servers' status.

        The cache and the state's history are donated; pages of a pool are not, but written where
        they lie. In place, samples of several devices are on the first. A bound step waits for the
        masks of this number; 0: there are none.
        """
        source, options = self.inputs.set_table(table, number), {"lora": lora, "bound": bound}
        arguments = self._arguments(operands, source, bucket, **options)
        cache, history, sampled, status = self._step(*arguments, bucket=bucket, **options)
        cache = operands.cache if self._pooled else cache
        if self._in_place:
            self._results[self._sizes.logit_rows(bucket)] = sampled
            self._status = self._status if status is None else status
            sampled, status = self._copied((sampled, status))
        return cache, operands.state.with_history(history), sampled, status

    def warm_up(self, buckets: Iterable[int]) -> None:
        """Compile what steps of these buckets need beside their programs."""
        for bucket in buckets if self._in_place else ():
            jax.block_until_ready(self._copied((self._results_of(bucket), self._status)))

    def lower_parts(
        self, operands: Operands, table: np.ndarray, bucket: int
    ) -> tuple[Lowered | KeptProgram, Lowered | KeptProgram]:
        """Return the programs that `forward` and `sample` run, ready to compile."""
        source = self.inputs.table if self._in_place else table
        forwarded = jax.tree.map(self._place, no_logits(self._sizes, bucket, self._vocab_size))
        masks = self.inputs.set_masks(self.new_masks().packed)
        sample = self._sample_arguments(operands.state, forwarded, masks, source, bucket)
        if self._in_place:
            self._forwarded[bucket] = forwarded
        forward = self._forward_arguments(operands, source, bucket)
        return self._forward.lower(*forward, bucket=bucket), self._sample.lower(*sample)

    def forward(
        self, operands: Operands, table: np.ndarray, bucket: int
    ) -> tuple[PagedKVCache, Forwarded, jax.Array | None]:
        """Return the cache (donated) after a step's forward part, its logits, servers' status.

        `sample` with these logits must come before the next `forward` or `run`.
        """
        source = self._sent = self.inputs.set_table(table)
        arguments = self._forward_arguments(operands, source, bucket)
        cache, logits, (rows, heads), status = self._forward(*arguments, bucket=bucket)
        forwarded = Forwarded(logits, rows, heads)
        cache = operands.cache if self._pooled else cache
        if self._in_place:
            self._forwarded[bucket] = forwarded
            self._status = self._status if status is None else status
            status = self._copied(status)
        return cache, forwarded, status

    def sample(
        self, state: RowState, forwarded: Forwarded, packed: np.ndarray, bucket: int
    ) -> tuple[RowState, Sampled]:
        """Return the state after the step, whose history is donated, and its samples.

        `packed` is HostMasks'.
        """
        masks = self.inputs.set_masks(packed)
        assert self._sent is not None, "a sample part before its forward part"
        arguments = self._sample_arguments(state, forwarded, masks, self._sent, bucket)
        history, sampled = self._sample(*arguments)
        if self._in_place:
            self._results[self._sizes.logit_rows(bucket)] = sampled
            sampled = self._copied(sampled)
        return state.with_history(history), sampled

    def _forward_arguments(
        self, operands: Operands, table: np.ndarray | jax.Array, bucket: int
    ) -> tuple[Any, ...]:
        """Return the arguments of a forward part, in the order of `_arguments`."""
        results = self._forwarded.get(bucket)
        cache, pooled = self._caches(operands)
        donated, donated_tree = jax.tree.flatten((cache, results, self._status))
        adapters = (operands.slots, operands.reroute_tables, operands.remote_table)
        leaves, slot = self._weights(operands)
        rest = (adapters, table, self.inputs.pages, operands.images, slot, pooled)
        rest = (*rest, operands.state.history)
        rest, rest_tree = jax.tree.flatten(rest)
        return leaves, donated, rest, (donated_tree, rest_tree)

    def new_masks(self) -> HostMasks:
        """Return masks on the host in which no row is masked."""
        return HostMasks(self._sizes.num_masks, self._sizes.max_logit_rows, self._vocab_size)

    def _sample_arguments(
        self,
        state: RowState,
        forwarded: Forwarded,
        masks: jax.Array,
        table: np.ndarray | jax.Array,
        bucket: int,
    ) -> tuple[Any, ...]:
        """Return the arguments of a sample part: leaves of what is donated, of the rest."""
        results = self._results_of(bucket) if self._in_place else None
        history, fixed = history_and_rest(state)
        donated, donated_tree = jax.tree.flatten((history, results))
        drafted = table if self._sizes.max_drafts else None
        rest, rest_tree = jax.tree.flatten((forwarded, masks, drafted, fixed))
        return donated, rest, (donated_tree, rest_tree)

    def _arguments(
        self,
        operands: Operands,
        table: np.ndarray | jax.Array,
        bucket: int,
        *,
        lora: bool,
        bound: bool,
    ) -> tuple[Any, ...]:
        """Return the step's arguments: leaves of the model, of what is donated, of the rest."""
        results = self._results_of(bucket) if self._in_place else None
        status = self._status if lora else None
        cache, pooled = self._caches(operands)
        history, fixed = history_and_rest(operands.state)
        donated, donated_tree = jax.tree.flatten((cache, history, results, status))
        adapters = (operands.slots, operands.reroute_tables, operands.remote_table)
        leaves, slot = self._weights(operands)
        parts = *adapters, operands.images, slot, pooled, *fixed
        flat = self._flat
        if bound or flat is None or not all(map(operator.is_, parts, flat.parts)):
            waits = (self._board, self.inputs.number) if bound else None
            rest = (adapters, table, self.inputs.pages, operands.images, slot, pooled, fixed, waits)
            rest, rest_tree = jax.tree.flatten(rest)
            place = len(jax.tree.leaves(adapters))
            flat = _Flat(parts, rest, (donated_tree, rest_tree), place)
            self._flat = None if bound else flat
        elif flat.trees[0] != donated_tree:
            flat = dataclasses.replace(flat, trees=(donated_tree, flat.trees[1]))
            self._flat = flat
        rest = flat.leaves.copy()
        rest[flat.table : flat.table + 2] = table, self.inputs.pages
        return leaves, donated, rest, flat.trees

    def _caches(self, operands: Operands) -> tuple[PagedKVCache | None, PagedKVCache | None]:
        """Return the cache as what is donated, and as what is not."""
        return (None, operands.cache) if self._pooled else (operands.cache, None)

    def _weights(self, operands: Operands) -> tuple[tuple[jax.Array, ...], Int[Array, ""] | None]:
        """Return the model's leaves, and the slot of the adapter that is merged into them."""
        return (self._leaves, None) if operands.merged is None else operands.merged

    def _results_of(self, bucket: int) -> Sampled:
        """Return the arrays whose memory the samples of a bucket are written to."""
        rows = self._sizes.logit_rows(bucket)
        if rows not in self._results:
            empty = no_samples(rows, self._vocab_size, zeros)
            empty = dataclasses.replace(empty, heads=no_heads(self._sizes))
            self._results[rows] = jax.tree.map(self._place, empty)
        return self._results[rows]

    def _place(self, value: Any) -> jax.Array:
        return put(value, self.sharding)

    def _copied[T](self, results: T) -> T:
        """Return copies of a step's results; of several devices, which have the same, on one."""
        if self._is_split:
            results = jax.tree.map(lambda result: result.addressable_data(0), results)
        return _copied(results)


# Not as a CUDA graph: that would be written anew each time, as results go to new addresses.
@functools.partial(jax.jit, compiler_options={"xla_gpu_graph_min_graph_size": 1 << 20})
def _copied[T](values: T) -> T:
    return jax.tree.map(jnp.copy, values)
