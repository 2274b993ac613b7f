"""Shapes of LoRA's operands, and the calls of CUDA kernels that a function makes of them."""

import jax
import jax.numpy as jnp
from support.checks.handlers import assert_served
from support.drivers.lowering import CustomCall, custom_calls

from lora_jax.ops.lora_gemm.batch import LoraBatch

SLOTS, D_IN, D_OUT, SITES = 6, 128, 192, 3
TABLES = (f"{SLOTS}x5xi32", f"{SLOTS}xf32")


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def batch(rows: int, max_rank: int = 16, dtype=jnp.bfloat16, d_in: int = D_IN, **options):
    """Return the shapes of a batch; `sites` of its tables, `tail` bytes of its rank rows."""
    sites, tail = options.get("sites", ()), options.get("tail", 0)
    pools = [array(50, width + tail, dtype=jnp.int8 if tail else dtype) for width in (d_in, D_OUT)]
    tables = array(*sites, SLOTS, 5, dtype=jnp.int32), array(*sites, SLOTS, dtype=jnp.float32)
    owners = [array(rows, dtype=jnp.int32)] * 2
    return LoraBatch(array(rows, d_in, dtype=dtype), *pools, *tables, *owners, max_rank)


def calls_of(function, *args) -> dict[str, list[CustomCall]]:
    """Return the calls by what follows `lora_jax_cuda_`; each is as its handler wants it."""
    found: dict[str, list[CustomCall]] = {}
    for call in custom_calls(function, *args):
        assert_served(call)
        found.setdefault(call.target.removeprefix("lora_jax_cuda_"), []).append(call)
    return found


def added(rows: int, count: int = 1, dtype=jnp.bfloat16) -> tuple:
    return tuple(array(rows, D_OUT, dtype=dtype) for _ in range(count))
