"""Runs the rerouting kernel under triton-ascend: in its interpreter, or lowered to Linalg.

A program, not a test: triton-ascend owns the name triton and has no wheel for the Python of this
project, so test_wheels starts it with another Python, where there is no torch either.

    triton_ascend.py interpret IN.npz OUT.npz    # TRITON_INTERPRET=1
    triton_ascend.py lower BLOCK CELLS           # prints the Linalg of an Ascend 910B
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

KERNEL = Path(__file__).parents[3] / "src/npu_backend/reroute_kernel.py"
SIGNATURE = {
    "ids_ptr": "*i32",
    "row_to_slot_ptr": "*i32",
    "table_ptr": "*fp32",
    "groups_ptr": "*i32",
    "num_rows": "i32",
    "slots": "i32",
    "experts": "i32",
    "BLOCK": "constexpr",
    "CELLS": "constexpr",
}


class HostArray:
    """What the interpreter wants of a torch tensor, over a numpy array that it writes in place."""

    device = "cpu"

    def __init__(self, array):
        self.array, self.dtype, self.data = array, array.dtype, self

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def to(self, device):
        return self

    def copy_(self, other):
        return self


def kernel():
    """Load the file by its path: the package around it needs a newer Python."""
    spec = importlib.util.spec_from_file_location("reroute_kernel", KERNEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reroute_kernel


def interpret(source, target):
    """Run the kernel over the arrays of one file, and write `groups` to another."""
    from triton.runtime import interpreter

    def create_gather(builder, values, index, axis):
        found = np.take_along_axis(values.data, index.data, axis)
        return interpreter.TensorHandle(found, values.dtype)

    # This interpreter lacks the one builder call.
    interpreter.InterpreterBuilder.create_gather = create_gather
    case = np.load(source)
    ids, table = case["ids"], case["table"]
    rows = np.repeat(case["owners"], ids.shape[1])
    groups = np.full(ids.shape, -77, np.int32)
    block, cells = int(case["block"]), int(case["cells"])
    arrays = [HostArray(array) for array in (ids, rows, table, groups)]
    launch = kernel()[(-(-ids.size // block),)]
    launch(*arrays, ids.size, *table.shape, BLOCK=block, CELLS=cells)
    np.savez(target, groups=groups)


def lower(block, cells):
    """Print what triton-ascend makes of the kernel before its closed compiler takes over."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    backend = compiler.AscendBackend(GPUTarget("npu", "Ascend910B3", 0))
    sizes = {"BLOCK": int(block), "CELLS": int(cells)}
    source = ASTSource(fn=kernel(), signature=SIGNATURE, constants=sizes)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation()
    module = source.make_ir(options, codegen, backend.get_module_map(), context)
    metadata = dict(options.__dict__)
    module = compiler.make_ttir(module, metadata, options)
    print(compiler.ttir_to_linalg(module, metadata, options, named_ops=True))


if __name__ == "__main__":
    {"interpret": interpret, "lower": lower}[sys.argv[1]](*sys.argv[2:])
