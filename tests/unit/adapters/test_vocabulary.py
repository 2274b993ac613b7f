"""Rows of the vocabulary: modules for them in a catalogue, tables of tokens, and their slots."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.slots import saved_rows, size_slots
from lora_jax.adapters.vocabulary import (
    EMBEDDING,
    HEAD,
    brings_tokens,
    ids_table,
    most_tokens,
    with_vocabulary,
)

PLAIN = cases.llama()
HIDDEN, VOCAB = PLAIN.modules["lm_head"].d_in, PLAIN.modules["lm_head"].d_out
TIED = with_vocabulary(PLAIN, tied=True, most_tokens=3, most_saved=2)
WHOLE = np.arange(VOCAB * HIDDEN, dtype="f4").reshape(VOCAB, HIDDEN)
AT = "model.layers.0.self_attn.q_proj"
LORA = {
    f"{AT}.lora_A.weight": np.ones((2, 16), "f4"),
    f"{AT}.lora_B.weight": np.ones((16, 2), "f4"),
}
SAVED = {"r": 2, "lora_alpha": 6, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}


@pytest.mark.parametrize(("tokens", "saved"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_a_catalogue_has_the_room_that_is_asked_for(tokens, saved):
    made = with_vocabulary(PLAIN, tied=False, most_tokens=tokens, most_saved=saved)
    assert (most_tokens(made), made.most_saved) == (tokens, saved)
    assert brings_tokens(made) == bool(tokens or saved)
    assert len(made.modules) == len(PLAIN.modules) + 2 * bool(tokens) + 2 * bool(saved)


def test_a_table_has_the_tokens_of_each_part_in_the_order_of_their_rows():
    assert ids_table({EMBEDDING: (5, 2)}, 3).tolist() == [[5, 2, -1], [-1] * 3]
    assert ids_table({EMBEDDING: (5, 2), HEAD: (1,)}, 3).tolist() == [[5, 2, -1], [1, -1, -1]]


def test_whole_matrices_have_their_own_few_rows_and_are_evicted_for_others(tmp_path):
    values = VOCAB * HIDDEN
    spec = size_slots(TIED, 4, 2, 4)
    assert saved_rows(TIED) == {values: 2}
    assert spec.rows[values] == 2
    allocator = SlotAllocator(TIED, 4, spec.rows)
    placed = []
    for number in range(3):
        other = {"model.embed_tokens.weight": WHOLE + number}
        cases.write_adapter(tmp_path / str(number), LORA | other, SAVED)
        weights = peft_format.read(tmp_path / str(number), TIED)
        placed.append(allocator.place(weights))
        allocator.finish_loading(weights.digest)
    assert placed[2].evicted == (placed[0].digest,)
    assert allocator.bringing == {placed[1].slot, placed[2].slot}
    allocator.check_integrity()
