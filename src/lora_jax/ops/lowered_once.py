"""Functions that the layers and the programs of a process share are traced and lowered once.

jax traces and lowers an inner jitted function once in a program: `in_layers` makes one. A Mosaic
kernel, which takes a second of Python, it lowers anew in the next program, although a server's
steps with and without LoRA run the same products: `call_lowered` does not. Other processes may
lower kernels meanwhile (`lowered_in`), since Python's lock allows one thread.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import ShapedArray
from jax.export import Exported
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import get_abstract_mesh

from lora_jax.ops import dispatch
from lora_jax.ops.lowering import KernelOrder, exported
from lora_jax.ops.lowering_processes import LoweringProcesses

logger = logging.getLogger(__name__)

_PROCESSES: ContextVar[LoweringProcesses | None] = ContextVar("processes", default=None)


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


@contextlib.contextmanager
def lowered_in(processes: LoweringProcesses) -> Iterator[None]:
    """Have processes, if there are any, lower the kernels of what this thread traces meanwhile.

    A program waits for its kernels when it is lowered, not when it is traced. So the kernels of
    programs that are traced before the first one is lowered are lowered side by side.
    """
    token = _PROCESSES.set(processes if processes.count else None)
    try:
        yield
    finally:
        _PROCESSES.reset(token)


def call_lowered[T](
    kernel: Callable[..., T], arrays: Any, settings: tuple[Hashable, ...], results: T
) -> T:
    """Return kernel(*arrays, *settings), by the code that another program has made, if any has.

    `kernel` is a jitted function of the module, `arrays` a tree of arrays, and `results` describes
    what the kernel returns: a tree of jax.ShapeDtypeStruct. In a part of a step over several
    devices, where a kernel depends on their mesh, it is called as it is.
    """
    if jax.default_backend() != "gpu" or not get_abstract_mesh().empty:
        return kernel(*arrays, *settings)
    leaves, tree = jax.tree.flatten(arrays)
    kinds = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    out, out_tree = jax.tree.flatten(results)
    avals = tuple(ShapedArray(result.shape, result.dtype) for result in out)
    call = _lowered(KernelOrder(kernel, tree, kinds, settings), avals)
    return jax.tree.unflatten(out_tree, call(*leaves))


@functools.cache
def _lowered(order: KernelOrder, avals: tuple[ShapedArray, ...]) -> Callable[..., Any]:
    """Return a function of the leaves whose code is made, or being made; programs call it."""
    processes = _PROCESSES.get()
    code = _Code(order, None if processes is None else processes.lower(order))
    return jax.jit(functools.partial(_call_code.bind, code=code, avals=avals))


class _Code:
    """A lowered kernel, or one that a process is about to lower."""

    def __init__(self, order: KernelOrder, coming: Future[Exported] | None):
        self._order, self._coming = order, coming
        self._code = exported(order) if coming is None else None

    def get(self) -> Exported:
        """Return the code, which is made here if the process has failed to."""
        if (coming := self._coming) is not None:
            try:
                self._code = coming.result()
            except Exception as error:
                logger.warning("A process did not lower %s: %s", self._order.name, error)
            self._coming = None
        if self._code is None:
            self._code = exported(self._order)
        return self._code


_call_code = Primitive("call_lowered")
_call_code.multiple_results = True


@_call_code.def_abstract_eval
def _avals(*operands, code, avals):
    del operands, code
    return avals


@functools.cache
def _program(**how) -> Callable:
    return jax.jit(functools.partial(_call_code.bind, **how))


@_call_code.def_impl
def _run(*operands, **how):
    return _program(**how)(*operands)


def _lower(context, *operands, code, avals):
    made = [(aval.shape, aval.dtype) for aval in code.get().out_avals]
    if made != (said := [(aval.shape, aval.dtype) for aval in avals]):
        raise TypeError(f"call_lowered: a kernel returns {made}, not the results {said}")
    call = code.get().call

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(call(*leaves))

    return mlir.lower_fun(flat, multiple_results=True)(context, *operands)


mlir.register_lowering(_call_code, _lower)
