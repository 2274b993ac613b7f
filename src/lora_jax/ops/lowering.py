"""Lowers one kernel, apart from the programs that call it.

`python -m lora_jax.ops.lowering` lowers the kernels that another process sends it.
"""

import dataclasses
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Hashable
from typing import IO, Any

import jax
from jax import export

_CUSTOM_CALL = "mosaic_gpu_v2"  # jax vouches for no kernel's name in a file; ours stay here
_PLATFORM = "cuda"


@dataclasses.dataclass(frozen=True)
class KernelOrder:
    """A jitted function of arrays, what its arrays look like, and its static arguments behind."""

    kernel: Callable[..., Any]
    tree: Any  # of the arrays
    kinds: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each
    settings: tuple[Hashable, ...]

    @property
    def name(self) -> str:
        """The function's module and name."""
        return f"{self.kernel.__module__}.{self.kernel.__qualname__}"

    @property
    def described(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays' shapes and dtypes."""
        return [jax.ShapeDtypeStruct(*kind) for kind in self.kinds]


def exported(order: KernelOrder) -> export.Exported:
    """Return the code of a kernel for a GPU, as a function of its arrays' leaves."""

    def call(*leaves: jax.Array) -> Any:
        return order.kernel(*jax.tree.unflatten(order.tree, leaves), *order.settings)

    check = export.DisabledSafetyCheck.custom_call(_CUSTOM_CALL)
    make = export.export(jax.jit(call), platforms=[_PLATFORM], disabled_checks=[check])
    return make(*order.described)


def pack_order(order: KernelOrder) -> bytes:
    """Return the order as another process reads it.

    Raises:
        ValueError: the other process cannot import the function.
    """
    module, name = order.kernel.__module__, order.kernel.__qualname__
    if getattr(sys.modules.get(module), name, None) is not order.kernel:
        raise ValueError(f"{order.name} is no function of a module")
    arrays = jax.tree.unflatten(order.tree, order.described)
    return pickle.dumps((module, name, arrays, order.settings))


def unpack_order(packed: bytes) -> KernelOrder:
    """Return what another process has packed."""
    module, name, arrays, settings = pickle.loads(packed)
    leaves, tree = jax.tree.flatten(arrays)
    kinds = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return KernelOrder(getattr(importlib.import_module(module), name), tree, kinds, settings)


def send(file: IO[bytes], message: bytes) -> None:
    """Write a message behind its length."""
    file.write(len(message).to_bytes(8, "little") + message)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end of the file, or within a message."""
    size = file.read(8)
    if len(size) < 8:
        return None
    length = int.from_bytes(size, "little")
    message = file.read(length)
    return message if len(message) == length else None


def answer_all(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each order with its code, or with the error's text, until there is none."""
    while (packed := receive(orders)) is not None:
        try:
            code = dataclasses.replace(exported(unpack_order(packed)), _get_vjp=None)
            answer = pickle.dumps(code)
        except Exception as error:  # the asking process lowers it itself, and raises
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        send(answers, answer)


if __name__ == "__main__":
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    answer_all(sys.stdin.buffer, stdout)
