"""The plan of the memory that steps take for themselves, before a program is there."""

import jax
import jax.numpy as jnp
import pytest

from bench.decode_step import QWEN3
from bench.random_model import LlamaShape, llama_config
from cuda_backend import ffi, paged_attention
from lora_jax.config import from_hf
from lora_jax.models.registry import model_class
from serving.api.config import EngineConfig
from serving.engine.memory import step_arrays

MIB, BF16 = 1 << 20, jnp.dtype(jnp.bfloat16)
LLAMA = llama_config(LlamaShape(128256, 4096, 14336, 2, 32, 8, 131072))
MOE = LLAMA | QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"]}


def planned(fields, context, *, devices=1, traced=True, **sizes):
    model_config = from_hf(fields)
    shape = model_class(model_config.model_type).kv_shape(model_config).local(devices)
    config = EngineConfig("m", **sizes)
    given = config, model_config, shape, BF16, context, devices
    return step_arrays.step_bytes(*given, traced=traced) / MIB


@pytest.fixture
def on_hopper(monkeypatch):
    """Let attention be traced as on an H200."""
    monkeypatch.setattr(ffi, "require", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


# MiB of temporary arrays of programs compiled for an H200, as tests/kernels/aot compiles them.
@pytest.mark.parametrize(
    ("fields", "tokens", "context", "compiled"),
    [
        (LLAMA, 128, 131072, 1045.1),
        (LLAMA, 256, 4096, 633.3),
        (LLAMA, 8192, 4096, 740.9),
        (MOE, 8192, 4096, 892.2),
        (MOE, 256, 4096, 892.1),
    ],
    ids=["parts of attention", "rows of logits", "an MLP", "experts", "wide logits"],
)
def test_a_plan_has_room_for_what_the_program_takes(on_hopper, fields, tokens, context, compiled):
    sizes = {"max_num_seqs": min(tokens, 256), "max_num_batched_tokens": tokens}
    assert compiled <= planned(fields, context, **sizes) <= 1.5 * compiled


@pytest.mark.parametrize("fields", [LLAMA, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("context", [4096, 131072])
@pytest.mark.parametrize("tokens", [32, 128, 2048])
def test_without_a_device_attention_counts_as_on_a_gpu(on_hopper, fields, context, tokens):
    sizes = {"max_num_seqs": min(tokens, 256), "max_num_batched_tokens": tokens}
    traced = planned(fields, context, **sizes)
    assert traced <= planned(fields, context, traced=False, **sizes) <= 1.05 * traced


def test_without_a_device_none_is_asked(monkeypatch):
    monkeypatch.setattr(step_arrays, "paged_attention", lambda *_, **__: pytest.fail("traced"))
    assert planned(LLAMA, 4096, traced=False, max_num_seqs=1) > 0


def test_limits_of_attention_without_a_device_are_those_of_the_kernels():
    mine = (step_arrays._PARTS, step_arrays._PROMPT_PARTS, step_arrays._LATENT_PARTS)
    hopper = paged_attention
    assert mine == (hopper.PARTS, hopper.PROMPT_PARTS, hopper.LATENT_PARTS)
    assert min(hopper.SHORT_CHUNK, hopper.CHUNK) == step_arrays._CHUNK
    assert hopper.PROMPT_TOKENS == step_arrays._PROMPT_TOKENS


def test_a_shorter_sequence_and_more_devices_need_less(on_hopper):
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 128}
    whole = planned(LLAMA, 131072, **sizes)
    assert planned(LLAMA, 40960, **sizes) < whole - 600
    assert planned(LLAMA, 131072, devices=2, **sizes) < whole - 500


def test_arrays_inside_of_a_loop_count():
    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: y + jnp.outer(x, x).sum(0), x)

    traced = jax.make_jaxpr(looped)(jnp.ones(64))
    assert max(step_arrays._own_arrays(traced.jaxpr)) == 64 * 64 * 4
