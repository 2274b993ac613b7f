"""A step of a model over two H200 compiled to the end: one CUDA graph, its exchanges included."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from kernels.aot.compile_gpu import H200

from bench import decode_step, esft_model
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.config import from_hf
from lora_jax.config.split_sizes import attention_output
from lora_jax.kv_cache import init_cache, pages_sharding
from lora_jax.models.registry import abstract, model_class
from lora_jax.sharding import Split, weight_sharding
from serving.engine.parts.devices import local_widths
from serving.steps.device_state import history_and_rest, init_row_state
from serving.steps.sampling import batch_sampler
from serving.steps.sampling.sampler import no_samples
from serving.steps.split_step import StepSplit
from serving.steps.step import StepSizes
from serving.steps.step_functions import jit_steps

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]  # the kernels are built, too
DEVICES, LAYERS, BF16 = 2, 2, jnp.dtype(jnp.bfloat16)
SIZES = StepSizes(
    max_seqs=64, max_len=4096, page_size=16, num_pages=8192, max_logit_rows=64, max_rank=32
)
SHOWN = Path(__file__).parents[3] / "assets" / "tiny-moe" / "config.json"
QWEN3 = {**decode_step.QWEN3, "num_hidden_layers": LAYERS}
# Its latents lie whole on each device; the width of its dense layer divides among two.
DEEPSEEK = {**esft_model.LITE, "num_hidden_layers": LAYERS, "intermediate_size": 8192}


def described(make) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    """Return the leaves of what `make` returns as shapes, and the tree."""
    trees = []

    def leaves_of():
        leaves, tree = jax.tree.flatten(make())
        trees.append(tree)
        return leaves

    return jax.eval_shape(leaves_of), trees[0]


def at(leaf, sharding: NamedSharding, parts: int = 1) -> jax.ShapeDtypeStruct:
    """Return a described array of so many times the rows."""
    shape = (parts * leaf.shape[0], *leaf.shape[1:]) if parts > 1 else leaf.shape
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def described_model(config, split):
    """Return the model with described weights, each as the devices of the split have it."""
    graphdef, state = abstract(config, BF16, split)
    leaves = []
    for name, param in nnx.to_flat_state(state):
        axes, shape = param.get_metadata()["logical_axes"], tuple(param.shape)
        leaves.append((name, param.replace(at(param, weight_sharding(axes, shape, split)))))
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


@pytest.mark.parametrize(
    ("raw", "experts", "tokens"),
    [(QWEN3, "ep", 8), (QWEN3, "tp", 8), (QWEN3, "ep", 2048), (DEEPSEEK, "ep", 8)],
    ids=["whole experts", "parts of experts", "prompts", "latents"],
)
@pytest.mark.usefixtures("hopper_at_hand")
def test_a_step_of_a_split_model_with_adapters_is_one_graph(raw, experts, tokens):
    config = from_hf({**json.loads(SHOWN.read_text()), **raw})
    kind, h200 = model_class(config.model_type), H200(DEVICES)
    split = Split(h200.mesh, experts, group=1, attention_output=attention_output(config))
    assert split.attention_output == "whole"
    shape = kind.kv_shape(config)
    pages = pages_sharding(shape, split)
    over = StepSplit(split, pages.spec)
    model = described_model(config, split)
    (step, *_), leaves = jit_steps(model, SIZES, None, batch_sampler.sample, None, over, None)
    catalogue = local_widths(split).catalogue(kind.catalogue(config))
    spec = size_slots(catalogue, 16, SIZES.max_rank, BF16.itemsize)

    def row_arrays():
        return history_and_rest(init_row_state(SIZES.max_seqs, SIZES.max_len))

    def donated_arrays():
        cache = init_cache(shape, SIZES.num_pages, SIZES.page_size, BF16)
        results = no_samples(SIZES.logit_rows(tokens), config.vocab_size, jnp.zeros)
        return cache, row_arrays()[0], results, None

    def other_arrays():
        adapters = init_slots(catalogue, spec, BF16).plain, None, None
        sizes = (SIZES.table_rows, SIZES.max_seqs), (SIZES.max_seqs, SIZES.max_pages)
        tables = (jnp.zeros(size, jnp.int32) for size in sizes)
        return adapters, *tables, None, None, None, row_arrays()[1], None

    donated, donated_tree = described(donated_arrays)
    donated = [at(a, pages if n < 2 * LAYERS else split.whole) for n, a in enumerate(donated)]
    rest, rest_tree = described(other_arrays)
    num_pools = len(spec.rows)  # the first leaves; each device has rank rows of its own
    rest = [
        at(a, split.rows, DEVICES) if n < num_pools else at(a, split.whole)
        for n, a in enumerate(rest)
    ]

    def run(leaves, donated, rest):
        trees = donated_tree, rest_tree
        return step(leaves, donated, rest, trees, bucket=tokens, lora=True, bound=False)

    done = h200.compile(run, leaves, donated, rest, donate=(1,))
    print(f"{done.in_graphs} operations, {done.temp_bytes / 1e6:.1f} MB temp, {done.seconds:.1f} s")
    assert done.thunks == ["kCommandBuffer"]
    assert not any(done.spill_bytes.values())
    calls = done.text.count('custom_call_target="lora_jax_cuda_all_gather"')
    assert calls >= 2 * LAYERS
    owned = done.text.count('custom_call_target="lora_jax_cuda_all_to_all_owned"')
    assert owned == (len(config.moe.layers) if experts == "ep" else 0)
    assert 'custom_call_target="lora_jax_cuda_take_rows"' in done.text
    assert "lora_jax_cuda_lora_gemm" in done.text
