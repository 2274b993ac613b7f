"""Which LoRA slots a step's rows have, whatever else their slots say."""

from types import SimpleNamespace

from serving.steps.step_programs import Program, lora_slots


def test_slots_of_pairs_are_lora_slots_too():
    chunks = [SimpleNamespace(sequence=SimpleNamespace(slot=slot)) for slot in (-1, 2, 3, 4, 5, 9)]
    plan = SimpleNamespace(chunks=chunks)
    # 3 LoRA slots, 2 ESFT slots (3 and 4), then 5 + 3 * esft + lora.
    assert list(lora_slots(plan, 3, 2)) == [2, 0, 1]
    assert list(lora_slots(SimpleNamespace(chunks=chunks[:3]), 4, 0)) == [2, 3]


def test_a_program_is_with_lora_and_on_plain_weights():
    assert Program(8) == (8, True, False, False)
