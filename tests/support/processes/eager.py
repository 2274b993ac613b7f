"""Eager operations that only move or convert values are computed in numpy: nothing is compiled.

jax compiles a program for every operation outside jit and every shape of its operands. That takes
10 ms, also for a reshape. Tests draw, cut and convert thousands of small arrays so. The results
here have the same bits: nothing is added or multiplied.

`make test-all` and `make test-avx2` run these operations as jax does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, util
from jax._src.array import ArrayImpl
from jax.sharding import SingleDeviceSharding

_CALLS = 30  # with equal shapes; then a program is cheaper
_BYTES = 1 << 20  # of a result, which is copied twice
JAX_S_OWN = dispatch.xla_primitive_callable


def install() -> None:
    """Give jax's rules for single primitives the functions of this module."""

    @util.cache()
    def callable_for(primitive: core.Primitive, **params) -> Callable:
        compiled = JAX_S_OWN(primitive, **params)
        evaluate = _IN_NUMPY.get(primitive.name)
        if evaluate is None or params.get("sharding") is not None:
            return compiled
        return _in_numpy_at_first(primitive, params, evaluate, compiled)

    dispatch.xla_primitive_callable = callable_for


def _in_numpy_at_first(
    primitive: core.Primitive, params: dict, evaluate: Callable, compiled: Callable
) -> Callable:
    calls: Counter[tuple] = Counter()

    def run(*operands: Any) -> Any:
        arrays = [x for x in operands if isinstance(x, jax.Array)]
        if not all(map(_is_plain, arrays)) or not jax.sharding.get_abstract_mesh().empty:
            return compiled(*operands)
        avals = tuple(map(core.typeof, operands))
        calls[avals] += 1
        if calls[avals] > _CALLS:
            return compiled(*operands)
        staged = primitive.name == "stage"  # jax has no rule for its result
        aval = avals[0] if staged else primitive.abstract_eval(*avals, **params)[0]
        if aval.size * aval.dtype.itemsize > _BYTES or not _same_bits(avals, aval):
            return compiled(*operands)
        result = evaluate(*map(np.asarray, operands), **params)
        return _array(result, aval, [x for x in arrays if x._committed])

    return run


def _is_plain(array: jax.Array) -> bool:
    return (
        type(array) is ArrayImpl
        and type(array.sharding) is SingleDeviceSharding
        and isinstance(array.dtype, np.dtype)
        and array.is_ready()  # or the calling thread would wait, where jax's does not
        and array.sharding.memory_kind in (None, array.device.default_memory().kind)
    )


def _same_bits(operands: Sequence, result: Any) -> bool:
    """Return whether numpy converts as XLA does: never from a float to an integer, or in 8 bits."""
    known = {np.dtype(t) for t in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32")}
    floats = {np.dtype(t) for t in ("float32", "float16", jax.numpy.bfloat16)}
    kinds = {aval.dtype for aval in (*operands[:1], result)}  # others are places, or of one type
    if len(kinds) == 1 or kinds <= known:
        return True
    given = operands[0].dtype
    if result.dtype in known:
        return False
    return kinds <= floats or (given in known and result.dtype == np.float32)


def _array(value: Any, aval: Any, committed: Sequence[jax.Array]) -> jax.Array:
    """Return an array of its own memory: jax would share an aligned one with numpy."""
    value = np.asarray(value, aval.dtype)
    assert value.shape == aval.shape, (value.shape, aval)
    memory = np.empty(value.nbytes + 16, np.uint8)
    start = (8 - memory.ctypes.data) % 16
    own = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    own[...] = value
    made = jax.device_put(own, committed[0].device if committed else None)
    if made.weak_type == aval.weak_type:
        return made
    return ArrayImpl(aval, made.sharding, [made], committed=bool(committed))


def _broadcast(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_) -> np.ndarray:
    sizes = [1] * len(shape)
    for dimension, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[dimension] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _dynamic_slice(x: np.ndarray, *starts: Any, slice_sizes: Any, **_) -> np.ndarray:
    places = []
    for start, length, size in zip(starts, slice_sizes, x.shape, strict=True):
        first = min(max(int(start), 0), size - length)
        places.append(slice(first, first + length))
    return x[tuple(places)]


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _iota(*, dtype: Any, shape: Any, dimension: int, **_) -> np.ndarray:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(sizes), shape)


_IN_NUMPY: dict[str, Callable] = {
    "stage": lambda x: x,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "iota": _iota,
}
