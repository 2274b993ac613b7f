"""Bytes that a function's largest step takes of an H200 for itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.aot.compile_gpu import H200

from bench.functions.device_functions import FIELDS
from bench.functions.large_model import SHAPES
from bench.random_model import llama_config
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache
from lora_jax.models.registry import model_class
from serving.api.config import EngineConfig
from serving.engine.memory.step_arrays import step_bytes
from serving.engine.parts.step_parts import logit_rows
from serving.runtime.xla_memory import SPARE_BYTES
from serving.steps.device_state import init_row_state
from serving.steps.host_inputs import largest_bytes, make_holes
from serving.steps.sampling import batch_sampler
from serving.steps.step import StepSizes, forward_step, sample_step

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]  # the kernels are built, too
SHAPE, LAYERS, PAGE = SHAPES["llama-2-7b"], 4, 16
MIB, MOST_MIB = 2**20, 94  # beside the context and KV pages


def test_a_function_takes_no_more_than_its_bytes_beside_context_and_pages(hopper_at_hand):
    """Rank rows are those of all layers; temporaries do not depend on how many there are."""
    config, dtype, h200 = EngineConfig("m", max_loras=1, **FIELDS), jnp.dtype(jnp.bfloat16), H200()
    layers = {"num_hidden_layers": LAYERS, "torch_dtype": "bfloat16"}
    model_config = from_hf(llama_config(SHAPE) | layers)
    kind = model_class(model_config.model_type)
    sizes = StepSizes(
        max_seqs=config.step_seqs,
        max_len=FIELDS["max_model_len"],
        page_size=PAGE,
        num_pages=256,
        max_logit_rows=logit_rows(config, shares_device=True),
        max_rank=config.max_lora_rank,
    )

    def described(make):
        """Return what `make` gives as a list of described leaves, and the way back."""
        trees = []

        def leaves_of():
            leaves, tree = jax.tree.flatten(make())
            trees.append(tree)
            return leaves

        return [h200.array(a.shape, a.dtype) for a in jax.eval_shape(leaves_of)], trees[0].unflatten

    def slots_of(shape):
        catalogue = kind.catalogue(from_hf(llama_config(shape)))
        spec = size_slots(catalogue, 1, sizes.max_rank, dtype.itemsize)
        return described(lambda: init_slots(catalogue, spec, dtype))

    catalogue = kind.catalogue(model_config)
    spec = size_slots(catalogue, 1, sizes.max_rank, dtype.itemsize)
    leaves, model_of = described(
        lambda: nnx.split(kind(model_config, dtype=dtype, rngs=nnx.Rngs(0)), graph=False)
    )
    shape = kind.kv_shape(model_config)
    cache, cache_of = described(lambda: init_cache(shape, sizes.num_pages, PAGE, dtype))
    slots, slots_back = described(lambda: init_slots(catalogue, spec, dtype))
    state, state_of = described(lambda: init_row_state(sizes.max_seqs, sizes.max_len))
    table = h200.array((sizes.table_rows, sizes.max_seqs), jnp.int32)
    pages = h200.array((sizes.max_seqs, sizes.max_pages), jnp.int32)

    def step(leaves, cache, state, slots, table, pages):
        merged, state = nnx.merge(*model_of(leaves)), state_of(state)
        tokens = config.step_tokens
        parts = (cache_of(cache), state.history, slots_back(slots), table, pages, tokens, sizes)
        cache, logits, rows, _ = forward_step(merged, *parts)
        return jax.tree.leaves(
            (cache, *sample_step(logits, rows, state, batch_sampler.sample, None))
        )

    done = h200.compile(step, leaves, cache, state, slots, table, pages, donate=(1, 2))
    held = [array.nbytes for array in make_holes(jax.device_put, largest_bytes(sizes, 0))]
    arrays = [*slots_of(SHAPE)[0], *state]
    rest = sum(held) + sum(np.prod(a.shape) * a.dtype.itemsize for a in arrays) + SPARE_BYTES
    print(f"{done.temp_bytes / MIB:.1f} MiB temp, {(rest + done.temp_bytes) / MIB:.1f} MiB in all")
    assert done.thunks == ["kCommandBuffer"]
    assert done.temp_bytes <= 0.64 * MIB * sizes.max_logit_rows
    assert done.temp_bytes <= step_bytes(config, model_config, shape, dtype, sizes.max_len)
    assert rest + done.temp_bytes <= MOST_MIB * MIB
