"""Rows of images take the place of embeddings; text keeps its bits, zeros and signs included."""

import jax.numpy as jnp
import numpy as np

from lora_jax.batch import ImageRows
from lora_jax.nn import image_rows

X = jnp.asarray([[-0.0, 1.0], [2.0, 3.0], [4.0, -0.0]])
ROWS = jnp.asarray([[[7.0, 8.0], [0.5, 0.25]], [[9.0, 1.0], [2.0, 4.0]]])
IMAGES = ImageRows(ROWS, jnp.asarray([-1, 1, -1]), jnp.zeros((3, 3), jnp.int32))


def test_a_row_stands_for_its_token_and_text_keeps_its_bits():
    got = np.asarray(image_rows.embed(X, IMAGES))
    np.testing.assert_array_equal(got[1], [9.0, 1.0])
    np.testing.assert_array_equal(np.signbit(got[[0, 2]]), [[True, False], [False, True]])


def test_deepstack_is_added_after_its_layer_only():
    got = np.asarray(image_rows.add_after_layer(X, IMAGES, 0))
    np.testing.assert_array_equal(got[1], [4.0, 7.0])
    np.testing.assert_array_equal(np.signbit(got[[0, 2]]), [[True, False], [False, True]])
    assert image_rows.add_after_layer(X, IMAGES, 1) is X


def test_rows_of_another_dtype_are_brought_to_the_hidden_states():
    wide = IMAGES.__class__(ROWS.astype(jnp.bfloat16), IMAGES.token_to_row, IMAGES.rope_positions)
    assert image_rows.embed(X, wide).dtype == jnp.float32
