"""Compiles steps in processes of their own, side by side: tracing kernels keeps one core busy.

`python -m bench.esft_programs JSON FILE` compiles one; the JSON is a StepProgram's.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import serialize_executable

from bench.esft_model import SHAPES, leaves_of
from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache
from lora_jax.models import model_class
from lora_jax.models.expert_tensors import expert_blocks
from lora_jax.nn import moe
from lora_jax.ops.reroute import row_map
from serving.steps.compiled_step import NO_REMAT
from serving.steps.device_state import init_row_state
from serving.steps.sampling import batch_sampler
from serving.steps.step import TABLE_ROWS, StepSizes, forward_step, sample_step

PAGE = 16  # tokens


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One program: "base" without rerouting, or with it, "fused" or of "plain" JAX operators."""

    model: str
    layers: int  # with experts
    adapters: int
    kind: str
    bucket: int
    groups: int  # experts that a tensor has addresses for
    sizes: StepSizes


def file_name(program: StepProgram) -> str:
    """Return the name of a program's file in a folder of programs; another for any other size."""
    text = json.dumps(dataclasses.asdict(program), sort_keys=True)
    return f"{program.model}-{program.kind}-{program.bucket}-{zlib.crc32(text.encode()):08x}"


def compile_apart(program: StepProgram, ahead: Path | None) -> Any:
    """Return the compiled program: lists of arrays go in and come out.

    It comes from the folder `ahead` if that has it.

    program(leaves, cache, state, sizes, tables, table, block_tables) -> cache, state, sizes, the
    rows of every group of every layer. These three are donated, so that all addresses stay: a CUDA
    graph whose arguments move is written anew.
    """
    if ahead is not None and (file := ahead / file_name(program)).exists():
        try:
            return _load(file)
        except Exception as error:  # of another version of jax or another device
            print(f"{file.name} is of no use here: {str(error)[:300]}", flush=True)
    text = json.dumps(dataclasses.asdict(program))
    # It shares the device, so it may not take most of its memory.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program"
        command = [sys.executable, "-m", "bench.esft_programs", text, str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program.kind} {program.bucket}: {done.stderr[-3000:]}")
        return _load(file)


def _load(file: Path) -> Any:
    with file.open("rb") as opened:
        return serialize_executable.deserialize_and_load(*pickle.load(opened))


def register_kernels() -> None:
    """Make the kernels of the compiled programs known to this process, which traces none of them.

    To be called before compile_apart.
    """
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    jax.eval_shape(functools.partial(row_map, num_experts=8), i32((8, 2)), i32(()))
    if jax.default_backend() == "gpu":
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def compile_here(program: StepProgram) -> Any:
    """Return the compiled program, made of shapes alone."""
    shape = SHAPES[program.model](program.adapters, program.layers)
    config, dtype = from_hf(shape.config), jnp.dtype(shape.config["torch_dtype"])
    kind = model_class(config.model_type)
    model = nnx.eval_shape(lambda: kind(config, dtype=dtype))
    for experts in expert_blocks(model).values():
        for name in PROJECTIONS:
            param = getattr(experts, name)
            whole = jax.ShapeDtypeStruct((program.groups, *param.shape[1:]), dtype)
            setattr(experts, name, param.replace(whole))
    graphdef, params = nnx.split(model, graph=False)
    sizes, treedef = program.sizes, jax.tree.structure(params)
    state = jax.eval_shape(lambda: init_row_state(sizes.max_seqs, sizes.max_len))
    cache = jax.eval_shape(lambda: init_cache(kind.kv_shape(config), sizes.num_pages, PAGE, dtype))
    trees = treedef, jax.tree.structure(cache), jax.tree.structure(state)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    moe_layers, num_experts = len(config.experts.layers), config.experts.num_experts
    arguments = (
        leaves_of(model),
        jax.tree.leaves(cache),
        jax.tree.leaves(state),
        [i32((program.groups,))] * moe_layers,
        None if program.kind == "base" else i32((moe_layers, program.adapters, num_experts)),
        i32((TABLE_ROWS, sizes.max_seqs)),
        i32((sizes.max_seqs, sizes.max_pages)),
    )
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments
    )
    options = None if program.kind == "base" else NO_REMAT
    step = functools.partial(_step, graphdef, trees, program)
    jitted = jax.jit(step, donate_argnums=(1, 2, 3), keep_unused=True, compiler_options=options)
    return jitted.lower(*arguments).compile()


def _step(graphdef, trees, program, leaves, cache, state, old_sizes, tables, table, blocks):
    """Run the engine's step, and note how many rows each group of each layer has."""
    del old_sizes  # only their memory is used
    sizes = []
    plain = {"implementation": "xla"} if program.kind == "plain" else {}

    def noting(op, options, *args, **more):
        map = op(*args, **options, **more)
        sizes.append(map.group_sizes)
        return map

    model = nnx.merge(graphdef, jax.tree.unflatten(trees[0], leaves))
    cache, state = (
        jax.tree.unflatten(t, a) for t, a in zip(trees[1:], (cache, state), strict=True)
    )
    with (
        mock.patch.object(moe, "reroute", functools.partial(noting, moe.reroute, plain)),
        mock.patch.object(moe, "row_map", functools.partial(noting, moe.row_map, {})),
    ):
        cache, logits, rows, _ = forward_step(
            model, cache, state.history, None, table, blocks, program.bucket, program.sizes, tables
        )
    state, _ = sample_step(logits, rows, state, batch_sampler.sample)
    return jax.tree.leaves(cache), jax.tree.leaves(state), sizes


def main() -> None:
    """Compile one program and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m bench.esft_programs", description=__doc__)
    parser.add_argument("json", type=json.loads, help="fields of a StepProgram, as JSON")
    parser.add_argument("file", type=Path, help="file for the compiled program")
    options = parser.parse_args()
    fields = options.json
    program = StepProgram(**fields | {"sizes": StepSizes(**fields["sizes"])})
    compiled = compile_here(program)
    options.file.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))


if __name__ == "__main__":
    main()
