"""GPUs for the tests of the transport between them: emulated ones, whose memory is the host's, or
real ones; and transports over either."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.doubles.cuda_emulator import compile_transport
from support.doubles.driver_double import compile_double
from support.processes.server_process import ROOT

from cuda_backend.peer import PeerDevice
from cuda_backend.peer_endpoints import calls_of
from cuda_backend.peer_memory import Device
from serving.lora_server.transport import device_memory
from serving.lora_server.transport.device_server import DeviceServer

_DOUBLE = ROOT / "tests" / "support" / "doubles" / "cuda_double.c"


class EmulatedGpus:
    """Three GPUs whose kernels run in the emulator, compiled once into a folder."""

    def __init__(self, folder: Path):
        self.folder = str(folder)
        self.driver = compile_double(_DOUBLE, folder)
        self.calls = calls_of(compile_transport(folder))

    def device(self, number: int) -> PeerDevice:
        """Return one of them."""
        return PeerDevice(number, self.calls, Device(number, self.driver))


class CompiledGpus(EmulatedGpus):
    """Those that another process compiled; without custom calls."""

    def __init__(self, folder: Path):
        self.folder = str(folder)
        self.driver = str(folder / "libcuda_double.so")
        self.calls = calls_of(ctypes.CDLL(str(folder / "emulated.so")))


class RealGpus:
    """Those of this machine."""

    folder = ""

    def device(self, number: int) -> PeerDevice:
        """Return one of them."""
        return PeerDevice(number)


class Sockets:
    """The transport between processes, over a Unix socket and descriptors; pushes have a stream."""

    def __init__(self, gpus: EmulatedGpus | RealGpus):
        self.gpus = gpus

    def open_server(self, terms, rank: int, folder: Path, **options):
        endpoints = self.gpus.device(1)
        return device_memory.open_server(
            folder / f"rank-{rank}.sock", terms, rank, endpoints, **options
        )

    def open_client(self, terms, servers, folder: Path, **options):
        paths = [folder / f"rank-{rank}.sock" for rank in range(len(servers))]
        return device_memory.open_client(paths, terms, self.gpus.device(0), **options)


class OneProcess(Sockets):
    """The transport between devices of one process; its pushes may be part of a CUDA graph."""

    def open_server(self, terms, rank: int, folder: Path, *, pull: bool = False):
        return DeviceServer(terms.shapes, self.gpus.device(1), pull=pull)

    def open_client(self, terms, servers, folder: Path, *, pull: bool = False):
        return device_memory.open_local_client(servers, self.gpus.device(0), separate_stream=False)


class ServerProcess:
    """A server of the terms ep=1 in a process of its own, on GPU 1; see peer_process."""

    def __init__(self, gpus: EmulatedGpus | RealGpus, path: Path, hold: int):
        """Its `hold`-th message is kept without an answer; 0: none."""
        folders = [str(ROOT / "tests"), str(ROOT / "src"), str(ROOT)]
        script = str(ROOT / "tests" / "support" / "processes" / "peer_process.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(path), str(hold), gpus.folder],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        )
        self.expect("listening")

    def expect(self, word: str) -> None:
        """Return when it has said a word, which is its next."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def kill(self) -> None:
        """Kill it and return when it is reaped."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
