"""Attention between patches against the plain formula; the bucket has no part in the bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda_backend import image_attention as cuda
from lora_jax.ops.image_attention import (
    attend_windows,
    cudnn,
    image_attention,
    turned_attention,
)
from lora_jax.ops.rotary import rotate

SCALE = 0.3
STATIC = ("scale", "leading", "images", "implementation")
jitted = jax.jit(image_attention, static_argnames=("scale", "leading", "implementation"))
turned = jax.jit(turned_attention, static_argnames=STATIC)


def draw(size: int, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(size), 3)
    return tuple(jax.random.normal(key, (size, 2, 6), dtype) for key in keys)


def plain(q, k, v, valid, scale: float = SCALE) -> np.ndarray:
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = np.where(np.asarray(valid)[None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("implementation", ["ffi", "xla", "reference"])
@pytest.mark.parametrize("count", [3, 256, 300])
def test_matches_the_formula(count: int, implementation: str):
    q, k, v = draw(512)
    valid = (jnp.arange(512) < count) & (jnp.arange(512) % 7 != 2)
    args = (q, k, v, valid, jnp.int32(count))
    got = np.asarray(jitted(*args, scale=SCALE, implementation=implementation))
    real = np.asarray(valid)
    want = plain(q, k, v, valid)
    np.testing.assert_allclose(got[real], want[real], atol=2e-6)


def test_the_meaning_is_the_formula_in_float64():
    q, k, v = draw(24)
    valid = jnp.arange(24) % 7 != 2
    got = jitted(q, k, v, valid, jnp.int32(24), scale=SCALE, implementation="reference")
    real = np.asarray(valid)
    np.testing.assert_allclose(np.asarray(got)[real], plain(q, k, v, valid)[real], atol=2e-6)
    assert not np.asarray(got)[~real].any()


def test_cudnn_is_given_cleared_heads_and_their_number(monkeypatch):
    """Padding holds NaN, which times a weight of 0 is NaN."""
    given = {}

    def attention(q, k, v, **options):
        given.update(options, q=q, k=k, v=v)
        return v + jnp.bfloat16(1)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, k, v = (jnp.zeros((8, 2, 64), jnp.bfloat16).at[5:].set(jnp.nan) for _ in range(3))
    valid = jnp.arange(8) < 5
    got = cudnn.attend(q, k, v, valid, jnp.int32(5), SCALE, leading=True)
    assert given["implementation"] == "cudnn"
    assert (given["scale"], given["q"].shape) == (SCALE, (1, 8, 2, 64))
    lengths = given["query_seq_lengths"], given["key_value_seq_lengths"]
    assert [length.tolist() for length in lengths] == [[5], [5]]
    assert all(np.isfinite(np.asarray(given[name], np.float32)).all() for name in "qkv")
    np.testing.assert_array_equal(np.asarray(got, np.float32)[:, 0, 0], [1.0] * 5 + [0.0] * 3)


def test_cudnn_declines_what_it_does_not_take():
    for dtype, dim, why in (
        ("float32", 64, "bfloat16, not float32"),
        ("bfloat16", 136, "heads to 128 in steps of 8, not 136"),
        ("bfloat16", 72, "cannot run on cpu"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            cudnn.check_support(jnp.dtype(dtype), dim)


@pytest.mark.parametrize("name", ["ffi", "xla"])
def test_a_larger_bucket_gives_the_same_bits(name):
    q, k, v = draw(300)
    valid = jnp.ones(300, bool)
    small = image_attention(q, k, v, valid, jnp.int32(300), SCALE, implementation=name)
    more = ((0, 300), (0, 0), (0, 0))
    nans = [jnp.pad(a, more, constant_values=jnp.nan) for a in (q, k)]
    real, wide_v = jnp.pad(valid, (0, 300)), jnp.pad(v, more)
    wide = image_attention(*nans, wide_v, real, jnp.int32(300), SCALE, implementation=name)
    np.testing.assert_array_equal(np.asarray(wide)[:300], np.asarray(small))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["ffi", "xla"])
def test_images_of_one_call_have_the_bits_of_calls_of_their_own(name, dtype):
    """Five places, the last two empty; in each the patches from 33 on are padding."""
    qkv = jax.random.normal(jax.random.key(3), (5 * 40, 3, 2, 38), dtype)
    angles = jax.random.normal(jax.random.key(4), (40, 19))
    cos, sin, real = jnp.cos(angles), jnp.sin(angles), jnp.arange(40) < 33
    valid = jnp.concatenate([jnp.tile(real, 3), jnp.zeros(80, bool)])
    many = turned(
        *(qkv, jnp.tile(cos, (5, 1)), jnp.tile(sin, (5, 1)), valid, jnp.int32(120)),
        scale=SCALE,
        images=5,
        implementation=name,
    )
    for image in range(3):
        part = slice(40 * image, 40 * image + 40)
        alone = turned(
            *(qkv[part], cos, sin, real, jnp.int32(40)), scale=SCALE, implementation=name
        )
        np.testing.assert_array_equal(many[part][:33], alone[:33])
    q, k = (rotate(qkv[:33, n], cos[:33], sin[:33]) for n in range(2))
    want = plain(q, k, qkv[:33, 2], np.ones(33))
    atol = 2e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(np.asarray(many[:33], np.float64), want, atol=atol)


def test_windows_see_themselves_only_and_empty_ones_are_finite():
    q, k, v = draw(24)
    valid = jnp.arange(24) < 13
    got = np.asarray(attend_windows(q, k, v, valid, 8, SCALE))
    for start in (0, 8):
        part = slice(start, start + 8)
        want = plain(q[part], k[part], v[part], valid[part])
        np.testing.assert_allclose(got[part], want, atol=2e-6)
    assert np.isfinite(got).all()


def test_bfloat16_keeps_its_dtype():
    q, k, v = draw(16, jnp.bfloat16)
    got = image_attention(q, k, v, jnp.ones(16, bool), jnp.int32(16), SCALE)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), plain(q, k, v, np.ones(16)), atol=3e-2)


def test_kernels_say_what_they_do_not_serve():
    q, k, v = draw(16, jnp.bfloat16)
    args = (q, k, v, jnp.ones(16, bool), jnp.int32(16), SCALE)
    angles = jnp.zeros((2, 16, 3))
    both = (
        lambda **how: image_attention(*args, implementation="cudnn", **how),
        lambda **how: turned_attention(
            jnp.stack(args[:3], 1), *angles, *args[3:], implementation="cuda", **how
        ),
    )
    with pytest.raises(NotImplementedError, match="takes one image, not several"):
        both[1](images=2)
    for attend, wanted in zip(both, ("in steps of 8, not 6", "heads of 72, not 6"), strict=True):
        with pytest.raises(NotImplementedError, match="not the first ones"):
            attend()
        with pytest.raises(NotImplementedError, match=wanted):
            attend(leading=True)
    for check, sizes in ((cuda.check_support, (16, 72)), (cudnn.check_support, (72,))):
        with pytest.raises(NotImplementedError, match="takes bfloat16, not float32"):
            check(jnp.dtype(jnp.float32), *sizes)
    with pytest.raises(NotImplementedError, match="takes up to 100 heads, not 101"):
        cuda.check_support(jnp.dtype(jnp.bfloat16), 101, 72)


def test_turned_attention_turns_q_and_k_before():
    q, k, v = draw(16)
    angles = jax.random.normal(jax.random.key(1), (16, 3))
    cos, sin, valid = jnp.cos(angles), jnp.sin(angles), jnp.ones(16, bool)
    rest = valid, jnp.int32(16), SCALE
    want = image_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, *rest)
    for name, atol in (("xla", 0), ("ffi", 1e-5)):  # a turn in C++ rounds once less
        qkv = jnp.stack([q, k, v], 1)
        got = turned_attention(qkv, cos, sin, *rest, implementation=name)
        np.testing.assert_allclose(got, want, atol=atol, rtol=0)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_names_the_sizes():
    q, k, v = draw(16)
    valid, count = jnp.ones(16, bool), jnp.int32(16)
    with pytest.raises(ValueError, match=r"k has shape \(8, 2, 6\), expected \(16, 2, 6\)"):
        image_attention(q, k[:8], v, valid, count, SCALE)
    with pytest.raises(ValueError, match="dtypes must be equal"):
        image_attention(q, k, v.astype(jnp.bfloat16), valid, count, SCALE)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_angles_are_named():
    qkv, cos = jnp.zeros((4, 3, 2, 6)), jnp.zeros((4, 2))
    with pytest.raises(ValueError, match=r"cos has shape \(4, 2\), expected \(4, 3\)"):
        turned_attention(qkv, cos, cos, jnp.ones(4, bool), jnp.int32(4), SCALE)
    for odd in (jnp.zeros((4, 2, 2, 6)), jnp.zeros((4, 3, 2, 5)), jnp.zeros((4, 3, 6))):
        with pytest.raises(ValueError, match=r"qkv has shape .*, expected \[patches, 3, heads"):
            turned_attention(odd, cos, cos, jnp.ones(4, bool), jnp.int32(4), SCALE)
    uneven = jnp.zeros((4, 3, 2, 6)), *jnp.zeros((2, 4, 3)), jnp.ones(4, bool), jnp.int32(4)
    with pytest.raises(ValueError, match="4 patches are no 3 images of one size"):
        turned_attention(*uneven, SCALE, images=3)
    narrow = jnp.zeros((4, 3), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"cos \(4, 3\) is bfloat16, expected float32"):
        turned_attention(qkv, narrow, narrow, jnp.ones(4, bool), jnp.int32(4), SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "xla"])  # that is cuDNN, after a turn
@pytest.mark.parametrize("count", [37, 800, 1024, 2040])
def test_on_a_gpu_kernels_match_the_formula_and_the_bucket_has_no_part_in_their_bits(name, count):
    qkv = jax.random.normal(jax.random.key(7), (4096, 3, 16, 72), jnp.bfloat16)
    angles = jax.random.normal(jax.random.key(8), (4096, 36))
    cos, sin, found = jnp.cos(angles), jnp.sin(angles), []
    attend = functools.partial(turned, scale=72**-0.5, leading=True, implementation=name)
    for size in (2048, 4096):
        real = jnp.arange(size) < count
        nans = jnp.where(real[:, None, None, None], qkv[:size], jnp.nan)
        out = attend(nans, cos[:size], sin[:size], real, jnp.int32(count))
        out = np.asarray(out, np.float32)
        assert not out[count:].any()
        found.append(out[:count])
    np.testing.assert_array_equal(found[0], found[1])
    q, k, v = (qkv[:count, part] for part in range(3))
    q, k = rotate(q, cos[:count], sin[:count]), rotate(k, cos[:count], sin[:count])
    np.testing.assert_allclose(found[0], plain(q, k, v, np.ones(count), 72**-0.5), atol=1e-2)
