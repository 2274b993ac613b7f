"""NVSHMEM for processes on a CPU: the transport's own kernels, emulated, over shared memory.

A folder made by `plugin` in PYTHONPATH has the entry point by which a process finds it, as an
installed backend would have. While that folder has a file HOLD, nobody's `join` begins; a file
JOINING.format(PE) has the number of the process that called it.
"""

import importlib.metadata
import os
import tempfile
import time
from pathlib import Path

from support.doubles.cuda_emulator import compile_forward
from support.doubles.peer_double import EmulatedGpus

from cuda_backend import nvshmem
from serving.lora_server.transport.world_library import GROUP

_NAME = "nvshmem-double"
HOLD, JOINING = "hold", "joining-{}"


def plugin(folder: Path) -> None:
    """Make `folder` hold a distribution that has the library for jax's CPU platform."""
    info = folder / "nvshmem_double-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ncpu = {__name__}:EmulatedNvshmem\n")


class EmulatedNvshmem:
    """A WorldLibrary whose PEs have an emulated GPU each."""

    def new_id(self, *, one_host: bool) -> bytes:
        """See WorldLibrary."""
        del one_host
        return nvshmem.new_id(nvshmem.calls_of(compile_forward()))

    def join(
        self,
        device: int,
        pe: int,
        size: int,
        world: bytes,
        slot_bytes: int,
        *,
        servers: int,
        one_host: bool,
    ) -> nvshmem.NvshmemDevice:
        """See WorldLibrary."""
        del one_host
        found = Path(str(importlib.metadata.distribution(_NAME).locate_file("")))
        (found / JOINING.format(pe)).write_text(str(os.getpid()))
        while (found / HOLD).exists():
            time.sleep(0.01)
        peer = EmulatedGpus(Path(tempfile.mkdtemp(dir=found))).device(device)
        options = {"calls": nvshmem.calls_of(compile_forward()), "peer": peer}
        given = device, pe, size, world, slot_bytes
        return nvshmem.NvshmemDevice(*given, servers=servers, **options)
