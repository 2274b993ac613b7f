"""Foreign calls that do something besides what they return, in programs that start fast.

jax.ffi.ffi_call(has_side_effect=True) tells it to XLA and to jax. XLA has to know, which drops,
joins and repeats calls that only return something. But jax starts a program with effects on a path
in Python, which takes it milliseconds for the arguments of a model, at every step. So here XLA
alone is told; the order of such calls is that of their data, and something has to use what they
return.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

_acting_call = Primitive("acting_call")
_acting_call.multiple_results = True


def acting_call(
    target: str,
    results: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable:
    """Return jax.ffi.ffi_call of a target with a side effect.

    Attributes are hashable; a tuple of integers is an array of int64.
    """
    is_one = isinstance(results, jax.ShapeDtypeStruct)
    several = [results] if isinstance(results, jax.ShapeDtypeStruct) else results
    avals = tuple(ShapedArray(result.shape, result.dtype) for result in several)
    aliases = tuple(sorted((input_output_aliases or {}).items()))

    def call(*operands: jax.Array, **attributes) -> jax.Array | list[jax.Array]:
        options = {"target": target, "avals": avals, "aliases": aliases}
        results = _acting_call.bind(
            *operands, **options, attributes=tuple(sorted(attributes.items()))
        )
        return results[0] if is_one else results

    return call


@_acting_call.def_abstract_eval
def _avals(*operands, avals, **_):
    del operands
    return avals


@functools.cache
def _program(**how) -> Callable:
    return jax.jit(functools.partial(_acting_call.bind, **how))


@_acting_call.def_impl
def _run(*operands, **how):
    return _program(**how)(*operands)


def _lower(context, *operands, target, avals, aliases, attributes):
    del avals
    options = {"has_side_effect": True, "operand_output_aliases": dict(aliases)}
    given = {k: np.array(v, np.int64) if isinstance(v, tuple) else v for k, v in attributes}
    return jax.ffi.ffi_lowering(target, **options)(context, *operands, **given)


mlir.register_lowering(_acting_call, _lower)
