"""Lowers functions for devices that are not there, and reads the custom calls that came out.

jax lowers for CUDA and, where an abstract mesh names the device, for a TPU on any machine: a kernel
is traced, laid out and held to the size of shared memory, and nothing is compiled.
"""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib.mlir import ir

TPU = AbstractMesh((1,), ("d",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
ALIAS = re.compile(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)")


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """One custom call of a lowered program; arrays are "2x3xbf16", as MLIR writes them."""

    target: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: dict[str, Any]  # arrays as lists
    attribute_types: dict[str, str]  # as MLIR writes them; of an array's values, "[i64]"
    aliases: dict[int, int]  # operand to the result that takes its memory


@dataclasses.dataclass(frozen=True)
class Launch:
    """Division of a Mosaic GPU kernel, and how many operations of each kind it has."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    operations: collections.Counter[str]


def custom_calls(function: Callable, *args: Any, platform: str = "cuda") -> list[CustomCall]:
    """Return the custom calls of jit(function) of these arrays, or shapes, in their order."""
    mesh = TPU if platform == "tpu" else jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,))
    module = lowered.compiler_ir("stablehlo").operation
    return [_call(found) for found in _operations(module) if _kind(found) == "custom_call"]


def launches(function: Callable, *args: Any) -> list[Launch]:
    """Return the Mosaic GPU kernels of jit(function), lowered for CUDA."""
    calls = custom_calls(function, *args)
    return [_launch(c.attributes["module"]) for c in calls if c.target == "mosaic_gpu_v2"]


def _operations(root: ir.Operation) -> list[ir.Operation]:
    found = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def _kind(operation: ir.Operation) -> str:
    return operation.name.rpartition(".")[2]


def _call(operation: ir.Operation) -> CustomCall:
    given = operation.attributes
    own = "mhlo.backend_config" in given
    config = ir.DictAttr(given["mhlo.backend_config"]) if own else {}
    aliases = ALIAS.findall(str(given["output_operand_aliases"]))
    return CustomCall(
        ir.StringAttr(given["call_target_name"]).value,
        tuple(_array(value) for value in operation.operands),
        tuple(_array(value) for value in operation.results),
        {named.name: _plain(named.attr) for named in config},
        {named.name: _type(named.attr) for named in config},
        {int(operand): int(result or 0) for result, operand in aliases},
    )


def _array(value: ir.Value) -> str:
    return str(value.type).removeprefix("tensor<").removesuffix(">")


def _plain(attribute: ir.Attribute) -> Any:
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    dense = isinstance(attribute, (ir.DenseIntElementsAttr, ir.DenseFPElementsAttr))
    return list(attribute) if dense else attribute.value


def _type(attribute: ir.Attribute) -> str:
    if isinstance(attribute, ir.StringAttr):
        return "string"
    if isinstance(attribute, ir.BoolAttr):
        return "i1"
    written = str(attribute.type)
    return f"[{written.rpartition('x')[2][:-1]}]" if written.startswith("tensor") else written


def _launch(module: bytes) -> Launch:
    """Read a kernel's own module: its one launch has grid, block and shared memory as operands."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        root = ir.Module.parse(module).operation
        operations = _operations(root)
        (launch,) = (found for found in operations if _kind(found) == "launch")
        *_, gx, gy, gz, bx, by, bz, shared = (_constant(value) for value in launch.operands)
        name = ir.StringAttr(root.attributes["sym_name"]).value
        kinds = collections.Counter(_kind(found) for found in operations)
    return Launch(name, (gx, gy, gz), bx * by * bz, shared, kinds)


def _constant(value: ir.Value) -> int:
    attributes = value.owner.attributes
    return ir.IntegerAttr(attributes["value"]).value if "value" in attributes else -1
