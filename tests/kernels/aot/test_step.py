"""A step of the engine compiled for an H200: one CUDA graph, nothing decided by the host."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.aot.compile_gpu import H200

from bench import decode_step
from cuda_backend.host_board import HostBoard
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache
from lora_jax.models.registry import model_class
from serving.steps.device_state import init_row_state
from serving.steps.sampling import batch_sampler
from serving.steps.sampling.mask_board import MaskBoard
from serving.steps.sampling.token_masks import num_words
from serving.steps.step import StepSizes, forward_step, sample_step

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]  # the kernels are built, too
LAYERS, BF16, F32 = 4, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
LONGEST_SORT = 4096
SIZES = StepSizes(
    max_seqs=64, max_len=4096, page_size=16, num_pages=8192, max_logit_rows=64, max_rank=32
)
QWEN3 = {**decode_step.QWEN3, "num_hidden_layers": LAYERS}


@pytest.mark.parametrize(
    ("tokens", "lora", "dtype", "bound"),
    [
        (8, True, BF16, False),
        (64, True, BF16, False),
        (64, True, BF16, True),
        (64, False, BF16, False),
        (8, True, F32, False),
    ],
    ids=["8", "64", "64 that wait for masks", "64 without adapters", "8 in float32"],
)
def test_a_decode_step_is_one_graph_sampling_included(hopper_at_hand, tokens, lora, dtype, bound):
    shown = Path(__file__).parents[3] / "assets" / "tiny-moe" / "config.json"
    config = from_hf({**json.loads(shown.read_text()), **QWEN3})
    kind, h200 = model_class(config.model_type), H200()

    def described(make):
        """Return what `make` gives as a list of described leaves, and the way back."""
        trees = []

        def leaves_of():
            leaves, tree = jax.tree.flatten(make())
            trees.append(tree)
            return leaves

        return [h200.array(a.shape, a.dtype) for a in jax.eval_shape(leaves_of)], trees[0].unflatten

    catalogue = kind.catalogue(config)
    spec = size_slots(catalogue, 16, SIZES.max_rank, 2)
    shape = kind.kv_shape(config)
    leaves, model_of = described(
        lambda: nnx.split(kind(config, dtype=dtype, rngs=nnx.Rngs(0)), graph=False)
    )
    cache, cache_of = described(lambda: init_cache(shape, SIZES.num_pages, SIZES.page_size, dtype))
    slots, slots_of = described(lambda: init_slots(catalogue, spec, dtype))
    state, state_of = described(lambda: init_row_state(SIZES.max_seqs, SIZES.max_len))

    num_values = SIZES.num_masks * num_words(config.vocab_size) + SIZES.max_logit_rows
    host = object.__new__(HostBoard)  # no memory is shared here
    host.values, host.address = np.zeros(num_values, np.int32), np.zeros(2, np.uint32)
    board = MaskBoard(host, SIZES, config.vocab_size)

    def step(leaves, cache, state, slots, table, pages, waits):
        merged, state = nnx.merge(*model_of(leaves)), state_of(state)
        parts = (cache_of(cache), state.history, slots_of(slots), table, pages, tokens, SIZES)
        cache, logits, rows, _ = forward_step(merged, *parts, lora=lora)
        masks = board.read(*waits, logits) if bound else None
        done = sample_step(logits, rows, state, batch_sampler.sample, masks)
        return jax.tree.leaves((cache, *done))

    table = h200.array((5, SIZES.max_seqs), jnp.int32)
    pages = h200.array((SIZES.max_seqs, SIZES.max_pages), jnp.int32)
    waits = h200.array((2,), jnp.uint32), h200.array((1,), jnp.int32)
    done = h200.compile(step, leaves, cache, state, slots, table, pages, waits, donate=(1, 2))
    print(f"{done.in_graphs} operations, {done.temp_bytes / 1e6:.1f} MB temp, {done.seconds:.1f} s")
    assert done.thunks == ["kCommandBuffer"]
    assert not any(done.spill_bytes.values())
    own = ("rms_norm", "choose_experts", "place_heads", "paged_attention")
    for name in own if dtype == BF16 else ("plain_attention", "grouped_f32"):
        assert done.text.count(f'custom_call_target="lora_jax_cuda_{name}"') >= LAYERS
    # A long sort is a library's call on a GPU, which no graph can hold; a short one is a kernel.
    assert max(sorted_sizes(done.text), default=0) <= LONGEST_SORT
    # The sampler works on all rows of logits at once, in a few arrays of their size.
    assert done.temp_bytes <= 8 * SIZES.logit_rows(tokens) * config.vocab_size * 4 + (32 << 20)


def sorted_sizes(text: str) -> list[int]:
    """Return how many numbers each sort of an HLO text puts in order at a time."""
    found = re.findall(r" = \((?:[a-z0-9]+)\[([\d,]+)\][^)]*\) sort\(.*dimensions=\{(\d+)\}", text)
    return [int(shape.split(",")[int(dimension)]) for shape, dimension in found]
