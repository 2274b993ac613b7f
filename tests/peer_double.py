"""Devices whose memory is the host's and whose kernels run in the emulator: the transport between
GPUs without one."""

from pathlib import Path

from cuda_emulator import compile_transport
from driver_double import compile_double
from server_process import ROOT

from cuda_backend.peer import Calls, PeerDevice
from cuda_backend.peer_memory import Device
from serving.transport import device_memory


class EmulatedGpus:
    """Three GPUs, compiled once."""

    def __init__(self, folder: Path):
        self.driver = compile_double(ROOT / "tests" / "cuda_backend" / "cuda_double.c", folder)
        self.calls = Calls(compile_transport(folder))

    def device(self, number: int) -> PeerDevice:
        """Return one of them."""
        return PeerDevice(number, self.calls, Device(number, self.driver))


class Sockets:
    """The carrier between processes: over a Unix socket and descriptors."""

    def __init__(self, gpus: EmulatedGpus):
        self._gpus = gpus

    def open_server(self, terms, rank: int, folder: Path, **options):
        ends = self._gpus.device(1)
        return device_memory.open_server(folder / f"rank-{rank}.sock", terms, rank, ends, **options)

    def open_client(self, terms, servers, folder: Path, **options):
        paths = [folder / f"rank-{rank}.sock" for rank in range(len(servers))]
        return device_memory.open_client(paths, terms, self._gpus.device(0), **options)


class OneProcess(Sockets):
    """The carrier between devices of one process."""

    def open_server(self, terms, rank: int, folder: Path, *, pull: bool = False):
        return device_memory.DeviceServer(terms.shapes, self._gpus.device(1), pull=pull)

    def open_client(self, terms, servers, folder: Path, *, pull: bool = False):
        return device_memory.open_local_client(servers, self._gpus.device(0))
