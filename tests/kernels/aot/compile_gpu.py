"""Compiles programs for an NVIDIA H200 on a machine without one, and reads what came out.

XLA's CUDA compiler needs only the plugin's two packages on the path, ptxas and libdevice; the
device is described by h200_target_config.txtpb. Nothing runs.
"""

import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from bench.thunks import read_thunks
from lora_jax.ops.ptxas import read_reports, reports_in

TARGET = Path(__file__).with_name("h200_target_config.txtpb")
KIND = "NVIDIA H200"  # as jax names it, and the tables of tuned tilings


def plugin_is_found() -> bool:
    """Return whether the CUDA plugin is on the path, where `make test-aot` puts it."""
    packages = "jax_plugins", "jax_plugins.xla_cuda13"  # to ask for the second imports the first
    return all(importlib.util.find_spec(name) is not None for name in packages)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one compiled program is made of."""

    registers: dict[str, int]  # per thread, of each Mosaic kernel by name
    spill_bytes: dict[str, int]  # stores and loads
    temp_bytes: int  # of device memory that the program takes for itself
    thunks: list[str]  # kinds of what the host starts, one by one, per call
    in_graphs: int  # operations that lie in command buffers (CUDA graphs)
    text: str  # optimized HLO
    seconds: float

    @property
    def command_buffers(self) -> int:
        """How many CUDA graphs a call of the program launches."""
        return self.thunks.count("kCommandBuffer")


class H200:
    """One described H200; `gpus` > 1 describes so many of one host."""

    def __init__(self, gpus: int = 1):
        described = topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{gpus}", target_config=TARGET.read_text()
        )
        self.mesh = topologies.make_mesh(described, (gpus,), ("device",))

    def array(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        """Return an argument for `compile`: an array that every GPU holds."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def compile(
        self,
        function: Callable,
        *args,
        donate: tuple[int, ...] = (),
        options: dict[str, str] | None = None,
    ) -> Compiled:
        """Return the report on `jit(function)` of these arguments, compiled to the end."""
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            with reports_in(Path(folder)), jax.set_mesh(self.mesh):
                lowered = jax.jit(function, donate_argnums=donate).lower(*args)
                dumped = {"xla_dump_to": folder, "xla_enable_dumping": True}
                compiled = lowered.compile(compiler_options=dumped | (options or {}))
            seconds = time.perf_counter() - start
            said = read_reports(Path(folder))
            thunks, inside = read_thunks(Path(folder))
        memory = compiled.memory_analysis()
        return Compiled(
            {name: report.registers for name, report in said.items()},
            {name: report.spill_bytes for name, report in said.items()},
            memory.temp_size_in_bytes,
            thunks,
            inside,
            compiled.as_text(),
            seconds,
        )
