"""Lowers functions for devices that are not there, and reads the custom calls that came out.

jax lowers for CUDA and, where an abstract mesh names the device, for a TPU on any machine: a kernel
is traced, laid out and held to the size of shared memory, and nothing is compiled.
"""

import base64
import collections
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import jax
from jax._src.lib import tpu
from jax.experimental.mosaic import gpu as mosaic_gpu
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
    """Division of a Mosaic GPU kernel, its operations of each kind, and what it says in PTX."""

    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    operations: collections.Counter[str]
    assembly: str


@dataclasses.dataclass(frozen=True)
class TpuKernel:
    """A Mosaic TPU kernel; arrays are "vmem 2x8x128xf32", with the memory they lie in."""

    name: str
    prefetched: tuple[str, ...]  # scalars that are there before the grid begins
    operands: tuple[str, ...]  # and results
    scratch: tuple[str, ...]
    vmem_limit: int
    operations: collections.Counter[str]
    aliases: dict[int, int]


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


def tpu_kernels(function: Callable, *args: Any) -> list[TpuKernel]:
    """Return the Mosaic TPU kernels of jit(function), lowered for a TPU v5e."""
    calls = custom_calls(function, *args, platform="tpu")
    return [_tpu_kernel(call) for call in calls if call.target == "tpu_custom_call"]


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
    attributes = {named.name: _plain(named.attr) for named in config}
    if not own and "backend_config" in given:  # a TPU's is JSON
        attributes = json.loads(ir.StringAttr(given["backend_config"]).value or "{}")
    aliases = ALIAS.findall(str(given["output_operand_aliases"]))
    return CustomCall(
        ir.StringAttr(given["call_target_name"]).value,
        tuple(_array(value) for value in operation.operands),
        tuple(_array(value) for value in operation.results),
        attributes,
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
    with _context():
        root = ir.Module.parse(module).operation
        operations = _operations(root)
        (launch,) = (found for found in operations if _kind(found) == "launch")
        *_, gx, gy, gz, bx, by, bz, shared = (_constant(value) for value in launch.operands)
        name = ir.StringAttr(root.attributes["sym_name"]).value
        kinds = collections.Counter(_kind(found) for found in operations)
        said = [found for found in operations if _kind(found) == "inline_asm"]
        assembly = "\n".join(ir.StringAttr(one.attributes["asm_string"]).value for one in said)
    return Launch(name, (gx, gy, gz), bx * by * bz, shared, kinds, assembly)


def _tpu_kernel(call: CustomCall) -> TpuKernel:
    """Read a kernel's own module: its one function has every array as an argument."""
    said, (memory,) = (
        call.attributes["custom_call_config"],
        call.attributes["scoped_memory_configs"],
    )
    with _context():
        root = ir.Module.parse(base64.b64decode(said["body"])).operation
        operations = _operations(root)
        (function,) = (one for one in operations if "scratch_operands" in one.attributes)
        types = [str(argument.type) for argument in function.regions[0].blocks[0].arguments]
        arrays = [_memory(written) for written in types if written.startswith("memref")]
        sizes = ("scalar_prefetch", "scratch_operands")
        first, last = (ir.IntegerAttr(function.attributes[size]).value for size in sizes)
        name = ir.StringAttr(function.attributes["sym_name"]).value
        kinds = collections.Counter(_kind(found) for found in operations)
    end = len(arrays) - last
    groups = tuple(arrays[:first]), tuple(arrays[first:end]), tuple(arrays[end:])
    return TpuKernel(name, *groups, memory["size"], kinds, call.aliases)


def _memory(memref: str) -> str:
    """Return "vmem 8x128xf32" of "memref<8x128xf32, #tpu.memory_space<vmem>>"."""
    shape, _, space = memref.removeprefix("memref<").removesuffix(">>").partition(", ")
    return f"{space.rpartition('<')[2]} {shape}"


def _context() -> ir.Context:
    """Return a context that knows the types of both kinds of kernels; operations are versioned."""
    context = mlir.make_ir_context()
    mosaic_gpu.dialect.register_dialect(context)
    tpu.register_dialect(context)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True
    return context


def _constant(value: ir.Value) -> int:
    attributes = value.owner.attributes
    return ir.IntegerAttr(attributes["value"]).value if "value" in attributes else -1
