"""Launches of maps that share rows on Hopper have the bits of more launches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.adapter_items import adapter_items
from lora_jax.ops.cases import lora_case
from lora_jax.ops.joined_lora import joined_lora
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
def test_gate_and_up_have_the_bits_of_three_launches(rows, width, hidden, ranks, idle):
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "widths", "hidden", "ranks"),
    [
        *((n, (4096, 1024, 1024), 4096, (16,) * 8) for n in (1, 64, 200, 256)),
        *((n, (2048, 512, 512), 2048, (8, 13, 24, 0)) for n in (1, 64, 128)),
        (200, (2048, 512, 512), 2048, (8, 13, 16, 0)),
    ],
)
def test_q_k_and_v_have_the_bits_of_a_launch_for_each_width(rows, widths, hidden, ranks):
    """In each of many launches of one program."""
    case = lora_case(rows, widths[0], hidden, ranks=ranks, dtype="bfloat16")
    tables = {"a_pool": case.a_pool, "b_pools": [case.b_pool[:, :w] for w in widths]}
    tables |= {"entries": jnp.stack([jnp.roll(case.entries, m, 0) for m in range(3)])}
    tables |= {"scaling": jnp.stack([case.scaling] * 3), "row_to_slot": case.row_to_slot}
    static = {"max_rank": case.max_rank, "sites": (0, 1, 2)}
    ys = [case.y[:, :w] for w in widths]

    @jax.jit
    def together(ys, x, tables):
        items = adapter_items(tables["row_to_slot"], len(ranks), max_rank=case.max_rank)
        return joined_lora(ys, x, **tables, **static, items=items, implementation="cuda")

    @jax.jit
    def apart(ys, x, tables):
        pools, rest = tables["b_pools"], {n: t for n, t in tables.items() if n != "b_pools"}
        items = adapter_items(tables["row_to_slot"], len(ranks), max_rank=case.max_rank)
        options = {**rest, "max_rank": case.max_rank, "items": items}
        maps = enumerate(zip(ys, pools, strict=True))
        return [lora_gemms([y], x, b_pool=b, sites=[m], **options)[0] for m, (y, b) in maps]

    want = [np.asarray(y).view(np.int16) for y in apart(ys, case.x, tables)]
    for _ in range(20):
        got = [np.asarray(y).view(np.int16) for y in together(ys, case.x, tables)]
        for mine, its in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, its)
