"""A process lowers a kernel to what this process makes of it, and ends with its context."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from lora_jax.ops import lowering_processes
from lora_jax.ops.grouped_matmul import pallas_gpu
from lora_jax.ops.grouped_matmul._gpu_tiles import find_config
from lora_jax.ops.grouped_matmul._gpu_weights import Form
from lora_jax.ops.lowering import KernelOrder, exported
from lora_jax.ops.lowering_processes import LoweringProcesses

BF16 = jnp.bfloat16


def order(d_in: int) -> KernelOrder:
    """Return the order of a product of 8 rows and 4 groups."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=BF16)
    sizes, w = jax.ShapeDtypeStruct((4,), jnp.int32), shape((4, 64, d_in))
    config, form = find_config(8, 4, 64, 1), Form()
    arrays = shape((8, d_in)), (w,), sizes, None, (None,), (), None
    leaves, tree = jax.tree.flatten(arrays)
    kinds = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return KernelOrder(pallas_gpu._launch, tree, kinds, (config, form, None, 132, False))


def without_places(module: str) -> list[str]:
    """Return the lines of a printed module of one kernel, without where in a source it comes from.

    That differs by who traced a function first, and is in the bytes of the kernel, too.
    """
    text, number = re.subn(r'(\bmodule|kernel_hash) = "(\\.|[^"\\])*"', "", module)
    assert number == 2
    return [re.sub(r" loc\(.*", "", line) for line in text.splitlines() if line[:4] != "#loc"]


def test_a_process_makes_the_code_that_this_one_makes():
    one, wrong = order(64), order(64 + 8)  # d_in is in steps of 16
    with LoweringProcesses(1) as processes:
        assert processes.has_answered(0)
        coming, failing = processes.lower(one), processes.lower(wrong)
        assert not processes.has_answered(1)
        with pytest.raises(RuntimeError, match="Error: "):
            failing.result()
        theirs = coming.result()
        assert (processes.num_asked, processes.has_answered(2)) == (2, True)
    (process,) = processes._processes
    assert process.returncode is not None
    ours = exported(one)
    assert without_places(theirs.mlir_module()) == without_places(ours.mlir_module())
    assert str(theirs.out_avals) == str(ours.out_avals)


def test_a_process_that_ends_is_replaced_for_the_next_kernel(monkeypatch):
    """What it was to lower is not: the caller lowers it."""
    with LoweringProcesses(1) as processes:
        processes._pool.submit(processes._process).result().kill()
        processes._processes[0].wait()
        assert processes.lower(order(64)).result().fun_name == "call"
    assert len(processes._processes) == 2


def test_nothing_starts_once_they_have_ended():
    processes = LoweringProcesses(1)
    processes.close()
    with pytest.raises(RuntimeError):
        processes.lower(order(64)).result()
    assert not processes._processes


@pytest.mark.parametrize("wide", [False, True])
def test_a_process_has_the_settings_of_this_one_and_no_device(monkeypatch, wide):
    """JAX_ENABLE_X64 is a setting that a program may make itself, outside the environment."""
    asked = {}

    def popen(command, *, env, **pipes):
        asked.update(env)
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(lowering_processes.subprocess, "Popen", popen)
    with jax.enable_x64(wide), LoweringProcesses(1) as processes:
        assert isinstance(processes.lower(order(64)).exception(), FileNotFoundError)
    assert asked["JAX_ENABLE_X64"] == str(wide)
    assert (asked["JAX_PLATFORMS"], asked["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
