"""Adapters at maps of several widths: the bits of a call for each; what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.nn import lora
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.cases import lora_case
from lora_jax.ops.joined_lora import joined_lora
from lora_jax.ops.lora_gemm import lora_gemms

ROWS, HIDDEN, WIDTHS = 9, 32, (64, 16, 16)


def some(dtype: str = "float32"):
    """Return ys of the widths, and what joined_lora takes for them."""
    case = lora_case(ROWS, WIDTHS[0], HIDDEN, ranks=(4, 2, 0), dtype=dtype)
    tables = [
        jnp.stack([jnp.roll(t, m, 0) for m in range(3)]) for t in (case.entries, case.scaling)
    ]
    arguments = {
        **{"x": case.x, "a_pool": case.a_pool, "b_pools": [case.b_pool[:, :w] for w in WIDTHS]},
        **{"entries": tables[0], "scaling": tables[1], "sites": (2, 0, 1)},
        **{"row_to_slot": case.row_to_slot, "max_rank": case.max_rank},
    }
    return [case.y[:, :w] for w in WIDTHS], arguments


def same_bits(got, want):
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(its, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_bits_of_a_call_for_each(dtype):
    ys, arguments = some(dtype)
    got = joined_lora(ys, **arguments)
    one = dict(arguments)
    pools, sites = one.pop("b_pools"), one.pop("sites")
    alone = zip(ys, pools, sites, strict=True)
    want = [lora_gemms([y], b_pool=b, sites=[site], **one)[0] for y, b, site in alone]
    same_bits(got, want)
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in zip(got, ys, strict=True))


def test_a_map_without_its_pool_or_site_is_refused():
    ys, arguments = some()
    pools = arguments.pop("b_pools")
    with pytest.raises(ValueError, match=r"got 3 y, 2 pools and sites \(2, 0, 1\)"):
        joined_lora(ys, b_pools=pools[:2], **arguments)
    with pytest.raises(ValueError, match="b_pool"):  # of another map's width
        joined_lora(ys, b_pools=pools[::-1], **arguments)
    with pytest.raises(ValueError, match=r"sites \(3,\) of a table of 3"):
        joined_lora(ys, b_pools=pools, **arguments | {"sites": (2, 0, 3)})


@pytest.mark.parametrize(
    ("names", "asked"),
    [(("q", "k", "v"), (64, 16, 16)), (("q", "v"), (64, 16)), (("k", "v"), ()), (("v",), ())],
)
def test_q_k_and_v_ask_for_it_where_adapters_have_several_widths(monkeypatch, names, asked):
    """Maps that no adapter can have come back themselves."""
    ys, given = some()
    pools = {"32": given["a_pool"], "64": given["b_pools"][0], "16": given["b_pools"][1]}
    entries, scaling = (given[name][:, None][: len(names)] for name in ("entries", "scaling"))
    slots = AdapterSlots(pools, entries, scaling)
    routing = AdapterRouting(jnp.int32(ROWS), given["row_to_slot"], slots, names, given["max_rank"])
    calls = []

    def noted(ys, *args, **options):
        calls.append(tuple(y.shape[1] for y in ys))
        return joined_lora(ys, *args, **options)

    monkeypatch.setattr(lora, "joined_lora", noted)
    added = lora.add_lora(ys, given["x"], routing, ["q", "k", "v"], 0)
    assert calls == ([asked] if asked else [])
    for y, got, name in zip(ys, added, ("q", "k", "v"), strict=True):
        if name not in names:
            assert got is y
            continue
        arguments = routing.lora_arguments([name], 0, HIDDEN, y.shape[1])
        same_bits([got], lora_gemms([y], given["x"], **arguments))
