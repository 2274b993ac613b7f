"""Heads are normed, turned and written to their pages; padding is dropped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.place_heads import PlaceHeadsArgs, place_heads
from lora_jax.ops.rotary import rotate


def some_heads(dtype: str, normed: bool) -> PlaceHeadsArgs:
    """Three tokens of 6 q heads and 2 kv heads, the last token past the end of the pages."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    angles = normal(3, 8, dtype="float32") * 9
    scales = (normal(16), normal(16)) if normed else None
    heads = normal(3, 6, 16), normal(3, 2, 16), normal(3, 2, 16)
    pages = normal(5, 4, 2, 16), normal(5, 4, 2, 16)
    places = jnp.asarray([17, 3, 20], jnp.int32)
    return PlaceHeadsArgs(*heads, jnp.cos(angles), jnp.sin(angles), scales, *pages, places, 1e-6)


@pytest.mark.parametrize("implementation", ["xla", "ffi"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [False, True])
def test_implementations_are_the_meaning(implementation, dtype, normed):
    args = some_heads(dtype, normed)
    for mine, its in zip(
        place_heads(args, implementation=implementation),
        place_heads(args, implementation="reference"),
        strict=True,
    ):
        wide = (np.asarray(a, np.float32) for a in (mine, its))
        np.testing.assert_allclose(*wide, **TOLERANCE[dtype])


def test_the_meaning_is_the_formula_in_float64():
    args = some_heads("float32", True)
    q, k_pages, v_pages = place_heads(args, implementation="reference")
    cos, sin = (np.asarray(a, np.float64)[:, None] for a in (args.cos, args.sin))

    def turned(x, scale):
        x = np.asarray(x, np.float64)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
        first, second = x[..., :8], x[..., 8:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    np.testing.assert_allclose(q, turned(args.q, args.scales[0]), atol=1e-5)
    k = turned(args.k, args.scales[1])
    for pages, old, new in ((k_pages, args.k_pages, k), (v_pages, args.v_pages, args.v)):
        want = np.array(old, np.float64).reshape(20, 2, 16)
        want[17], want[3] = new[0], new[1]  # and nothing of the third, which is past the end
        np.testing.assert_allclose(np.asarray(pages).reshape(20, 2, 16), want, atol=1e-5)


def test_in_place_is_the_portable_way_on_pages_of_others():
    args = some_heads("bfloat16", True)
    want = [np.asarray(a, np.float32) for a in jax.jit(place_heads)(args)]
    args = dataclasses.replace(args, in_place=True)
    q, *pages = place_heads(args)
    assert pages[0] is args.k_pages
    for mine, its in zip((q, *pages), want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), its)
    with pytest.raises(NotImplementedError, match="writes none in place"):
        place_heads(args, implementation="xla")


def test_a_token_of_a_cpu_gets_the_bits_that_it_gets_alone():
    """Half a head is no whole number of vectors, and its tokens are more than a piece has."""
    rng = np.random.default_rng(1)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    heads = normal(19, 3, 22), normal(19, 2, 22), normal(19, 2, 22)
    angles, pages = (normal(19, 11), normal(19, 11)), (normal(5, 4, 2, 22), normal(5, 4, 2, 22))
    places = jnp.asarray(rng.permutation(19), jnp.int32)
    whole = PlaceHeadsArgs(*heads, *angles, None, *pages, places)
    got = place_heads(whole, implementation="ffi")
    one = slice(17, 18)
    moved = (a[one] for a in (*heads, *angles))
    alone = place_heads(PlaceHeadsArgs(*moved, None, *pages, places[one]), implementation="ffi")
    np.testing.assert_array_equal(got[0][one], alone[0])
    at = int(places[17])
    for mine, its, heads_of in zip(got[1:], alone[1:], ("k", "v"), strict=True):
        rows = (np.asarray(p).reshape(20, 2, 22)[at] for p in (mine, its))
        np.testing.assert_array_equal(*rows, err_msg=heads_of)
    np.testing.assert_array_equal(np.asarray(got[2]).reshape(20, 2, 22)[at], whole.v[17])


def test_norms_of_a_cpu_leave_out_padding():
    args = some_heads("bfloat16", True)
    want = place_heads(args, implementation="ffi")
    bad = jnp.nan * jnp.ones(16, jnp.bfloat16)
    args = dataclasses.replace(args, q=args.q.at[2].set(bad), k=args.k.at[2].set(bad))
    args = dataclasses.replace(args, num_tokens=jnp.int32(2))
    q, *pages = place_heads(args, implementation="ffi")
    np.testing.assert_array_equal(
        np.asarray(q[:2], np.float32), np.asarray(want[0][:2], np.float32)
    )
    np.testing.assert_array_equal(np.asarray(q[2], np.float32), 0)
    for mine, its in zip(pages, want[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(its, np.float32))


def test_heads_are_turned_as_the_models_turn_them():
    """So that the tests of kernels cannot agree on another rotation than the models'."""
    args = some_heads("float32", False)
    turned, _, v_pages = place_heads(args)
    want = rotate(args.q, args.cos, args.sin)
    np.testing.assert_allclose(turned, want, **TOLERANCE["float32"])
    flat = np.asarray(v_pages).reshape(20, 2, 16)
    np.testing.assert_array_equal(flat[17], args.v[0])
    np.testing.assert_array_equal(flat[3], args.v[1])
    others = np.delete(flat, [3, 17], axis=0)
    np.testing.assert_array_equal(
        others, np.delete(np.asarray(args.v_pages).reshape(20, 2, 16), [3, 17], axis=0)
    )


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("field", "cut"),
    [
        ("token_to_page_slot", lambda a: a[:1]),
        ("v", lambda a: a[:1]),
        ("cos", lambda a: a[:1]),
        ("k_pages", lambda a: a[:, :, :1]),
        ("v_pages", lambda a: a[:1]),
        ("v_pages", lambda a: a[..., :5]),
    ],
)
def test_shapes_by_which_a_kernel_would_write_beside_the_pages_are_named(field, cut):
    args = some_heads("float32", False)
    args = dataclasses.replace(args, **{field: cut(getattr(args, field))})
    with pytest.raises(ValueError, match=rf"place_heads: {field} has shape .*, expected "):
        place_heads(args)
