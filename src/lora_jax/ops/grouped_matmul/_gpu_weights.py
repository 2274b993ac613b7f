"""Weights as the Mosaic GPU kernel multiplies by them: from shared memory, or made in registers.

A plain weight is wgmma's operand where the copy engine put it. A quantised one is copied as it is
stored and made plain in registers, value by value as `weights.py` says and rounded to bfloat16, so
that its products have the bits of the plain array's. Its scales, few bytes, are read from global
memory one stage ahead.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul import _gpu_codes
from lora_jax.ops.grouped_matmul._gpu_codes import Decoding
from lora_jax.ops.grouped_matmul._gpu_tiles import STEP
from lora_jax.ops.grouped_matmul.weights import LANES, QUADS, CodedWeight, ScaledWeight, Weight
from lora_jax.typing import Array, Int

QUANTISED_STEPS = (128, 64)  # of d_in in one stage: the first that divides it


@dataclasses.dataclass(frozen=True)
class Form:
    """Memory layout of the weights of a launch; the same for gate and up."""

    bits: int = 16
    step: int = STEP  # of d_in in one stage
    block: int = 0  # weights of a row that share a scale; 0: there are none
    decoding: Decoding | None = None  # of 4 bits

    @property
    def quantised(self) -> bool:
        """True if weights are codes that a kernel decodes."""
        return self.bits < 16

    def at(self, step: int) -> "Form":
        """Return the form with so much of d_in in a stage; how codes lie has one step."""
        return self if self.quantised else dataclasses.replace(self, step=step)

    @property
    def arrays(self) -> int:
        """Number of arrays of a weight beside the one that is copied: scales, zero points."""
        return int(self.quantised) + (self.decoding is not None and self.decoding.zeros)

    @property
    def stored_step(self) -> int:
        """Elements of the copied array in a stage."""
        return self.step // 2 if self.bits == 4 else self.step


def form_of(op: str, *weights: Weight) -> Form:
    """Return the one form of some weights, or raise Declined for one that is not served."""
    forms = {_form_of(op, w) for w in weights}
    if len(forms) > 1:
        raise Declined(f"{op} on Mosaic GPU takes two weights of one form")
    return forms.pop()


def _form_of(op: str, w: Weight) -> Form:
    d_in = w.shape[-1]
    step = next((step for step in QUANTISED_STEPS if d_in % step == 0), QUANTISED_STEPS[-1])
    if isinstance(w, CodedWeight):
        size = w.group_size
        if size % _gpu_codes.CHUNK or (step % size and size % step):
            raise Declined(f"{op} on Mosaic GPU takes no groups of {size} weights")
        if w.order in (LANES, QUADS):
            raise Declined(f"{op} on Mosaic GPU takes no codes in the order {w.order}")
        narrow, zeros = w.scales.dtype == jnp.bfloat16, w.zeros is not None
        decoding = Decoding(w.table, size, narrow, zeros, w.order)
        if zeros and decoding.first_integer is None:
            raise Declined(f"{op} on Mosaic GPU takes zero points beside integers only")
        return Form(4, step, size, decoding)
    if not isinstance(w, ScaledWeight):
        return Form()
    rows, columns = w.block
    if rows != 1 or (columns % step and columns < d_in):
        raise Declined(
            f"{op} on Mosaic GPU takes scales of one row and multiples of {step} columns, "
            f"not of {w.block}"
        )
    return Form(8, step, min(columns, d_in))


def parts(w: Weight) -> tuple[Array, ...]:
    """Return the arrays that the kernel reads, the one that is copied first."""
    if isinstance(w, CodedWeight):
        return (w.codes, w.scales) if w.zeros is None else (w.codes, w.scales, w.zeros)
    return (w.values, w.scales) if isinstance(w, ScaledWeight) else (w,)


def scales_of(
    form: Form, refs: Any, group: Int[Array, ""], rows: Any, k: Int[Array, ""]
) -> tuple[tuple[Array, ...], ...]:
    """Return float32 scales, and int32 zero points if any, of a stage's rows of weights.

    Each is a tuple of arrays [rows], one for each group of columns.
    """
    first = jax.lax.div(k * jnp.int32(form.step), jnp.int32(form.block))
    layout = plgpu.Layout.WGMMA.reduce(1)
    last = refs[0].shape[-1] - 1  # a stage that d_in ends in has fewer groups
    places = [jax.lax.min(first + i, jnp.int32(last)) for i in range(-(-form.step // form.block))]

    def loaded(ref: Any, dtype: Any) -> tuple[Array, ...]:
        sources = (ref.at[group, rows, at] for at in places)
        found = (plgpu.load(source, layout=layout, optimized=False) for source in sources)
        return tuple(one.astype(dtype) for one in found)

    dtypes = (jnp.float32, jnp.int32)
    return tuple(loaded(ref, dtype) for ref, dtype in zip(refs, dtypes, strict=False))


def made_plain(
    form: Form, ref: Any, scales: tuple[tuple[Array, ...], ...], interpreted: bool
) -> Array:
    """Return bfloat16 weights [columns, step] in the registers of wgmma's first operand."""
    if form.decoding is not None:
        codes = plgpu.load(ref, layout=plgpu.Layout.WGMMA_8BIT)
        decode = _gpu_codes.interpreted if interpreted else _gpu_codes.decoded
        return decode(codes, *scales, decoding=form.decoding)
    values = plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    values = plgpu.layout_cast(values, plgpu.Layout.WGMMA).astype(jnp.float32)
    wide = jax.lax.broadcast_in_dim(scales[0][0], values.shape, (0,))
    return (values * wide).astype(jnp.bfloat16)
