"""States of prompts' last tokens: those that a pass over each prompt alone gives."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from support.cases.finetune_cases import make_folder

from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.forward import states
from lora_jax.finetune.head_states import state_rows
from lora_jax.finetune.labelled import Labelled, examples_of, head_of
from lora_jax.models import load

RECORDS = [Labelled("one", ("a",)), Labelled("what is two and one", ("b",)), Labelled("x", ("a",))]


def test_states_of_packed_prompts_are_their_own(tmp_path):
    folder = make_folder(tmp_path / "tiny", scale=5.0)
    model, _ = load(folder, dtype="float32")
    head = head_of(RECORDS, HeadKind.CLASS)
    made = examples_of(RECORDS, head, read_format(folder), "chat", 40)
    found = state_rows(model, made, 40, None)
    assert found.num_rows == 3
    by_tokens = {}
    states_of = nnx.jit(states)  # op by op it would be compiled op by op
    for document in made.documents:
        tokens = jnp.asarray(document.tokens[:-1], jnp.int32)[None]
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        alone, _ = states_of(model, tokens, places, jnp.zeros_like(places))
        by_tokens[document.tokens] = np.asarray(alone[-1])
    for row, state in zip(found.wanted, found.states, strict=True):
        same = [t for t, s in by_tokens.items() if np.allclose(s, state, atol=1e-4)]
        assert [tokens[-1] for tokens in same] == [row]
    batch = found.take(np.array([2, 0]))
    np.testing.assert_array_equal(batch.wanted, found.wanted[[2, 0]])
