"""Runs the scheduler's plans: owns weights, KV pages, sequence rows and adapter slots.

One compiled program per token bucket, and where kernels of adapters cost time, one without LoRA for
decode steps. A step is dispatched without waiting; its results are read when the next one is on its
way. A step that a grammar binds waits on the device for masks, which are posted later. Where no
step can wait, it is two programs: `forward` goes out like any step, `sample` when masks are there.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from lora_jax.adapters.lora_load_job import RowChunk, SlotEntry, write
from lora_jax.adapters.slots import AdapterSlots, RowWriter, warm_up
from lora_jax.kv_cache import pages_sharding
from lora_jax.sharding import put
from lora_jax.typing import Array, Int
from serving.api.request import SequenceResult, StepPlan
from serving.api.sampling import Sampling
from serving.lora_server.client import RemoteTable
from serving.steps.compiled_step import NO_REMAT, CompiledStep
from serving.steps.compiling import compile_all, lowered, read_kept, runs_left, take_read
from serving.steps.device_state import admit, init_row_state, pack_row
from serving.steps.forwarded import Forwarded
from serving.steps.host_inputs import largest_bytes
from serving.steps.kept_steps import KeptProgram
from serving.steps.operands import Operands
from serving.steps.page_copies import PageCopies, own_pages
from serving.steps.row_writes import RowWrites
from serving.steps.runner_parts import NO_ADAPTERS, ProgramChoice, StepAdapters, StepModel
from serving.steps.sampling.sampler import Sampled
from serving.steps.sampling.token_masks import HostMasks
from serving.steps.split_step import StepSplit
from serving.steps.step import StepSizes
from serving.steps.step_input import SampleInput, StepInput, StepInputs, is_scored
from serving.steps.step_programs import (
    Program,
    StepPrograms,
    bucket_for,
    lora_slot,
    lora_slots,
    names_of,
    token_buckets,
)
from serving.steps.step_results import (
    HeldStep,
    HostArrays,
    InFlightStep,
    MasksFirst,
    first_rows,
    first_samples,
    in_flight,
    num_logit_rows,
    read_all,
)


class ModelRunner:
    """The device side of the engine; one thread uses it."""

    def __init__(
        self,
        base: StepModel,
        sizes: StepSizes,
        choice: ProgramChoice,
        adapters: StepAdapters = NO_ADAPTERS,
        *,
        tell: Callable[[Any], None] = lambda command: None,
    ):
        """Make the step of a model, its rows and its pages; `warm_up` compiles its programs.

        `tell` is given every StepInput and SampleInput before it is done, for the runners of
        other processes to `follow`.
        """
        self.sizes, self.buckets = sizes, token_buckets(choice.max_tokens, sizes.max_seqs)
        self._vocab_size, self._tell = base.vocab_size, tell
        self._inputs = StepInputs(sizes, base.vocab_size, base.end_ids)
        self._held: Forwarded | None = None  # of a step that is followed
        self._cold: list[tuple[Program, KeptProgram]] = []  # once for each run that is left
        self.board, self.encoder, self.merged = choice.mask_board, base.encoder, adapters.merged
        self._bringing, self._num_esft = adapters.bringing, adapters.num_esft
        self._check = (lambda: None) if base.split is None else base.split.check
        self._programs = _programs(self.buckets, sizes, choice, adapters)
        self._step = _compiled_step(base, sizes, choice, adapters)
        # Everything lies committed on the weights' device from the start: an array that is
        # committed only after its first step would make every program compile twice.
        self._place = functools.partial(put, sharding=self._step.sharding)
        pages = base.kv_shape, sizes, base.dtype
        self._cache = base.pooled or own_pages(*pages, base.split, self._place)
        self._copies = None
        if sizes.num_host_pages:
            self._copies = PageCopies(*pages, self._step.sharding, base.split)
        self._state = self._place(init_row_state(sizes.max_seqs, sizes.max_len))
        self._rows = RowWrites(by_host=base.split is None and jax.default_backend() == "cpu")
        if base.encoder is not None:
            base.encoder.start(sizes.max_seqs, sizes.max_len, self._step.sharding)
        self._take_adapters(base, adapters)

    def _take_adapters(self, base: StepModel, adapters: StepAdapters) -> None:
        """Bring slots and tables of adapters to the devices; those of a split or pool are there."""
        self._row_writer: RowWriter = adapters.row_writer if base.pooled is None else "pool"
        slots, tables = adapters.slots, adapters.reroute_tables
        is_there = slots is None or base.split is not None or base.pooled is not None
        self.slots: AdapterSlots | None = slots if is_there else self._place(slots)
        self.reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None = (
            None if tables is None else self._place(tables)
        )
        self.remote_table: RemoteTable | None = None
        if adapters.link is not None and slots is not None:
            self.set_remote(np.full(slots.num_slots, -1), 0)

    def warm_up(self, *, compiled: Callable[..., None] = lambda all_: None, **how: Any) -> None:
        """Compile every program, as `how` tells `compile_all`, and run it on nothing.

        No later step compiles. `compiled` gets them all before that. If all are kept and may be
        read lazily, only the first one is run here, once; `run_cold` does the other runs.
        """
        if self._copies is not None:
            self._cache = self._copies.warm_up(self._cache)
        if self.slots is not None:
            self.slots = warm_up(self.slots, rows=self._row_writer)
            if self.remote_table is not None:
                self.set_remote(np.full(self.slots.num_slots, -1), 0)
        packed = pack_row(Sampling(), (0,), 1, 0, (), self.sizes.max_len, self._vocab_size)
        self._state = admit(self._state, 0, packed)
        if self.encoder is not None:
            self.encoder.warm_up(self._plain_slots)
        if self.merged is not None and self.slots is not None:
            self.merged.warm_up(self.slots)
        self._step.inputs.set_pages(np.zeros((self.sizes.max_seqs, self.sizes.max_pages), np.int32))
        table = self._inputs.empty_table()
        programs, names = self._lowered(table), [*names_of(self.programs, self.two_part_programs)]
        kept, programs = read_kept(programs, names) if self._step.lazy else ([], programs)
        if kept:
            self._step.warm_up(self.buckets)
            read_all(self._run(table, self.programs[0]))
            self._cold = runs_left(self.programs, kept, self._step.num_warm_runs)
            return
        compiled(compile_all(programs, names, **how))
        for program in self.programs * self._step.num_warm_runs:
            read_all(self._run(table, program))
        for program in self.two_part_programs * self._step.num_warm_runs:
            logits, _ = self._run_forward(table, program)
            read_all(self._run_sample(logits, self.new_masks().packed, program.bucket))

    @property
    def has_cold(self) -> bool:
        """True if there may be a program that has not run as often as a start runs it."""
        return bool(self._cold)

    def run_cold(self) -> bool:
        """Do one run that is left, on nothing, if its program was read; return whether any is."""
        if (program := take_read(self._cold)) is not None:
            read_all(self._run(self._inputs.empty_table(), program))
        return bool(self._cold)

    def _lowered(self, table: np.ndarray) -> Iterator[Lowered | KeptProgram]:
        yield from self.lowered(self.programs)
        for p in self.two_part_programs:
            yield from self._step.lower_parts(self._operands(p), table, p.bucket)

    def lowered(self, programs: Iterable[Program]) -> Iterator[Lowered | KeptProgram]:
        """Return steps of one program, ready to compile."""
        trace, table = self._step.trace, self._inputs.empty_table()
        return lowered(
            trace(self._operands(p), table, p.bucket, lora=p.lora, bound=p.bound) for p in programs
        )

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every step that is one program."""
        return self._programs.whole

    @property
    def two_part_programs(self) -> tuple[Program, ...]:
        """Every step in two programs, forward and sample."""
        return self._programs.in_two_parts

    @property
    def num_programs(self) -> int:
        """Programs that are compiled at the start."""
        return len(self.programs) + 2 * len(self.two_part_programs)

    def dispatch(self, plan: StepPlan, masks_first: MasksFirst | None = None) -> InFlightStep:
        """Send a step to the device and return at once; read its results with `read`.

        Tokens that the host has not seen are those the steps in flight sample. With a board the
        masks of a step that `waits` must be posted next; until then nothing may wait for it. Where
        no step may wait, `masks_first` posts those of a bound step before it goes out.
        """
        board = self.board if plan.is_bound else None
        buckets = self.buckets if board is None else self._programs.bound_buckets
        bucket = self._bucket(plan, buckets)
        lora = (board is not None and plan.merged is not None) or self._needs_lora(plan, bucket)
        brings = lora and self._brings(plan)
        program = Program(bucket, lora, plan.merged is not None, brings, board is not None)
        table = self._prepared(plan, program)
        firsts, scored, number, waits = first_rows(plan), is_scored(plan), 0, False
        if board is not None:
            number = board.take_number()
            waits = board.begin_wait(number)
            if not waits:
                assert masks_first is not None, "a bound step may not wait for its masks"
                masks_first(plan, first_samples(plan, firsts), number)
        sampled, status = self._run(table, program, number)
        return in_flight(plan, firsts, sampled, scored, status, number, waits)

    def forward(self, plan: StepPlan) -> HeldStep:
        """Send a step's forward part to the device; `sample` must follow before other steps."""
        bucket, brings = self._bucket(plan, self._programs.bound_buckets), self._brings(plan)
        program = Program(bucket, merged=plan.merged is not None, brings=brings, bound=True)
        table = self._prepared(plan, program, in_parts=True)
        forwarded, status = self._run_forward(table, program)
        return HeldStep(plan, first_rows(plan), is_scored(plan), bucket, forwarded, status)

    def sample(self, held: HeldStep, masks: HostMasks) -> InFlightStep:
        """Send the rest of a step to the device, with the masks of its rows."""
        self._tell(SampleInput(masks.packed, held.bucket))
        sampled = self._run_sample(held.forwarded, masks.packed, held.bucket)
        return in_flight(held.plan, held.first_rows, sampled, held.scored, held.remote_status)

    def follow(self, command: StepInput | SampleInput | RowChunk | SlotEntry) -> None:
        """Do what another process's runner of the same model has done, in its order."""
        if isinstance(command, StepInput):
            self._write(command)
            if command.in_parts:
                self._held, _ = self._run_forward(command.table, command.program)
            else:
                self._run(command.table, command.program)
        elif isinstance(command, SampleInput):
            assert self._held is not None, "masks before a forward part"
            self._run_sample(self._held, command.masks, command.bucket)
        else:
            assert self.slots is not None, "rank rows without slots"
            self.slots = write(self.slots, command)

    def new_masks(self) -> HostMasks:
        """Return masks on the host in which no row is masked."""
        return self._step.new_masks() if self.board is None else self.board.new_masks()

    def _prepared(self, plan: StepPlan, program: Program, *, in_parts: bool = False) -> np.ndarray:
        """Write what a step needs to the device; return its table."""
        self._tell(step_input := self._inputs.make(plan, program, in_parts=in_parts))
        self._write(step_input)
        if self.encoder is not None:
            for sequence in plan.admitted:
                self.encoder.admit(sequence)
            works = [replace(w, slot=lora_slot(w.slot, *self._num_slots)) for w in plan.encodes]
            self.encoder.encode(works, self._plain_slots)
        if self.merged is not None and self.slots is not None:
            self.merged.prepare(plan, self.slots)
        return step_input.table

    def _write(self, step_input: StepInput) -> None:
        """Bring pages, rows and block tables of a step to the device."""
        if self._copies is not None:
            self._cache = self._copies.run(self._cache, step_input.moves)
        for row, packed in step_input.admitted:
            self._state = self._rows.admit(self._state, row, packed)
        for new in step_input.pages:
            self._step.inputs.add_pages(new.row, new.first, new.pages)

    def read(self, step: InFlightStep) -> list[SequenceResult]:
        """Wait for a step and return a result for each chunk, in the plan's order.

        A token_id of INVALID_TOKEN or NO_TOKEN (see sampling): there is no token. Raises
        RuntimeError when the devices of a split have lost each other.
        """
        arrays, chunks = HostArrays(step), zip(step.plan.chunks, step.first_rows, strict=True)
        self._check()
        return [arrays.result(chunk, first) for chunk, first in chunks]

    def was_late(self, step: InFlightStep) -> bool:
        """Return whether a step that has been read masked no row, as its masks came too late."""
        return self.board is not None and self.board.was_late(step.number)

    def wait(self) -> None:
        """Wait until every dispatched step has run; raises what a step raised on the device."""
        if self.board is not None:  # a loop that has failed has not posted masks
            self.board.give_up()
        jax.block_until_ready((self._cache, self._state))
        if self.encoder is not None:
            self.encoder.wait()

    def close(self) -> None:
        """Free the memory of weights, pages, slots and programs; no other call follows."""
        for part in filter(None, (self._step, self.encoder, self.merged)):
            part.close()
        vars(self).clear()

    def set_remote(self, slot_to_number: np.ndarray, version: int) -> None:
        """Say under which number the LoRA Server knows the adapter of each slot, from now on."""
        old, new = self.remote_table, (slot_to_number.astype(np.int32), np.int32(version))
        before = None if old is None else (old.slot_to_number, old.version)
        self.remote_table = RemoteTable(*self._step.inputs.replace(before, new))

    def _needs_lora(self, plan: StepPlan, bucket: int) -> bool:
        if plan.merged is not None:
            return plan.is_mixture
        bound = self.board is not None and plan.is_bound
        if not self._programs.can_specialize(bucket, bound=bound) or self.slots is None:
            return True
        return any(True for _ in lora_slots(plan, *self._num_slots))

    def _brings(self, plan: StepPlan) -> bool:
        """Return whether a row's adapter has more than LoRA."""
        slots = lora_slots(plan, *self._num_slots) if self._bringing else ()
        return any(slot in self._bringing for slot in slots)

    @property
    def _num_slots(self) -> tuple[int, int]:
        return 0 if self.slots is None else self.slots.num_slots, self._num_esft

    def _run(
        self, table: np.ndarray, program: Program, number: int = 0
    ) -> tuple[Sampled, jax.Array | None]:
        operands = self._operands(program)
        options = {"lora": program.lora, "bound": program.bound, "number": number}
        done = self._step.run(operands, table, program.bucket, **options)
        self._cache, self._state, sampled, status = done
        return sampled, status

    def _run_forward(
        self, table: np.ndarray, program: Program
    ) -> tuple[Forwarded, jax.Array | None]:
        operands = self._operands(program)
        self._cache, forwarded, status = self._step.forward(operands, table, program.bucket)
        return forwarded, status

    def _run_sample(self, forwarded: Forwarded, masks: np.ndarray, bucket: int) -> Sampled:
        self._state, sampled = self._step.sample(self._state, forwarded, masks, bucket)
        return sampled

    @property
    def _plain_slots(self) -> AdapterSlots | None:
        return None if self.slots is None else self.slots.plain

    def _operands(self, program: Program) -> Operands:
        images = None if self.encoder is None else self.encoder.operands
        slots = self.slots if program.brings else self._plain_slots
        adapters = (slots, self.reroute_tables, self.remote_table)
        weights = self.merged.operands if program.merged and self.merged is not None else None
        return Operands(self._cache, self._state, *adapters, images, weights)

    def _bucket(self, plan: StepPlan, buckets: tuple[int, ...]) -> int:
        rows = num_logit_rows(plan)
        return bucket_for(plan.num_tokens, rows, buckets, self.sizes.max_logit_rows)


def _programs(
    buckets: tuple[int, ...], sizes: StepSizes, choice: ProgramChoice, adapters: StepAdapters
) -> StepPrograms:
    """Return the programs of a runner's steps, by bucket."""
    return StepPrograms(
        buckets,
        sizes.max_seqs,
        merged=adapters.merged is not None,
        mixture=adapters.mixture,
        brings=adapters.brings,
        base_only=choice.base_only and adapters.slots is not None,
        bound=choice.structured_outputs,
        waits=choice.board is not None,
    )


def _compiled_step(
    base: StepModel, sizes: StepSizes, choice: ProgramChoice, adapters: StepAdapters
) -> CompiledStep:
    """Return the step of a model, of which nothing is compiled yet."""
    pages = pages_sharding(base.kv_shape, base.split)
    known = base.encoder is None and adapters.link is None
    stays = adapters.reroute_tables is not None or base.pooled is not None
    largest = largest_bytes(sizes, base.vocab_size * choice.structured_outputs) if known else None
    return CompiledStep(
        base.model,
        sizes,
        adapters.link,
        base.vocab_size,
        in_place=choice.is_in_place,
        compiler_options=NO_REMAT if stays else None,
        split=None if base.split is None or pages is None else StepSplit(base.split, pages.spec),
        kept=choice.kept,
        board=choice.mask_board,
        largest_sent=largest,
    )
