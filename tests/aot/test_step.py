"""A step of the engine compiled for an H200: two CUDA graphs, nothing decided by the host."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from aot.compile_gpu import H200
from flax import nnx

from bench import decode_step
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache
from lora_jax.models.registry import model_class
from lora_jax.ops import dispatch, hopper
from serving import batch_sampler
from serving.device_state import init_row_state
from serving.step import StepSizes, forward_step, no_logit_rows, sample_step

pytestmark = pytest.mark.aot
LAYERS, BF16 = 4, jnp.dtype(jnp.bfloat16)
SIZES = StepSizes(
    max_seqs=64, max_len=4096, page_size=16, num_pages=8192, max_logit_rows=64, max_rank=32
)
QWEN3 = {**decode_step.QWEN3, "num_hidden_layers": LAYERS}


@pytest.fixture
def hopper_at_hand(monkeypatch):
    """Let dispatch choose as it does on an H200; skip without the compilers for one."""
    from cuda_backend import ffi

    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None or ffi.find_compiler() is None:
        pytest.skip("the CUDA plugin or nvcc is missing: make test-aot")
    ffi.library().load(dispatch.cache_folder())
    monkeypatch.setattr(ffi, "require", lambda: None)
    monkeypatch.setattr(hopper, "require", lambda op, dtype, interpret: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize("tokens", [8, 64])
def test_a_decode_step_is_one_graph(hopper_at_hand, tokens):
    shown = Path(__file__).parents[2] / "assets" / "tiny-moe" / "config.json"
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
        lambda: nnx.split(kind(config, dtype=BF16, rngs=nnx.Rngs(0)), graph=False)
    )
    cache, cache_of = described(lambda: init_cache(shape, SIZES.num_pages, SIZES.page_size, BF16))
    slots, slots_of = described(lambda: init_slots(catalogue, spec, BF16))

    def step(leaves, cache, history, slots, table, pages):
        merged = nnx.merge(*model_of(leaves))
        parts = (cache_of(cache), history, slots_of(slots), table, pages)
        return jax.tree.leaves(forward_step(merged, *parts, tokens, SIZES))

    history = h200.array((SIZES.max_seqs, SIZES.max_len), jnp.int32)
    table = h200.array((5, SIZES.max_seqs), jnp.int32)
    pages = h200.array((SIZES.max_seqs, SIZES.max_pages), jnp.int32)
    done = h200.compile(step, leaves, cache, history, slots, table, pages, donate=(1,))
    print(f"{done.in_graphs} operations, {done.temp_bytes / 1e6:.1f} MB temp, {done.seconds:.1f} s")
    assert done.thunks == ["kCommandBuffer"]
    assert not any(done.spill_bytes.values())
    logits = SIZES.logit_rows(tokens) * config.vocab_size * 4
    assert done.temp_bytes <= logits + (32 << 20)


@pytest.mark.parametrize("sample", [batch_sampler.sample, batch_sampler.sample_plain])
def test_a_sampler_is_one_graph_at_most(hopper_at_hand, sample):
    h200, rows, vocab = H200(), SIZES.max_logit_rows, QWEN3["vocab_size"]
    flat = [
        jax.tree.flatten(make())
        for make in (
            lambda: no_logit_rows(rows),
            lambda: init_row_state(SIZES.max_seqs, SIZES.max_len),
        )
    ]
    given = [[h200.array(leaf.shape, leaf.dtype) for leaf in leaves] for leaves, _ in flat]

    def step(logits, rows, state):
        rows, state = (tree.unflatten(v) for v, (_, tree) in zip((rows, state), flat, strict=True))
        return jax.tree.leaves(sample_step(logits, rows, state, sample))

    done = h200.compile(step, h200.array((rows, vocab), jnp.float32), *given, donate=(2,))
    print(f"{done.in_graphs} operations, {done.temp_bytes / 1e6:.1f} MB temp, {done.seconds:.1f} s")
    assert done.thunks == ["kCommandBuffer"]
    assert " sort(" not in done.text  # a library's call on a GPU, which no graph can hold
    # All rows of logits at once, in a few arrays of their size.
    assert done.temp_bytes <= 6 * rows * vocab * 4
