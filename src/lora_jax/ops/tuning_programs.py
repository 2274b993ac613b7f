"""Programs of a search for tilings: compiled side by side in other processes, kept in a folder.

Tracing and lowering a kernel keep one core busy for seconds, more than its runs take.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jax.experimental import serialize_executable
from tqdm import tqdm

from lora_jax.ops.environment import environment
from lora_jax.ops.ptxas import read_reports, reports_in

# Each has, in the module named, a function `tunable(op)`.
OPS = {
    "gated_matmul": "lora_jax.ops.grouped_matmul.tuning",
    "grouped_matmul": "lora_jax.ops.grouped_matmul.tuning",
    "lora_gemm": "lora_jax.ops.lora_gemm.tuning",
}

NO_GRAPHS = "--xla_gpu_enable_command_buffer="  # of XLA_FLAGS

Shape = Mapping[str, int]


class Spills(RuntimeError):
    """A tiling needs more registers than a thread has."""


@dataclasses.dataclass(frozen=True)
class Tunable:
    """One kernel as the search sees it.

    `program(shape, config)` is a function of arrays: it runs the kernel `launches(shape)` times and
    returns a list of what they give.
    `arguments(shape)` is a tree of what it takes: shapes and dtypes of random arrays, and numpy
    arrays. `candidates` leaves out what the device cannot hold; the first one is what is used
    without a table.
    """

    op: str
    shapes: tuple[Shape, ...]
    candidates: Callable[[Shape], Iterable[Any]]
    program: Callable[[Shape, Any], Callable]
    arguments: Callable[[Shape], Any]
    launches: Callable[[Shape], int]


def find_tunable(op: str) -> Tunable:
    """Return an op's kernel as the search sees it."""
    return importlib.import_module(OPS[op]).tunable(op)


@runtime_checkable
class Compilers(Protocol):
    """Whoever makes the programs of a search."""

    def compile(self, op: str, shape: Shape, config: Any) -> Callable[[], Callable]:
        """Begin to make the program that runs this op at this shape by this tiling.

        Return a function that loads it and returns it, or raises what went wrong.
        """
        ...

    def wait(self, *, progress: bool) -> None:
        """Return when all that was begun is made, or has failed."""
        ...


class Programs:
    """Compiled programs of this device, one file each; what is missing, processes make."""

    def __init__(self, folder: Path, processes: int):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()
        spawn = multiprocessing.get_context("spawn")
        self._makers = ProcessPoolExecutor(processes, mp_context=spawn)
        self._made: list[Future[None]] = []

    def __enter__(self) -> "Programs":
        # A process that shares the device may not take most of its memory. Launches of a CUDA graph
        # that do not need each other run at a time: 64 CTAs of one beside 64 of the next, which in
        # a step have the device to themselves. So these programs are no graphs.
        flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}".strip()
        special = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
        self._stack.enter_context(environment(special))
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # knows kernels of a file
        return self

    def __exit__(self, *_) -> None:
        self._makers.shutdown(cancel_futures=True)
        self._stack.close()

    def compile(self, op: str, shape: Shape, config: Any) -> Callable[[], Callable]:
        """Begin to make a program, unless there is its file; return what loads it."""
        file, future = self.folder / file_name(op, shape, config), None
        if not file.exists():
            future = self._makers.submit(make, op, shape, config, file)
            self._made.append(future)
        return functools.partial(_load, op, shape, file, future)

    def wait(self, *, progress: bool) -> None:
        """Return when all that was begun is made, or has failed."""
        total, off = len(self._made), not progress
        for _ in tqdm(as_completed(self._made), "compiling", total, unit="program", disable=off):
            pass


def file_name(op: str, shape: Shape, config: Any) -> str:
    """Return the name of a program's file, another one of another jax, other flags or source."""
    made_by = jax.__version__, NO_GRAPHS, _source_of(op)
    identity = [op, dict(shape), dataclasses.asdict(config), *made_by]
    sizes = "x".join(map(str, shape.values()))
    return f"{op}-{sizes}-{zlib.crc32(json.dumps(identity).encode()):08x}"


@functools.cache
def _source_of(op: str) -> int:
    """Return a checksum of the op's files."""
    module, code = importlib.import_module(OPS[op]), 0
    assert module.__file__ is not None
    for file in sorted(Path(module.__file__).parent.glob("*.py")):
        code = zlib.crc32(file.read_bytes(), code)
    return code


def make(op: str, shape: Shape, config: Any, file: Path) -> None:
    """Compile a program for the first device of this process, and write it.

    Raises:
        Spills: a kernel needs more registers than there are.
    """
    tunable = find_tunable(op)
    layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arguments = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout), tunable.arguments(shape)
    )
    with tempfile.TemporaryDirectory() as folder, reports_in(Path(folder)):
        compiled = jax.jit(tunable.program(shape, config)).lower(*arguments).compile()
        spilled = sum(report.spill_bytes for report in read_reports(Path(folder)).values())
    if spilled:
        raise Spills(f"{op} at {dict(shape)} spills {spilled} bytes")
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(serialize_executable.serialize(compiled)[0])
    part.replace(file)


def _load(op: str, shape: Shape, file: Path, future: Future | None) -> Callable:
    if future is not None:
        future.result()
    tunable = find_tunable(op)
    takes = jax.tree.structure((tunable.arguments(shape), {}))
    gives = jax.tree.structure([0] * tunable.launches(shape))
    devices = jax.devices()[:1]
    return serialize_executable.deserialize_and_load(
        file.read_bytes(), takes, gives, execution_devices=devices
    )
