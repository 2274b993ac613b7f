"""LoRA slots of a step's rows, beside slots of other kinds."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from serving.steps.step import _split
from serving.steps.step_programs import (
    Program,
    StepPrograms,
    bucket_for,
    lora_slot,
    lora_slots,
    token_buckets,
)


def test_slots_of_pairs_are_lora_slots_too():
    chunks = [SimpleNamespace(sequence=SimpleNamespace(slot=slot)) for slot in (-1, 2, 3, 4, 5, 9)]
    plan = SimpleNamespace(chunks=chunks)
    # 3 LoRA slots, 2 ESFT slots (3 and 4), then 5 + 3 * esft + lora.
    assert list(lora_slots(plan, 3, 2)) == [2, 0, 1]
    assert list(lora_slots(SimpleNamespace(chunks=chunks[:3]), 4, 0)) == [2, 3]


def test_a_slot_s_lora_is_the_step_s():
    """What a tower takes from a slot is what the step takes from it (step.split_slots)."""
    for num_lora, num_esft in ((3, 2), (1, 4), (4, 0), (0, 3)):
        every = np.arange(-1, num_lora + num_esft + num_lora * num_esft, dtype=np.int32)
        want, _ = _split(jnp.asarray(every), num_lora, num_esft)
        assert [lora_slot(int(slot), num_lora, num_esft) for slot in every] == want.tolist()


def test_a_program_is_with_lora_and_on_plain_weights():
    assert Program(8) == (8, True, False, False, False)


def test_a_step_takes_the_smallest_bucket_that_holds_it():
    assert [bucket_for(tokens, 4, (8, 32), 4) for tokens in (1, 8, 9, 32)] == [8, 8, 32, 32]
    for tokens, rows in ((33, 1), (8, 5)):
        with pytest.raises(ValueError, match=f"{tokens} tokens and {rows} .* at most 32 and 4"):
            bucket_for(tokens, rows, (8, 32), 4)


def test_an_engine_has_the_programs_that_its_parts_ask_for():
    plain = StepPrograms((8, 32, 128), 20)
    assert plain.whole == (Program(8), Program(32), Program(128))
    assert plain.in_two_parts == plain.bound_buckets == ()
    masked = StepPrograms((8, 32, 128), 20, base_only=True, brings=True, bound=True)
    assert masked.bound_buckets == (32, 128)
    assert [p for p in masked.whole if not p.lora] == [Program(b, False) for b in (8, 32, 128)]
    assert [p[:4] for p in masked.in_two_parts if p.brings] == [
        (32, True, False, True),
        (128, True, False, True),
    ]
    assert all(program.bound for program in masked.in_two_parts)


@pytest.mark.parametrize("max_seqs", [200, 256, 300])
def test_decode_steps_with_a_few_prompt_tokens_have_programs_too(max_seqs):
    """Also where all sequences have a bucket of their own: else they took the largest one."""
    buckets = token_buckets(8192, max_seqs)
    programs = StepPrograms(buckets, max_seqs, base_only=True, bound=True, waits=True)
    assert programs.bound_buckets == (8, 512, 8192)
    plain = [p for p in programs.whole if not p.lora]
    assert [p.bucket for p in plain if p.bound] == [8, 512]
    assert [p.bucket for p in plain if not p.bound] == list(buckets)


def test_prompts_without_adapters_take_a_program_without_lora():
    programs = StepPrograms((8, 32, 128), 8, base_only=True, bound=True, waits=True)
    assert [programs.can_specialize(b, bound=False) for b in (8, 32, 128)] == [True] * 3
    assert [programs.can_specialize(b, bound=True) for b in (8, 32, 128)] == [True, False, False]
    assert not StepPrograms((8, 32, 128), 8).can_specialize(8, bound=False)


def test_steps_on_merged_weights_have_lora_where_rows_are_mixed_or_wait_for_masks():
    made = {"merged": True, "bound": True, "waits": True}
    for mixture in (False, True):
        programs = StepPrograms((8,), 8, mixture=mixture, **made)
        kinds = [(p.lora, p.merged, p.bound) for p in programs.whole]
        mixed = [(True, True, False)] if mixture else []
        waiting = [(True, False, True), (True, True, True)]
        assert kinds == [(True, False, False), (False, True, False), *mixed, *waiting]
        assert programs.in_two_parts == ()
