"""Calls that the jail of a process allows, and calls that the kernel refuses."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from serving.functions import jail

CODE = """
import ctypes, json, os, socket, sys
from serving.functions import jail
own, other, kept, named = sys.argv[1:]
failed = jail.enter([*jail.code_folders([other]), own], [kept], [named], memory_bytes=2 << 30)
tries = {
    "read own": lambda: open(own + "/file").read(),
    "read other": lambda: open(other + "/file").read(),
    "write own": lambda: open(own + "/file", "w"),
    "write kept": lambda: open(kept + "/new", "w").write("x"),
    "list named": lambda: os.listdir(named),
    "read named": lambda: open(named + "/file").read(),
    "environment": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    "tcp": lambda: socket.socket(),
    "udp": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "pair": lambda: socket.socketpair(),
    "signal": lambda: os.kill(os.getppid(), 0),
    "trace": lambda: os.strerror(ctypes.get_errno()) if trace() < 0 else "",
    "import": lambda: __import__("sqlite3"),
    "program": lambda: os.execv("/bin/true", ["true"]),
    "memory": lambda: bytearray(4 << 30),
}
libc = ctypes.CDLL(None, use_errno=True)
def trace():
    if libc.ptrace(16, os.getppid(), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")
said = {}
for name, attempt in tries.items():
    try:
        attempt()
        said[name] = "done"
    except (OSError, MemoryError) as error:
        said[name] = type(error).__name__
print(json.dumps([failed, said]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("own", "other", "kept", "named")]
    for folder in folders:
        (folder / "file").write_text("x")
    command = [sys.executable, "-c", CODE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_its_own_works(said):
    _, outcome = said
    for name in ("read own", "write kept", "list named", "pair", "import"):
        assert outcome[name] == "done", name
    assert outcome["memory"] == "MemoryError"


def test_what_is_others_is_refused(said):
    failed, outcome = said
    files = ("read other", "write own", "read named", "environment", "program")
    if any("Landlock" in what for what in failed):
        files = ()
    calls = ("tcp", "udp", "trace")
    if any("seccomp" in what for what in failed):
        calls = ()
    for name in (*files, *calls):
        assert outcome[name] == "PermissionError", name


GPUS = """
import os
from serving.functions import jail
failed = jail.enter(jail.code_folders([]), [], gpus=True)
path = f"/proc/self/task/{os.getpid()}/comm"
with open(path, "r+") as comm:  # as CUDA's driver does at its start
    comm.write("named")
print([what for what in failed if "Landlock" in what], open(path).read().strip())
"""


def test_a_process_with_gpus_may_name_its_threads():
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("named\n"), done.stderr


def test_a_process_with_gpus_gets_the_files_that_cuda_computes_with(monkeypatch, tmp_path):
    names = ["nvidia0", "nvidia11", "nvidia-uvm", "nvidiactl"]
    for name in (*names, "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps"):
        (tmp_path / name).touch()
    make = lambda path: tmp_path if path == "/dev" else Path(path)  # noqa: E731
    monkeypatch.setattr(jail, "Path", make)
    rules = jail._rules([], [], [], gpus=True)
    ours = [Path(path).name for path, _ in rules if str(path).startswith(str(tmp_path))]
    assert sorted(ours) == sorted(names)


def test_folders_of_code_hold_no_private_path(monkeypatch):
    odd = types.ModuleType("odd")
    odd.__path__ = 1  # torch.classes answers any name with something that is no list
    monkeypatch.setitem(sys.modules, "odd", odd)
    package = os.path.dirname(jail.__file__)
    root = os.path.dirname(os.path.dirname(package))
    folders = {str(folder) for folder in jail.code_folders([root + "/private"])}
    assert root not in folders
    assert any(package.startswith(folder) for folder in folders)
