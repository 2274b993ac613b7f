"""Bytes of the arrays that steps make for themselves, before any program is compiled."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from lora_jax.config import ModelConfig
from lora_jax.kv_cache import KVShape
from lora_jax.ops.kv_rows import stored_dim
from lora_jax.ops.paged_attention import paged_attention
from serving.api.config import EngineConfig
from serving.engine.memory.storage import kv_dtype
from serving.steps.step_programs import token_buckets

_SAMPLER_COPIES = 7  # of a row's logits in float32; compiled programs have 5 or 6
# Attention on a Hopper GPU has a partial result for each token and chunk of positions. The most, as
# in cuda_backend.paged_attention, which serving does not import:
_PARTS = 65536  # in a step that decodes
_PROMPT_PARTS = 16384  # in a step with prompts: one of _PROMPT_TOKENS and more
_LATENT_PARTS = 8192  # over latents
_CHUNK, _PROMPT_TOKENS = 256, 256  # positions of a chunk, at least; tokens
_CARRIED = 3  # of a token's hidden state: the residual, what a map reads and what it gives


def step_bytes(
    config: EngineConfig,
    model_config: ModelConfig,
    shape: KVShape,
    dtype: jnp.dtype,
    context: int,
    devices: int = 1,
    *,
    traced: bool = True,
) -> int:
    """Return the bytes of one device that the largest step takes beside weights, pages and slots.

    `shape` is what one of the devices keeps of a token, `context` the most positions of a sequence.
    A program's arrays are those that every layer hands on and those of its largest part: attention,
    an MLP, or the rows of logits. Arrays that XLA lays over each other are counted once for each.
    Attention is that of this process's device; not `traced`, no device is asked, and it counts as
    on a Hopper GPU.
    """
    return max(
        _carried(model_config, dtype, tokens)
        + max(
            _attention(config, model_config, shape, dtype, context, tokens, devices, traced),
            _mlp(model_config, dtype, tokens, devices),
            _head(config, model_config, tokens),
        )
        for tokens in token_buckets(config.step_tokens, config.step_seqs)
    )


def _carried(model_config: ModelConfig, dtype: jnp.dtype, tokens: int) -> int:
    return _CARRIED * tokens * model_config.hidden_size * dtype.itemsize


def _mlp(model_config: ModelConfig, dtype: jnp.dtype, tokens: int, devices: int) -> int:
    """Return the bytes of gate, up and their product, of experts also rows in and out."""
    moe, hidden = model_config.moe, model_config.hidden_size
    values = 3 * tokens * -(-model_config.intermediate_size // devices)
    if moe is not None:
        experts = tokens * moe.top_k * (3 * moe.intermediate_size + 2 * hidden)
        values = max(values, experts + 3 * tokens * moe.shared_size)
    return values * dtype.itemsize


def _head(config: EngineConfig, model_config: ModelConfig, tokens: int) -> int:
    rows = min(tokens, config.max_logit_rows)
    return _SAMPLER_COPIES * rows * model_config.vocab_size * jnp.dtype(jnp.float32).itemsize


def _attention(
    config: EngineConfig,
    model_config: ModelConfig,
    shape: KVShape,
    dtype: jnp.dtype,
    context: int,
    tokens: int,
    devices: int,
    traced: bool,
) -> int:
    """Return the bytes of queries, keys and values, and of the attention's own arrays."""
    q_heads, of_pages = model_config.num_heads // devices, kv_dtype(config, dtype)
    v_dim = shape.v_dim or model_config.latent.kv_lora_rank
    maps = tokens * (q_heads + 2 * shape.num_kv_heads) * (shape.k_dim + v_dim) * dtype.itemsize
    if not traced:
        parts = _parts(tokens, context, is_latent=not shape.v_dim) * (v_dim + 2) * 4
        return maps + q_heads * (parts + tokens * v_dim * dtype.itemsize)

    def array(*dims: int, of: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, of)

    lead = 1, config.block_size, shape.num_kv_heads
    k_pages = array(*lead, stored_dim(shape.k_dim, of_pages), of=of_pages)
    v_pages = array(*lead, stored_dim(shape.v_dim, of_pages), of=of_pages)
    arrays = (
        array(tokens, q_heads, shape.k_dim, of=dtype),
        k_pages,
        v_pages if shape.v_dim else None,
        array(config.step_seqs, -(-context // config.block_size)),
        array(tokens),
        array(tokens),
        array(),
    )
    made = jax.make_jaxpr(lambda *given: paged_attention(*given, scale=1.0, v_dim=v_dim))(*arrays)
    return maps + max(_own_arrays(made.jaxpr))


def _parts(tokens: int, context: int, *, is_latent: bool) -> int:
    """Return the most sums that attention on a Hopper GPU keeps apart."""
    most = _LATENT_PARTS if is_latent else _PARTS
    if tokens >= _PROMPT_TOKENS:
        most = min(most, _PROMPT_PARTS)
    return min(tokens * -(-context // _CHUNK), most)


def _own_arrays(jaxpr: core.Jaxpr) -> Iterator[int]:
    """Return the bytes of what each operation of a program gives, and each one inside of it.

    Those inside of a Pallas kernel stay on chip.
    """
    for equation in jaxpr.eqns:
        given: list[Any] = [out.aval for out in equation.outvars]
        yield sum(aval.size * aval.dtype.itemsize for aval in given if hasattr(aval, "dtype"))
        if equation.primitive.name != "pallas_call":
            for inner in core.jaxprs_in_params(equation.params):
                yield from _own_arrays(inner)
