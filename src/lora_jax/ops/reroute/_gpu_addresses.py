"""Reads and writes at an address of each row's own, which Pallas has no operation for.

Vectors lie along M of wgmma's layout; a few lines of MLIR for each thread's own numbers do it. The
interpreter, which runs no MLIR, goes through the rows one by one.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

DOWN = plgpu.Layout.WGMMA.reduce(1)  # of a vector along M

_REF = plgpu.RefType()


def gather(ref, index, interpreted: bool):
    """Return ref[index[i]] for every i; all lie within."""
    if not interpreted:
        vector = plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=DOWN)
        read: Callable = plgpu.inline_mgpu(arg_types=(_REF, DOWN), return_type=vector)(_gather)
        return read(ref, index)
    at = lambda i, out: out.at[i].set(ref[index[i]])  # noqa: E731
    return lax.fori_loop(0, index.size, at, jnp.zeros_like(index))


def scatter(ref, index, value, interpreted: bool) -> None:
    """Put value[i] at ref[index[i]], nowhere where that is negative; no two are equal."""
    if not interpreted:
        write: Callable = plgpu.inline_mgpu(arg_types=(_REF, DOWN, DOWN))(_scatter)
        write(ref, index, value)
        return

    def put(i, _):
        def here():
            ref[index[i]] = value[i]

        lax.cond(index[i] >= 0, here, lambda: None)

    lax.fori_loop(0, index.size, put, None)


def _gather(context, ref: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """Emit gather for the numbers that a thread holds."""
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    read = [memref.load(ref, [_address(_number(at))]) for at in index.registers.flat]
    registers = np.array([vector.broadcast(one, number) for number in read], dtype=object)
    shape = index.registers.shape
    return mgpu.FragmentedArray(
        _registers=registers.reshape(shape), _layout=index.layout, _is_signed=True
    )


def _scatter(
    context, ref: ir.Value, index: mgpu.FragmentedArray, value: mgpu.FragmentedArray
) -> None:
    """Emit scatter for the numbers that a thread holds."""
    zero = arith.constant(ir.IntegerType.get_signless(32), 0)
    for at, register in zip(index.registers.flat, value.registers.flat, strict=True):
        target = _number(at)
        inside = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, target, zero))
        with ir.InsertionPoint(inside.then_block):
            memref.store(_number(register), ref, [_address(target)])
            scf.yield_([])


def _number(register: ir.Value) -> ir.Value:
    """Return the one number of a register."""
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _address(index: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), index)
