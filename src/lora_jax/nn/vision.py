"""Parts that the towers share: their inputs, axial rotary positions, attention and activations.

A tower turns the patches of one image into rows of the language model. Linear maps are those of
the language model, each row's adapter included.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.catalogue import LoraModule, NameRule
from lora_jax.config import VisionConfig
from lora_jax.nn.layers import Linear
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.rope import computed_once
from lora_jax.ops.grouped_matmul import dense_matmul, gelu_tanh
from lora_jax.ops.image_attention import attend_windows, turned_attention
from lora_jax.ops.rotary import rotate
from lora_jax.typing import Array, Bool, Float, Int, Shaped

PREFIX = "visual."  # of the names of a tower's modules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerInputs:
    """An image, padded to a bucket. Patches stand in the order in which the tower wants them.

    A tower with `takes_several` takes `images` of one grid too, one padded image after the other:
    then all places up to the last image's end count as its patches.
    """

    patches: Shaped[Array, "patches patch_pixels"]  # uint8, each (channel, y, x)
    values: Float[Array, "3 256"]  # what each pixel value of each channel becomes
    positions: Int[Array, "patches 2"]  # row and column
    valid: Bool[Array, "patches"]  # False: padding, also between windows
    num_patches: Int[Array, ""]  # places up to the last valid one
    cells: Int[Array, "cells"]  # cell of the tower that is the image's n-th row
    table_rows: Int[Array, "patches 4"]  # of a learned position table, with their weights
    table_weights: Float[Array, "patches 4"]
    images: int = dataclasses.field(default=1, metadata={"static": True})


class AbstractTower(nnx.Module):
    """Patches of one image to rows of the language model, or of several, each as if alone."""

    takes_several: ClassVar[bool] = False  # images in one call

    @abc.abstractmethod
    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """Make the tower with random weights."""

    @abc.abstractmethod
    def __call__(
        self, inputs: TowerInputs, routing: AdapterRouting
    ) -> Float[Array, "cells parts hidden"]:
        """Return the image's rows, then deepstack's; those past the image's own are undefined."""

    @staticmethod
    @abc.abstractmethod
    def modules(config: VisionConfig) -> list[LoraModule]:
        """Return the maps that adapters may change."""

    @staticmethod
    @abc.abstractmethod
    def rules(config: VisionConfig) -> tuple[NameRule, ...]:
        """Return the spellings of adapter paths, and what is refused."""

    @staticmethod
    @abc.abstractmethod
    def weight_rules(config: VisionConfig) -> tuple[Any, ...]:
        """Return from which tensors of a checkpoint each parameter is made."""

    @staticmethod
    def ignored_weights(config: VisionConfig) -> tuple[str, ...]:
        """Return patterns of a checkpoint's tensors that the tower does not compute with."""
        return ()


def normalised(config: VisionConfig, inputs: TowerInputs) -> Float[Array, "patches patch_dim"]:
    """Return the patches, (channel, time, y, x), a still image standing in every time."""
    cut = inputs.patches.reshape(inputs.patches.shape[0], 3, -1).astype(jnp.int32)
    channel = jnp.arange(3, dtype=jnp.int32)[None, :, None]
    values = inputs.values[channel, cut]
    shape = (*values.shape[:2], config.temporal_patch_size, values.shape[2])
    return jnp.broadcast_to(values[:, :, None], shape).reshape(values.shape[0], -1)


def axial_cos_sin(
    config: VisionConfig, positions: Int[Array, "patches 2"]
) -> tuple[Float[Array, "patches half"], Float[Array, "patches half"]]:
    """Return cos and sin of (row x frequencies, column x frequencies), in float32."""
    dim = config.head_dim // 2
    frequencies = 1e4 ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    wide = positions.astype(jnp.float32)[:, :, None]
    angles = wide * jnp.asarray(frequencies.astype(np.float32))[None, None]
    angles = angles.reshape(positions.shape[0], -1)
    return computed_once(jnp.cos(angles), jnp.sin(angles))


class VisionAttention(nnx.Module):
    """Attention over one image, its q, k and v one map of [3 D, D]."""

    def __init__(self, config: VisionConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        size = config.hidden_size
        self.qkv = vision_linear("attn.qkv", layer, size, 3 * size, dtype=dtype, rngs=rngs)
        self.proj = vision_linear("attn.proj", layer, size, size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "patches hidden"],
        angles: tuple[Float[Array, "patches half"], Float[Array, "patches half"]],
        inputs: TowerInputs,
        routing: AdapterRouting,
        window: int | None = None,
        *,
        addend: Float[Array, "patches hidden"],
    ) -> Float[Array, "patches hidden"]:
        """Return addend plus the output; with `window` patches see those of their own window only.

        Without windows the valid patches come first; with them, 0 for a layer that sees all, the
        padding stands between them.
        """
        heads = (x.shape[0], 3, self.config.num_heads, self.config.head_dim)
        qkv = mapped(self.qkv, x, routing).reshape(heads)
        scale = self.config.head_dim**-0.5
        if window:
            q, k, v = qkv.transpose(1, 0, 2, 3)
            q, k = rotate(q, *angles), rotate(k, *angles)
            out = attend_windows(q, k, v, inputs.valid, window, scale)
        else:
            real, images = (inputs.valid, inputs.num_patches), inputs.images
            leading = window is None and images == 1
            out = turned_attention(qkv, *angles, *real, scale, leading=leading, images=images)
        return mapped(self.proj, out.reshape(x.shape), routing, addend=addend)


def mapped(
    linear: Linear,
    x: Float[Array, "rows d_in"],
    routing: AdapterRouting,
    *,
    gelu: bool = False,
    addend: Float[Array, "rows d_out"] | None = None,
) -> Float[Array, "rows d_out"]:
    """Return f(linear(x)) + addend: f is gelu by tanh, or nothing.

    Where no adapter can change the map it is one launch on a GPU.
    """
    if routing.adapters is None:
        bias = None if linear.bias is None else linear.bias[...]
        weight = linear.weight[...]
        return dense_matmul(x, weight, routing.num_rows, bias, addend, gelu=gelu)
    y = linear(x, routing)
    y = gelu_tanh(y) if gelu else y
    return y if addend is None else addend + y


def vision_linear(
    module: str,
    layer: int,
    d_in: int,
    d_out: int,
    *,
    bias: bool = True,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> Linear:
    """Return a map of a tower that adapters know as visual.<module>."""
    options = {"module": PREFIX + module, "axes": (None, None), "bias": bias}
    return Linear(d_in, d_out, **options, layer=layer, dtype=dtype, rngs=rngs)


def gelu(x: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return x Phi(x), computed in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def quick_gelu(x: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return x sigmoid(1.702 x), computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(jnp.float32(1.702) * wide)).astype(x.dtype)


def at_rows(
    routing: AdapterRouting, rows: int, num_rows: Int[Array, ""], images: int = 1
) -> AdapterRouting:
    """Return the routing of another matrix of the same images, each with one adapter throughout."""
    slots = jnp.repeat(routing.row_to_slot.reshape(images, -1)[:, 0], rows // images)
    return dataclasses.replace(
        routing, num_rows=num_rows, row_to_slot=slots, items=None
    ).with_items()
