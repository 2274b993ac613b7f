"""Pages take the tokens that belong to them and nothing else."""

import jax.numpy as jnp
import numpy as np

from lora_jax.ops.pages import write


def test_write_puts_each_token_at_its_flat_slot_and_drops_padding():
    pages = jnp.zeros((3, 4, 2, 5), jnp.float32)
    new = jnp.arange(3 * 2 * 5, dtype=jnp.float32).reshape(3, 2, 5) + 1
    slots = jnp.array([9, 0, 12], jnp.int32)  # 12 is one past the last slot: padding
    got = np.asarray(write(pages, new, slots)).reshape(12, 2, 5)
    want = np.zeros((12, 2, 5), np.float32)
    want[9], want[0] = np.asarray(new[0]), np.asarray(new[1])
    np.testing.assert_array_equal(got, want)
