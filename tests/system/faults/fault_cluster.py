"""A real cluster in processes of its own, whose roles can be found, harmed and looked at."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes
from support.processes.server_process import ROOT, free_port

from lora_jax.ops import dispatch

MODEL = ROOT / "assets" / "tiny-moe"
FIXED = ("law", "intent")  # adapters that the operator gives
SIZES = {"max-model-len": 256, "max-num-seqs": 8, "max-num-batched-tokens": 32}
ROLES = ("instance 0", "instance 1", "rank 0", "rank 1")
START_S = 180.0
END_S = 60.0
_SHIM = Path(__file__).parent / "csrc" / "full_disk.c"


class UnixConnection(http.client.HTTPConnection):
    """HTTP over an instance's own socket."""

    def __init__(self, path: str, timeout: float):
        super().__init__("instance", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Cluster:
    """Two instances and a LoRA Server of two ranks under one supervisor."""

    def __init__(self, log: Path):
        """Start it; `wait_well` returns when every role answers."""
        self.log = log
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="flt-"))  # short: sockets lie in it
        self.temporary, self.state = self.folder / "tmp", self.folder / "state"
        self.temporary.mkdir()
        self.state.mkdir(mode=0o700)
        self._shm = set(os.listdir("/dev/shm"))
        self._sessions: list[int] = []
        self._switch = self.folder / "full"
        self._switch.write_bytes(b"\0")
        self._shim = self._compiled_shim()
        self.start()

    def start(self) -> None:
        """Start the supervisor, at first or anew."""
        roles = ["--instances", "2", "--lora-server", "2", "--enable-runtime-lora"]
        sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
        adapters = MODEL / "adapters"
        modules = ["--lora-modules", *(f"{name}={adapters / name}" for name in FIXED)]
        command = [sys.executable, "-m", "serving.launch", str(MODEL), "--port", str(self.port)]
        command += [*roles, *sizes, "--lora-dir", str(adapters), *modules]
        command += ["--state-dir", str(self.state)]
        with self.log.open("a") as out:
            self.top = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment(),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._sessions.append(self.top.pid)

    def _environment(self) -> dict[str, str]:
        found = os.environ | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(self.temporary)}
        programs = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
        kept = (self.state, self.temporary, dispatch.cache_folder(), programs)
        folders = ":".join(str(folder) for folder in kept)
        switch = {"FULL_DISK_SWITCH": str(self._switch), "FULL_DISK_FOLDERS": folders}
        return found | switch | {"LD_PRELOAD": str(self._shim)}

    def _compiled_shim(self) -> Path:
        shim = self.folder / "full_disk.so"
        command = ["gcc", "-O1", "-shared", "-fPIC", str(_SHIM), "-o", str(shim), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        return shim

    def fill_disk(self, full: bool) -> None:
        """Let writes to the folders of caches, state and sockets fail, or succeed again."""
        with self._switch.open("r+b") as file:
            file.write(b"\1" if full else b"\0")

    # The roles.

    def socket_of(self, role: str) -> str | None:
        """Return the path at which a role listens."""
        kind, number = role.split()
        ends = f"/{kind}-{number}"
        paths = [path for path in processes.unix_sockets(self.temporary) if path.endswith(ends)]
        return paths[-1] if paths else None

    def pid_of(self, role: str) -> int | None:
        """Return the process of a role, None while there is none that listens."""
        if role == "front":
            return self.top.pid
        path = self.socket_of(role)
        if path is None:
            return None
        inodes = processes.unix_sockets(self.temporary).get(path, [])
        found = processes.holders(inodes, processes.in_session(self.top.pid))
        return found[-1] if found else None

    def connect(self, where: str, timeout: float) -> http.client.HTTPConnection:
        """Return a connection to the front or straight to an instance."""
        if where == "front":
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        path = self.socket_of(where)
        if path is None:
            raise ConnectionRefusedError(f"{where} does not listen")
        return UnixConnection(path, timeout)

    def is_well(self, before: dict[str, int] | None = None) -> bool:
        """Whether every role runs and every instance answers for the base and fixed adapters.

        `before` are processes of roles that were killed: they must have been replaced.
        """
        if self.top.poll() is not None:
            return False
        for role in ROLES:
            pid = self.pid_of(role)
            if pid is None or pid == (before or {}).get(role):
                return False
        names = (MODEL.name, *FIXED)
        places = ("front", "instance 0", "instance 1")
        return all(self._answers(where, name) for where in places for name in names)

    def _answers(self, where: str, name: str) -> bool:
        body = {"model": name, "prompt": "x", "max_tokens": 1, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        try:
            with contextlib.closing(self.connect(where, 5.0)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                answer = connection.getresponse()
                answer.read()
        except (OSError, http.client.HTTPException):
            return False
        return answer.status == 200

    def wait_well(self, seconds: float, before: dict[str, int] | None = None) -> bool:
        """Return whether every role is well in time."""
        end = time.monotonic() + seconds
        while not (well := self.is_well(before)) and time.monotonic() < end:
            time.sleep(0.3)
        return well

    # What is left.

    def descriptors(self) -> dict[str, int]:
        """Return how many descriptors the front and each role hold."""
        pids = {role: self.pid_of(role) for role in ("front", *ROLES)}
        return {r: len(processes.descriptors(pid)) for r, pid in pids.items() if pid is not None}

    def stop(self) -> list[str]:
        """End it as an operator does; return what is left behind, in words."""
        self.fill_disk(False)
        begun = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.top.send_signal(signal.SIGTERM)
        try:
            self.top.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"the supervisor did not end within {END_S:.0f} s"]
        found = self._left(begun + END_S)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def _left(self, end_s: float) -> list[str]:
        while (found := self._left_now()) and time.monotonic() < end_s:
            time.sleep(0.5)
        return found

    def _left_now(self) -> list[str]:
        pids = [pid for session in self._sessions for pid in processes.in_session(session)]
        found = [f"process {pid}" for pid in pids]
        found += [f"socket {path}" for path in processes.unix_sockets(self.temporary)]
        found += [f"{path} in TMPDIR" for path in os.listdir(self.temporary)]
        return found + [f"{path}" for path in processes.orphans_in_shm(self._shm)]

    def kill(self) -> None:
        """End every process at once."""
        for session in self._sessions:
            for pid in processes.in_session(session):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.top.wait()
