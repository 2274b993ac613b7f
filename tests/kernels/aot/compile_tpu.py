"""Compiles programs for one TPU chip on a machine without one, and reads what came out.

libtpu holds the whole compiler; it needs nothing of a TPU machine but its answers to a few
questions, which the environment below gives. Nothing runs.
"""

import dataclasses
import os
import re
import time
from collections.abc import Callable
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# No questions to a metadata server, and no lock against other processes that compile.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one compiled program is made of."""

    vmem_bytes: dict[str, int]  # of each Pallas kernel by name
    temp_bytes: int  # of device memory that the program takes for itself
    aliased_bytes: int  # of donated arguments that results are written over
    text: str  # optimized HLO
    seconds: float


class Tpu:
    """One described chip of a topology such as "v5e:2x2" (four chips are the smallest)."""

    def __init__(self, topology: str):
        with mock.patch.dict(os.environ, ENVIRONMENT):
            described = topologies.get_topology_desc(topology, platform="tpu")
        self.mesh = Mesh(np.array(described.devices[:1]), ("device",))

    def array(
        self, shape: tuple[int, ...], dtype, order: tuple[int, ...] | None = None
    ) -> jax.ShapeDtypeStruct:
        """Return an argument for `compile`; `order` are its axes from outermost to innermost."""
        where = NamedSharding(self.mesh, PartitionSpec())
        where = where if order is None else Format(Layout(order), where)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def compile(self, function: Callable, *args, donate: tuple[int, ...] = ()) -> Compiled:
        """Return the report on `jit(function)` of these arguments, compiled to the end."""
        start = time.perf_counter()
        with jax.set_mesh(self.mesh):
            compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
        seconds, text = time.perf_counter() - start, compiled.as_text()
        memory = compiled.memory_analysis()
        return Compiled(
            _vmem(text), memory.temp_size_in_bytes, memory.alias_size_in_bytes, text, seconds
        )


def _vmem(text: str) -> dict[str, int]:
    """Return the bytes of VMEM that each kernel takes, by name; memory space 1 is VMEM."""
    used = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1",.*?"size":"(\d+)"')
    kernels = [line for line in text.splitlines() if '"tpu_custom_call"' in line]
    found = {}
    for line in kernels:
        name = re.search(r"%([\w.]+) = ", line)
        size = used.search(line)
        assert name is not None, line[:200]
        assert size is not None, line[:200]
        found[name[1]] = int(size[1])
    return found
