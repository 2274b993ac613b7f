"""An MLP's two products with adapters, multiplied where they are added on Hopper: equal bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.adapter_items import adapter_items
from lora_jax.ops.cases import lora_case
from lora_jax.ops.lora_gemm import lora_gemms
from lora_jax.ops.lora_silu import lora_silu_times
from lora_jax.ops.silu_times import silu_times


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "hidden", "ranks", "idle"),
    [
        (1, 14336, 4096, (16,), 0),
        (8, 14336, 4096, (16, 0), 8),  # no row has an adapter
        (64, 14336, 4096, (16,) * 8, 0),
        (128, 1408, 2048, (8, 13, 24, 40), 3),
        (256, 14336, 4096, (16,) * 8, 5),
        (100, 192, 8192, (64, 1), 2),
        (2048, 14336, 4096, (16,) * 8, 7),  # tiles
        (8192, 1408, 2048, (16, 8, 0, 5), 0),
        (4096, 1408, 2048, (32, 17, 8) * 20, 9),  # some adapters stay in items
    ],
)
def test_bits_are_those_of_three_launches(rows, width, hidden, ranks, idle):
    """In each of many launches of one program, as a step's graph has them."""
    case = lora_case(rows, width, hidden, ranks=ranks, dtype="bfloat16")
    entries = jnp.stack([case.entries, jnp.roll(case.entries, 1, 0)])
    real = jnp.int32(rows - rows // 8)
    there = (jnp.arange(rows) < real)[:, None]
    gate, up = (jnp.where(there, y, 0) for y in (case.y, jnp.roll(case.y, 7, 1)))
    owners = np.where(np.arange(rows) < int(real), np.asarray(case.row_to_slot), -1)
    owners[:: idle or rows + 1] = -1
    if idle == rows:
        owners[:] = -1
    tables = {"a_pool": case.a_pool, "b_pool": case.b_pool, "entries": entries}
    tables |= {"scaling": jnp.stack([case.scaling] * 2), "row_to_slot": jnp.asarray(owners)}
    static = {"max_rank": case.max_rank, "sites": (0, 1)}

    @jax.jit
    def apart(gate, up, x, tables):
        items = adapter_items(tables["row_to_slot"], len(ranks), max_rank=case.max_rank)
        return silu_times(*lora_gemms((gate, up), x, **tables, **static, items=items), real)

    @jax.jit
    def together(gate, up, x, tables):
        items = adapter_items(tables["row_to_slot"], len(ranks), max_rank=case.max_rank)
        options = {**tables, **static, "items": items, "implementation": "cuda"}
        return lora_silu_times(gate, up, real, x, **options)

    want = np.asarray(apart(gate, up, case.x, tables)).view(np.int16)
    for _ in range(20):
        got = np.asarray(together(gate, up, case.x, tables)).view(np.int16)
        np.testing.assert_array_equal(got, want)
