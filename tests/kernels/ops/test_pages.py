"""Pages take the tokens that belong to them and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.kv_rows import CODED, stored_dim
from lora_jax.ops.pages import write, write_in_place


def test_write_puts_each_token_at_its_flat_slot_and_drops_padding():
    pages = jnp.zeros((3, 4, 2, 5), jnp.float32)
    new = jnp.arange(3 * 2 * 5, dtype=jnp.float32).reshape(3, 2, 5) + 1
    slots = jnp.array([9, 0, 12], jnp.int32)  # 12 is one past the last slot: padding
    got = np.asarray(write(pages, new, slots)).reshape(12, 2, 5)
    want = np.zeros((12, 2, 5), np.float32)
    want[9], want[0] = np.asarray(new[0]), np.asarray(new[1])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, CODED])
def test_pages_that_a_program_does_not_own_are_written_in_place(dtype):
    floats = jnp.float32 if dtype == CODED else dtype
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(3, 2, 16)), floats) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(3, 4, 16)), floats)
    shape = (3, 4, 2, stored_dim(16, dtype))
    own = [jnp.ones(shape, dtype) for _ in range(2)]
    places = jnp.array([9, 0, 12], jnp.int32)
    want = [np.asarray(write(pages, new, places)) for pages, new in zip(own, (k, v), strict=True)]
    with_pages = jax.jit(
        lambda q, k_pages, v_pages: write_in_place(q, k_pages, k, v_pages, v, places)
    )
    compiled = with_pages.lower(q, *own).compile()
    text = compiled.as_text()
    assert "%k_pages.1" in next(line for line in text.splitlines() if "custom-call(" in line)
    made = f"[{','.join(map(str, shape))}]{{3,2,1,0}} copy("
    assert made not in text, "the pages are copied"
    np.testing.assert_array_equal(np.asarray(compiled(q, *own)), np.asarray(q))
    for pages, wanted in zip(own, want, strict=True):
        np.testing.assert_array_equal(np.asarray(pages), wanted)
