"""States that a head reads, where nothing below it is trained: computed once, trained on often."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.finetune.forward import states
from lora_jax.finetune.labelled import Examples
from lora_jax.finetune.lora_params import LoraDelta
from lora_jax.finetune.packing import Rows, pack
from lora_jax.finetune.perplexity import BATCH_ROWS, padded
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateBatch:
    """States of prompts' last tokens on the device, and the rows of what is wanted of them."""

    states: Float[Array, "examples hidden"]
    wanted: Int[Array, "examples"]


@dataclasses.dataclass(frozen=True)
class StateRows:
    """All states of a text on the host; the fields are those of `StateBatch`."""

    states: Float[np.ndarray, "examples hidden"]
    wanted: Int[np.ndarray, "examples"]

    @property
    def num_rows(self) -> int:
        return len(self.wanted)

    def take(self, indices: Int[np.ndarray, "chosen"]) -> StateBatch:
        """Return the states at `indices` on the device."""
        return StateBatch(jnp.asarray(self.states[indices]), jnp.asarray(self.wanted[indices]))


def state_rows(
    model: AbstractCausalLM, examples: Examples, length: int, delta: LoraDelta | None
) -> StateRows:
    """Return the state of each prompt's last token, of the model with an adapter's LoRA."""
    graphdef, state = nnx.split(model, graph=False)

    @jax.jit
    def states_of(state: Any, delta: LoraDelta | None, batch: Rows) -> Float[Array, "places _"]:
        merged = nnx.merge(graphdef, state)
        return states(merged, batch.tokens, batch.positions, batch.segments, delta)[0]

    rows, parts, wanted = pack(examples.documents, length, answer_only=True), [], []
    for start in range(0, rows.num_rows, BATCH_ROWS):
        batch = padded(rows, start)
        places = np.asarray(batch.weights).reshape(-1) > 0
        computed = np.asarray(states_of(state, delta, batch), np.float32)
        parts.append(computed[places])
        wanted.append(np.asarray(batch.targets).reshape(-1)[places])
    return StateRows(np.concatenate(parts), np.concatenate(wanted))
