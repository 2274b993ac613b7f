"""Against what Huawei ships, without a device: schemas in wheels, and the kernel in triton-ascend.

Opt-in: `make test-ascend` installs the wheels; elsewhere these are skipped.
"""

import importlib.util
import mmap
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support.doubles.torch_npu_double import LORA_SCHEMAS, NPU_SCHEMAS
from support.processes.server_process import ROOT

from npu_backend import reroute as npu
from npu_backend.lora import _LIBRARIES

PROGRAM = Path(__file__).with_name("triton_ascend.py")
TRITON = ROOT / ".cache/ascend/triton"
PYTHON = ROOT / ".cache/ascend/python"

pytestmark = pytest.mark.ascend
needs_triton = pytest.mark.skipif(not TRITON.exists(), reason="no triton-ascend (make test-ascend)")


def folder_of(package: str) -> Path:
    """Return where a package lies, which is not imported; skip without it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"no {package} is installed (make test-ascend)")
    return Path(found.origin).parent


def holds(library: Path, text: str) -> bool:
    """Return whether a string is among a library's, however it is spaced."""
    pattern = rb"\s+".join(re.escape(word).encode() for word in text.split())
    with library.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return re.search(pattern, content) is not None


@pytest.mark.parametrize("schema", NPU_SCHEMAS)
def test_schemas_are_those_of_torch_npu(schema):
    library = folder_of("torch_npu") / "lib/libtorch_npu.so"
    assert holds(library, schema)
    assert not holds(library, schema.replace("(", "(Tensor never, ", 1))


@pytest.mark.parametrize("schema", LORA_SCHEMAS)
def test_schemas_are_those_of_vllm_ascend(schema):
    package, name = _LIBRARIES[1].split(".")
    (library,) = folder_of(package).glob(f"{name}.*.so")
    assert holds(library, schema)
    assert holds(library, "_C_ascend")


def test_torch_npu_takes_foreign_memory():
    library = folder_of("torch_npu") / "lib/libtorch_npu.so"
    assert holds(library, "_construct_storage_from_data_pointer")
    assert holds(library, "_construct_NPU_Tensor_From_Storage_And_Metadata")


def run(*arguments: object, **environment: str) -> str:
    """Run the program under triton-ascend and return what it prints."""
    done = subprocess.run(
        [PYTHON, PROGRAM, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(TRITON), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "k", "slots", "experts"), [(7, 2, 3, 8), (129, 2, 4, 16), (501, 6, 20, 64)]
)
def test_triton_ascends_interpreter_gives_the_plain_form(tokens, k, slots, experts, tmp_path):
    rng = np.random.default_rng(tokens)
    ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    owners = rng.integers(-1, slots + 1, tokens).astype(np.int32)
    table = rng.integers(0, 500, (slots, experts)).astype(np.int32)
    cells = 1 << (table.size - 1).bit_length()
    case, result = tmp_path / "case.npz", tmp_path / "result.npz"
    packed = npu.pack(torch.from_numpy(table)).numpy()
    np.savez(case, ids=ids, owners=owners, table=packed, block=npu.BLOCK, cells=cells)
    run("interpret", case, result, TRITON_INTERPRET="1")
    want = npu.reroute_plain(*map(torch.from_numpy, (ids, owners, table)))
    np.testing.assert_array_equal(np.load(result)["groups"], want.numpy())


@needs_triton
@pytest.mark.parametrize("cells", [1, 2048, npu.MAX_CELLS])
def test_the_kernel_lowers_to_copies_and_one_gather(cells):
    """A loop or a scalar load would be the slow form that computed addresses lower to."""
    lowered = run("lower", npu.BLOCK, cells)
    assert lowered.count("call @triton_gather") == 1
    assert "scf.for" not in lowered
    assert "memref.load" not in lowered
    assert lowered.count("memref.copy") == 3  # ids, slots, table
