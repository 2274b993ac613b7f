"""The gated activation with adapters at both maps: the bits of its parts; what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.nn import layers, lora
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.cases import lora_case
from lora_jax.ops.lora_gemm import lora_gemms
from lora_jax.ops.lora_silu import lora_silu_times
from lora_jax.ops.silu_times import silu_times

ROWS, WIDTH, HIDDEN = 9, 64, 32


def some(dtype: str = "float32"):
    """Return gate, up, the real rows, and what lora_gemms takes for them."""
    case = lora_case(ROWS, WIDTH, HIDDEN, ranks=(4, 2, 0), dtype=dtype)
    entries = jnp.stack([case.entries, jnp.roll(case.entries, 1, 0)])
    owners = case.row_to_slot.at[7:].set(-1)
    up = jnp.roll(case.y, 1, 1).at[7:].set(0)
    arguments = {
        **{"x": case.x, "a_pool": case.a_pool, "b_pool": case.b_pool},
        **{"entries": entries, "scaling": jnp.stack([case.scaling] * 2), "sites": (1, 0)},
        **{"row_to_slot": owners, "max_rank": case.max_rank},
    }
    return case.y.at[7:].set(0), up, jnp.int32(7), arguments


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_bits_of_its_parts(dtype):
    gate, up, real, arguments = some(dtype)
    got = lora_silu_times(gate, up, real, **arguments)
    want = silu_times(*lora_gemms((gate, up), **arguments), real)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert not np.asarray(got, np.float32)[7:].any()
    plain = silu_times(gate, up, real)
    assert (np.asarray(got, np.float32) != np.asarray(plain, np.float32)).any()


def test_another_shape_of_up_or_one_site_is_named():
    gate, up, real, arguments = some()
    with pytest.raises(ValueError, match=r"sites \(1,\) be two of the table"):
        lora_silu_times(gate, up, real, **arguments | {"sites": (1,)})
    with pytest.raises(Exception, match="up"):  # by the annotation in tests, or the message
        lora_silu_times(gate, up[:, :8], real, **arguments)
    with pytest.raises(ValueError, match=r"sites \(0, 2\) of a table of 2"):
        lora_silu_times(gate, up, real, **arguments | {"sites": (0, 2)})


@pytest.mark.parametrize(
    ("names", "asked"),
    [(("gate_proj", "up_proj"), True), (("up_proj",), False), (("gate_proj", "down_proj"), False)],
)
def test_an_mlp_asks_for_it_where_adapters_are_at_both_maps(monkeypatch, names, asked):
    """With the same values as without it."""
    _, _, real, given = some()
    pools = {"32": given["a_pool"][:, :HIDDEN], "64": given["b_pool"]}
    tables = (given[name][:, None][: len(names)] for name in ("entries", "scaling"))
    slots = AdapterSlots(pools, *tables)
    routing = AdapterRouting(real, given["row_to_slot"], slots, names, given["max_rank"])
    mlp = layers.Mlp(HIDDEN, WIDTH, layer=0, dtype=jnp.float32, rngs=layers.nnx.Rngs(0))
    calls = []

    def noted(*args, **options):
        calls.append(args)
        return lora_silu_times(*args, **options)

    monkeypatch.setattr(lora, "lora_silu_times", noted)
    got = jax.jit(lambda x: mlp(x, routing))(given["x"])
    assert bool(calls) is asked
    monkeypatch.setattr(layers, "has_gains", lambda *_: True)  # as where something comes between
    want = jax.jit(lambda x: mlp(x, routing))(given["x"])
    np.testing.assert_array_equal(got, want)
