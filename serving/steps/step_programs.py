"""Programs that a step may be, and what of its rows chooses among them. No jax."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from serving.api.request import StepPlan

_SMALLEST_BUCKET = 8
_BUCKET_FACTOR = 4  # at most 4 times as many padding tokens as real ones, mostly skipped


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Return the token counts programs are compiled for: 8, 32, 128, ... and `max_tokens`."""
    buckets, bucket = [], _SMALLEST_BUCKET
    while bucket < max_tokens:
        buckets.append(bucket)
        bucket *= _BUCKET_FACTOR
    return (*buckets, max_tokens)


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


def lora_slots(plan: StepPlan, num_lora: int, num_esft: int) -> Iterator[int]:
    """Yield the LoRA slot of each chunk of a step that has one."""
    slots = (lora_slot(chunk.sequence.slot, num_lora, num_esft) for chunk in plan.chunks)
    yield from (slot for slot in slots if slot >= 0)


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
