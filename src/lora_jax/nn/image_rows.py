"""Rows of images in the language model: in place of embeddings, and added after its first layers.

Text tokens keep their bits: a row is chosen or not, and never added as a zero.
"""

import jax.numpy as jnp

from lora_jax.batch import ImageRows, ReadRows
from lora_jax.typing import Array, Float


def embed(x: Float[Array, "tokens hidden"], images: ImageRows) -> Float[Array, "tokens hidden"]:
    """Return x with the rows of images at their tokens."""
    return _chosen(x, images, 0)


def add_after_layer(
    x: Float[Array, "tokens hidden"], images: ImageRows, layer: int
) -> Float[Array, "tokens hidden"]:
    """Return the hidden state after a layer, with deepstack's part added at tokens of images."""
    if layer + 1 >= images.rows.shape[1]:
        return x
    return _chosen(x, images, layer + 1, x)


def of_read(images: ImageRows, read: ReadRows) -> ImageRows:
    """Return the images of the rows that are read."""
    rows = read.row_to_token
    at = images.token_to_row[rows], images.rope_positions[:, rows]
    return ImageRows(images.rows, *at)


def _chosen(
    x: Float[Array, "tokens hidden"],
    images: ImageRows,
    part: int,
    addend: Float[Array, "tokens hidden"] | None = None,
) -> Float[Array, "tokens hidden"]:
    """Return x, at tokens of images the part of their rows (plus the addend)."""
    is_image = images.token_to_row >= 0
    rows = images.rows[jnp.maximum(images.token_to_row, 0), part].astype(x.dtype)
    rows = rows if addend is None else addend + rows
    return jnp.where(is_image[:, None], rows, x)
