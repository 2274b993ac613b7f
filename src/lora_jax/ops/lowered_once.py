"""Functions that the layers and the programs of a process share are traced and lowered once.

jax traces and lowers an inner jitted function once in a program: `in_layers` makes one. A Mosaic
kernel, which takes a second of Python, it lowers anew in the next program, although a server's
steps with and without LoRA run the same products: `call_lowered` does not.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import export
from jax.sharding import get_abstract_mesh

from lora_jax.ops import dispatch

_CUSTOM_CALL = "mosaic_gpu_v2"  # jax vouches for no kernel's name in a file; ours stay here
_PLATFORM = "cuda"


def in_layers[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Return a function of arrays that equal layers of a GPU's program trace and lower once.

    XLA inlines it there. On a CPU it would keep the calls, and fuse nothing over their borders. It
    may call no op: of a trace that jax has kept from another program, a file of a compiled step
    would not have the op's kernel.

    Raises:
        TypeError: on a call, the function calls an op.
    """

    @functools.wraps(function)
    def without_ops(*args: P.args, **kwargs: P.kwargs) -> T:
        with dispatch.noted() as choices:
            result = function(*args, **kwargs)
        if ops := ", ".join(choices.table()):
            name = getattr(function, "__name__", function)
            raise TypeError(f"in_layers: {name} calls {ops}; give it the op's results")
        return result

    jitted = jax.jit(without_ops)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        chosen = jitted if jax.default_backend() == "gpu" else without_ops
        return chosen(*args, **kwargs)

    return call


def call_lowered[T](kernel: Callable[..., T], arrays: Any, settings: tuple[Hashable, ...]) -> T:
    """Return kernel(*arrays, *settings), by the code that another program has made, if any has.

    `kernel` is a jitted function of the module; `arrays` is a tree of arrays. In a part of a step
    over several devices, where a kernel depends on their mesh, it is called as it is.
    """
    if jax.default_backend() != "gpu" or not get_abstract_mesh().empty:
        return kernel(*arrays, *settings)
    leaves, tree = jax.tree.flatten(arrays)
    kinds = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return _lowered(kernel, tree, kinds, settings)(*leaves)


@functools.cache
def _lowered(
    kernel: Callable[..., Any],
    tree: Any,
    kinds: tuple[tuple[tuple[int, ...], str], ...],
    settings: tuple[Hashable, ...],
) -> Callable[..., Any]:
    """Return a function of the leaves whose code is made; programs call it."""

    def call(*leaves: jax.Array) -> Any:
        return kernel(*jax.tree.unflatten(tree, leaves), *settings)

    check = export.DisabledSafetyCheck.custom_call(_CUSTOM_CALL)
    make = export.export(jax.jit(call), platforms=[_PLATFORM], disabled_checks=[check])
    return jax.jit(make(*(jax.ShapeDtypeStruct(*kind) for kind in kinds)).call)
