"""4-bit codes made plain in the registers of wgmma's first operand, for the Mosaic GPU kernel.

A thread reads four bytes of a row, eight codes. In the order of FRAGMENTS they are what wgmma wants
of it: a register of two bfloat16 is of codes of either half-word. In the order of ROWS wgmma wants
of four neighbouring threads that each has one byte in four: two exchanges with them transpose the
bytes, whose two codes, an even column and the next, are then one register.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from lora_jax.ops.grouped_matmul.weights import FRAGMENTS, ROWS, first_integer, is_e2m1, unpacked
from lora_jax.typing import Array

CHUNK = 32  # codes of a row that four threads hold, eight each


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The meaning of a launch's codes: `group` weights share a scale, as `CodedWeight` says."""

    table: tuple[float, ...]
    group: int
    narrow: bool  # scales are bfloat16
    zeros: bool
    order: str = ROWS

    @property
    def first_integer(self) -> int | None:
        """The value of code 0 if codes count integers up from it."""
        return first_integer(self.table)

    @property
    def e2m1(self) -> bool:
        """True if codes are floats of one sign, two exponent and one mantissa bit."""
        return is_e2m1(self.table)


def decoded(
    codes: Array,
    scales: tuple[Array, ...],
    zeros: tuple[Array, ...] = (),
    *,
    decoding: Decoding,
) -> Array:
    """Return bfloat16 weights [rows, columns] of uint8 codes [rows, columns / 2] in registers.

    `scales` are float32 [rows], one for each group of columns, `zeros` int32.
    """
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    reduced = plgpu.Layout.WGMMA.reduce(1)

    def in_registers(ctx, codes, scales, zeros):
        del ctx
        return _decoded(codes, scales, zeros, (rows, columns), decoding)

    inline: Any = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT, (reduced,) * len(scales), (reduced,) * len(zeros)),
        return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    return inline(in_registers)(codes, scales, zeros)


def interpreted(
    codes: Array,
    scales: tuple[Array, ...],
    zeros: tuple[Array, ...] = (),
    *,
    decoding: Decoding,
) -> Array:
    """Return the same by operations that the interpreter has."""
    pairs = unpacked(codes, decoding.order)
    values = jnp.zeros(pairs.shape, jnp.float32)
    for code, value in enumerate(decoding.table):
        values = jnp.where(pairs == code, jnp.float32(value), values)

    def wide(arrays: tuple[Array, ...]) -> Array:
        parts = [jnp.broadcast_to(a[:, None], (len(a), decoding.group)) for a in arrays]
        return jnp.concatenate(parts, axis=1)[:, : pairs.shape[1]].astype(jnp.float32)

    values = values - wide(zeros) if zeros else values
    return (values * wide(scales)).astype(jnp.bfloat16)


def _decoded(
    codes, scales, zeros, shape: tuple[int, int], decoding: Decoding
) -> mgpu.FragmentedArray:
    """Return the registers of the plain weights."""
    layout, tiles = plgpu.Layout.WGMMA.to_mgpu(), shape[0] // 64
    found = np.empty(layout.registers_shape(shape), dtype=object)
    words, out = codes.registers.reshape(tiles, -1, 2), found.reshape(tiles, -1, 2)
    scaled, zeroed = ([a.registers.reshape(tiles, 2) for a in some] for some in (scales, zeros))
    exchange, pairs = _exchange() if decoding.order == ROWS else None, _pairs(decoding)
    for tile, chunk, half in np.ndindex(words.shape):
        word = mgpu.utils.bitcast(words[tile, chunk, half], _i32_type())
        word = exchange(word) if exchange else word
        group = chunk * CHUNK // decoding.group
        of_group = [_scalar(a[group][tile, half]) for a in (scaled, zeroed) if a]
        for i, register in enumerate(pairs(word, *of_group)):
            out[tile, 4 * chunk + i, half] = register
    return mgpu.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)


def _i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i32(value: int) -> ir.Value:
    signed = value - (1 << 32) if value >> 31 else value
    return arith.constant(_i32_type(), ir.IntegerAttr.get(_i32_type(), signed))


def _scalar(register: ir.Value) -> ir.Value:
    """Return the value of a register that holds one."""
    is_vector = isinstance(register.type, ir.VectorType)
    return llvm.extractelement(register, _i32(0)) if is_vector else register


def _asm(operands: list[ir.Value], text: str, constraints: str, *, ordered: bool) -> ir.Value:
    """Return what PTX leaves in $0, 32 bits; `ordered` if threads talk to one another in it."""
    return llvm.inline_asm(_i32_type(), operands, text, constraints, has_side_effects=ordered)


def _pair(word: ir.Value) -> ir.Value:
    """Return 32 bits as two bfloat16."""
    return mgpu.utils.bitcast(word, ir.VectorType.get((2,), ir.BF16Type.get()))


def _lane() -> ir.Value:
    return arith.remui(mgpu.utils.thread_idx(), _i32(32))


def _exchange() -> Callable[[ir.Value], ir.Value]:
    """Return a function of four threads' words: byte i of thread t becomes byte t of thread i."""
    lane = _lane()

    def chosen(bit: int, without: int, with_it: int) -> ir.Value:
        unset = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, _i32(bit)), _i32(0))
        return arith.select(unset, _i32(without), _i32(with_it))

    far, near = chosen(2, 0x5410, 0x3276), chosen(1, 0x6240, 0x3715)
    text = """{
    .reg .b32 other, half;
    shfl.sync.bfly.b32 other, $1, 2, 31, 0xffffffff;
    prmt.b32 half, $1, other, $2;
    shfl.sync.bfly.b32 other, half, 1, 31, 0xffffffff;
    prmt.b32 $0, half, other, $3;
    }"""
    return lambda word: _asm([word, far, near], text, "=r,r,r,r", ordered=True)


def _pairs(decoding: Decoding) -> Callable[..., list[ir.Value]]:
    """Return a function of a word of codes, its scale and zero point: four pairs of weights."""
    first = decoding.first_integer
    if first is not None:
        values = _INTEGERS
    elif decoding.e2m1:
        values = _FLOATS
    else:
        return _looked_up(decoding.table, decoding.order)
    scaled = _SCALED_NARROW if decoding.narrow else _SCALED

    in_words = decoding.order == FRAGMENTS

    def pairs(word: ir.Value, scale: ir.Value, zero: ir.Value | None = None) -> list[ir.Value]:
        shifted, base = arith.shrui(word, _i32(4)), _i32(0)
        if first is not None:  # as bfloat16, twice: 128 and more, which the values come with
            base = _i32((0x4300 - first) * 0x10001)
            if zero is not None:
                base = arith.addi(base, arith.muli(zero, _i32(0x10001)))
        found = []
        for i in range(4):
            chosen = f"shr.u32 codes, $1, {4 * i};" if in_words else _BYTE.format(4 + i, i)
            text = f"""{{
            .reg .b32 codes, value, low, high;
            {chosen}
            {values}
            {scaled}
            }}"""
            operands = [word, shifted, scale, base]
            found.append(_pair(_asm(operands, text, "=r,r,r,f,r", ordered=False)))
        return found

    return pairs


# Both codes of a byte, in the low bits of two halves.
_BYTE = "prmt.b32 codes, $1, $2, 0x0{}0{};"
# Of codes in the low bits of two halves, two bfloat16 `value`. 128 plus a code is the bits of 128
# and the code's.
_INTEGERS = """lop3.b32 value, codes, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 value, value, $4;"""
# One sign, two exponent, one mantissa bit lie so in a bfloat16 whose exponent is less by 126.
_FLOATS = """shl.b32 high, codes, 12;
and.b32 high, high, 0x80008000;
shl.b32 low, codes, 6;
lop3.b32 value, low, 0x01c001c0, high, 0xea;
mov.b32 low, 0x7e807e80;
mul.rn.bf16x2 value, value, low;"""
# Neither kind's values take more than five bits: a product with a bfloat16 is rounded once.
_SCALED_NARROW = """cvt.rn.bf16x2.f32 low, $3, $3;
mul.rn.bf16x2 $0, value, low;"""
_SCALED = """shl.b32 low, value, 16;
and.b32 high, value, 0xffff0000;
mul.rn.f32 low, low, $3;
mul.rn.f32 high, high, $3;
cvt.rn.bf16x2.f32 $0, high, low;"""


def _looked_up(table: tuple[float, ...], order: str) -> Callable[..., list[ir.Value]]:
    """Return a decoder of any table: each thread holds one code's value and is asked for it."""
    f32, lane = ir.F32Type.get(), arith.remui(_lane(), _i32(16))
    values = [arith.constant(f32, ir.FloatAttr.get(f32, value)) for value in table]
    held = values[0]
    for code, value in enumerate(values[1:], 1):
        here = arith.cmpi(arith.CmpIPredicate.eq, lane, _i32(code))
        held = arith.select(here, value, held)
    text = """{
    .reg .f32 low, high;
    shfl.sync.idx.b32 low, $1, $2, 0x101f, 0xffffffff;
    shfl.sync.idx.b32 high, $1, $3, 0x101f, 0xffffffff;
    mul.rn.f32 low, low, $4;
    mul.rn.f32 high, high, $4;
    cvt.rn.bf16x2.f32 $0, high, low;
    }"""

    def pairs(word: ir.Value, scale: ir.Value) -> list[ir.Value]:
        places = range(8) if order == ROWS else (0, 4, 1, 5, 2, 6, 3, 7)
        codes = [arith.shrui(word, _i32(4 * n)) for n in places]
        return [
            _pair(_asm([held, *both, scale], text, "=r,f,r,r,f", ordered=True))
            for both in zip(codes[::2], codes[1::2], strict=True)
        ]

    return pairs
