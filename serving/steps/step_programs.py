"""Programs that a step may be, and what of its rows chooses among them. No jax."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from serving.api.request import StepPlan

_SMALLEST_BUCKET = 8
_BUCKET_FACTOR = 4  # at most 4 times as many padding tokens as real ones, mostly skipped
_MANY_SEQS = 128  # from here on a step's products are bound by their rows, not by the weights


def token_buckets(max_tokens: int, max_seqs: int = 0) -> tuple[int, ...]:
    """Return the token counts programs are compiled for: 8, 32, 128, ... and `max_tokens`.

    Many sequences that decode have a bucket of their own, `max_seqs`: tiles that suit the rows of
    the next one, which prompts fill, made steps of 256 rows of Llama-3.1-8B's maps a quarter longer
    on an H200.
    """
    buckets, bucket = {max_tokens}, _SMALLEST_BUCKET
    while bucket < max_tokens:
        buckets.add(bucket)
        bucket *= _BUCKET_FACTOR
    larger = min((bucket for bucket in buckets if bucket >= max_seqs), default=0)
    if max_seqs > _MANY_SEQS and 2 * max_seqs <= larger:
        buckets.add(max_seqs)
    return tuple(sorted(buckets))


def bucket_for(num_tokens: int, rows: int, buckets: tuple[int, ...], most_rows: int) -> int:
    """Return the smallest bucket that a step fits into; ValueError when it fits nowhere."""
    if rows <= most_rows:
        for bucket in buckets:
            if num_tokens <= bucket:
                return bucket
    raise ValueError(
        f"A step of {num_tokens} tokens and {rows} logit rows; at most {max(buckets)} and "
        f"{most_rows} fit."
    )


class Program(NamedTuple):
    """A step that is one program: its token bucket, its LoRA, and which weights it takes.

    In one that `brings`, rows may have adapters with more than LoRA. One that is `bound` waits for
    the masks of its rows.
    """

    bucket: int
    lora: bool = True
    merged: bool = False
    brings: bool = False
    bound: bool = False


def programs_of(
    kinds: Iterable[tuple[bool, bool]],
    variants: Iterable[bool],
    buckets: tuple[int, ...],
    *,
    bound: bool = False,
) -> list[Program]:
    """Return a program for each (lora, merged) of `kinds`, `brings` of `variants`, and bucket."""
    return [
        Program(bucket, lora, merged, brings, bound)
        for lora, merged in kinds
        for brings in variants
        if lora or not brings
        for bucket in buckets
    ]


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """Programs that the steps of an engine may be: all are compiled at the start."""

    buckets: tuple[int, ...]
    max_seqs: int
    merged: bool = False  # some take weights with an adapter merged into them,
    mixture: bool = False  # some of these with rows of other adapters too
    brings: bool = False  # some have adapters with more than LoRA
    base_only: bool = False  # steps without adapters have programs without LoRA
    bound: bool = False  # rows may be masked,
    waits: bool = False  # on the device: else such a step is two programs

    @functools.cached_property
    def whole(self) -> tuple[Program, ...]:
        """Every step that is one program."""
        kinds = [(True, False)]
        if self.merged:
            kinds.append((False, True))
        if self.merged and self.mixture:
            kinds.append((True, True))
        programs = programs_of(kinds, self._variants, self.buckets)
        programs += [Program(b, lora=False) for b in self.buckets if self.base_only]
        if self.waits:
            plain = [b for b in self.bound_buckets if self.can_specialize(b, bound=True)]
            programs += [*self._masked, *(Program(b, False, bound=True) for b in plain)]
        return tuple(programs)

    @functools.cached_property
    def in_two_parts(self) -> tuple[Program, ...]:
        """Every step in two programs, forward and sample."""
        return () if self.waits else self._masked

    @functools.cached_property
    def bound_buckets(self) -> tuple[int, ...]:
        """The token buckets of steps with masks: that of decode steps, and one for others.

        Where they wait on the device also the smallest, for few rows; more would take long to
        compile.
        """
        few = self.buckets[:1] if self.waits else ()
        if not self.bound:
            return ()
        return tuple(dict.fromkeys((*few, self._decode_bucket, self.buckets[-1])))

    def can_specialize(self, bucket: int, *, bound: bool) -> bool:
        """Return whether a bucket has a program without LoRA.

        Of steps with masks, those that decode have one, with and without a few tokens of prompts.
        """
        return self.base_only and (not bound or bucket <= self._decode_bucket)

    @property
    def _masked(self) -> tuple[Program, ...]:
        kinds = [(True, False), (True, True)] if self.merged else [(True, False)]
        return tuple(programs_of(kinds, self._variants, self.bound_buckets, bound=True))

    @property
    def _variants(self) -> tuple[bool, ...]:
        """Variants of steps: with and without what adapters bring beside LoRA, where they may."""
        return (False, True) if self.brings else (False,)

    @property
    def _decode_bucket(self) -> int:
        """The smallest bucket for a token of every sequence, and for tokens of prompts beside them.

        Not the one that many sequences have of their own, see token_buckets.
        """
        buckets = token_buckets(self.buckets[-1])
        return next((b for b in buckets if b >= self.max_seqs), self.buckets[-1])


def lora_slots(plan: StepPlan, num_lora: int, num_esft: int) -> Iterator[int]:
    """Yield the LoRA slot of each chunk of a step that has one."""
    for chunk in plan.chunks:
        slot = chunk.sequence.slot
        if slot >= 0 and (own := lora_slot(slot, num_lora, num_esft)) >= 0:
            yield own


def lora_slot(slot: int, num_lora: int, num_esft: int) -> int:
    """Return the LoRA slot of what a sequence calls its slot, -1 for none.

    ESFT slots are numbered after the LoRA slots, then come pairs of both (step.split_slots).
    """
    pair = slot - (num_lora + num_esft)
    if pair >= 0 and num_lora:
        return pair % num_lora
    return slot if slot < num_lora else -1


def names_of(programs: Iterable[Program], in_two_parts: Iterable[Program]) -> Iterator[str]:
    """Yield a name of each compiled program: of whole steps, then of both parts of others."""
    yield from map(_name, programs)
    for program in in_two_parts:
        yield from (f"{_name(program)} ({part})" for part in ("forward", "sample"))


def _name(program: Program) -> str:
    kinds = "lora", "merged", "brings", "bound"
    marks = [kind for kind in kinds if getattr(program, kind)]
    return " ".join([f"{program.bucket} tokens", *marks])
