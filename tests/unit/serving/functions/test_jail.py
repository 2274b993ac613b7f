"""Calls that the jail of a process allows, and calls that the kernel refuses."""

import ctypes
import errno
import importlib.machinery
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
from support.processes.process_facts import open_files

from serving.functions import jail

CODE = """
import ctypes, json, os, resource, socket, sys
from serving.functions import jail
own, other, kept, named, shared = sys.argv[1:]
files = (f"/etc/{name}" for name in sorted(os.listdir("/etc")) if name not in jail._OF_ETC)
of_machine = next(path for path in files if os.path.isfile(path) and os.access(path, os.R_OK))
failed = jail.enter([*jail.code_folders([other]), own], [kept], [named], memory_bytes=2 << 30)
limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)]
tries = {
    "read own": lambda: open(own + "/file").read(),
    "read other": lambda: open(other + "/file").read(),
    "read machine": lambda: open(of_machine, "rb").read(),
    "read shared": lambda: open(shared).read(),
    "random": lambda: open("/dev/urandom", "rb").read(1),
    "write own": lambda: open(own + "/file", "w"),
    "change own": lambda: open(own + "/file", "r+"),
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
    "raise": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (jail._MAX_FILES + 1,) * 2),
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
    except (OSError, MemoryError, ValueError) as error:
        said[name] = type(error).__name__
said |= {"limits": limits, "oom": open("/proc/self/oom_score_adj").read().strip()}
said["new privileges"] = libc.prctl(39, 0, 0, 0, 0)  # PR_GET_NO_NEW_PRIVS: 1 as they are refused
print(json.dumps([failed, said]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("own", "other", "kept", "named")]
    for folder in folders:
        (folder / "file").write_text("x")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:  # as another process' memory
        command = [sys.executable, "-c", CODE, *map(str, folders), shared.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_its_own_works(said):
    _, outcome = said
    for name in ("read own", "write kept", "list named", "pair", "import", "random"):
        assert outcome[name] == "done", name
    assert outcome["memory"] == "MemoryError"


def test_what_is_others_is_refused(said):
    failed, outcome = said
    files = ("read other", "write own", "read named", "environment", "program")
    files += ("read machine", "read shared", "change own")
    if any("Landlock" in what for what in failed):
        files = ()
    calls = ("tcp", "udp", "trace")
    if any("seccomp" in what for what in failed):
        calls = ()
    for name in (*files, *calls):
        assert outcome[name] == "PermissionError", name


def test_limits_hold_for_good_and_the_kernel_ends_this_process_first(said):
    _, outcome = said
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = jail._MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, jail._MAX_FILES)
    assert outcome["limits"] == [[0, 0], [most, most]]
    assert outcome["oom"] == "1000"
    assert outcome["new privileges"] == 1
    if os.getuid():  # root may raise its limits
        assert outcome["raise"] == "ValueError"


GRAMMAR = """
import os, subprocess, sys
from serving.api.structured_outputs import StructuredOutputs
from serving.functions import jail
from serving.text.structured.checker import Checker
from serving.text.structured.vocabulary import Vocabulary
vocabulary = Vocabulary([bytes([n]) for n in range(256)] + [b"<end>"], [256], [256])
jail.enter(jail.code_folders([sys.argv[1]]), [], programs=jail.interpreter())
checker = Checker(vocabulary, 60.0)
print(checker.check(StructuredOutputs(regex="[ab]+")).text != "")
lists = ([f"{n:08}" for n in range(count * 10**4, count * 10001)] for count in (9000, 5000, 4000))
print(all(checker.check(StructuredOutputs(choice=words)).bytes > 1 << 19 for words in lists))
for command in (["/bin/true"], [sys.executable, "-c", "open('/etc/fstab').read()"]):
    try:
        print(subprocess.run(command, stderr=subprocess.DEVNULL).returncode)
    except PermissionError:
        print("refused")
from serving.text.structured import check_process
before = check_process.shut_others_out()
sys.stdout.flush()
if os.fork() == 0:  # as the new process, which is not told its memory
    print(before, check_process.shut_others_out(), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_process_that_may_start_its_interpreter_checks_grammars_and_starts_nothing_else(said):
    """The new process is in the jail too. No folder above the packages may be looked into.

    A grammar's memory counts after a larger one too.
    """
    root = Path(jail.__file__).parents[2]
    command = [sys.executable, "-c", GRAMMAR, str(root / "private" / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if not any("Landlock" in what for what in said[0]):
        assert done.stdout.split() == ["True", "True", "refused", "1", "True", "False"]


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
    assert ("/dev/nvidia-caps", jail._READ | jail._LIST) in rules
    assert dict(rules)[tmp_path / "nvidia0"] == jail._READ | jail._WRITE | jail._IOCTL


def test_rules_let_nothing_be_executed_and_open_names_and_certificates_only_for_a_network():
    rules = dict(jail._rules([], [], [], gpus=False))
    assert "/etc/localtime" in rules
    rights = [*rules.values(), dict(jail._rules([], ["kept"], [], False))["kept"]]
    assert not any(allowed & jail._EXECUTE for allowed in rights)
    of_network = {f"/etc/{name}" for name in jail._OF_NETWORK}
    assert not of_network & rules.keys()
    assert of_network < dict(jail._rules([], [], [], gpus=False, network=True)).keys()


def test_the_current_folder_is_no_folder_of_code_but_for_packages_in_it(monkeypatch, tmp_path):
    """`python -m` looks for modules there, and tenants' adapters may lie there."""
    package = types.ModuleType("some_package")
    package.__spec__ = importlib.machinery.ModuleSpec("some_package", None, is_package=True)
    package.__spec__.submodule_search_locations = [str(tmp_path / "some_package")]
    monkeypatch.setitem(sys.modules, "some_package", package)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    jail._folders_of.cache_clear()
    try:
        folders = {str(folder) for folder in jail.code_folders([])}
    finally:
        jail._folders_of.cache_clear()
    here = os.path.realpath(tmp_path)
    assert here not in folders
    assert f"{here}/some_package" in folders


def test_folders_of_code_hold_no_private_path(monkeypatch):
    odd = types.ModuleType("odd")
    odd.__path__ = 1  # torch.classes answers any name with something that is no list
    monkeypatch.setitem(sys.modules, "odd", odd)
    monkeypatch.chdir("/")  # the current folder is none of code for another reason
    package = os.path.dirname(jail.__file__)
    root = os.path.dirname(os.path.dirname(package))
    monkeypatch.syspath_prepend(root)
    jail._folders_of.cache_clear()
    try:
        assert root in map(str, jail.code_folders([]))
        folders = {str(folder) for folder in jail.code_folders([root + "/private"])}
    finally:
        jail._folders_of.cache_clear()
    assert root not in folders
    assert any(package.startswith(folder) for folder in folders)


class Kernel:
    """A libc that notes calls, and a kernel that has some Landlock and seccomp or refuses them."""

    def __init__(self, version=6, refuses=()):
        self.version, self.refuses, self.calls = version, refuses, []
        self.syscall = lambda number, *given: self.call(number, given)
        self.prctl = lambda option, *given: self.call(option, given)

    def call(self, number, given):
        if number == jail._CREATE and given[0] is None:
            return self.version
        data = given[0] if number == jail._CREATE else None
        self.calls.append((number, data))
        if number in self.refuses:
            ctypes.set_errno(errno.EPERM)
            return -1
        return os.open("/dev/null", os.O_RDONLY) if number == jail._CREATE else 0


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (1, [(1 << 13) - 1]),
        (4, [(1 << 15) - 1, jail._TCP]),
        (6, [jail._ALL, jail._TCP, jail._SCOPES]),
    ],
)
def test_a_ruleset_asks_for_all_that_the_kernel_of_this_version_has(tmp_path, version, fields):
    kernel = Kernel(version)
    (tmp_path / "file").write_text("x")
    rules = [(tmp_path, jail._READ), (tmp_path / "file", jail._ALL), (tmp_path / "none", 1)]
    jail._landlock(kernel, rules, False)
    (made, data), *others = kernel.calls
    assert struct.unpack(f"<{len(fields)}Q", data) == tuple(fields)
    assert made == jail._CREATE
    # What is not there needs no rule.
    assert [number for number, _ in others] == [jail._ADD, jail._ADD, jail._RESTRICT]
    if version >= 4:
        open_to_all = Kernel(version)
        jail._landlock(open_to_all, [], True)
        assert struct.unpack(f"<{len(fields)}Q", open_to_all.calls[0][1])[1] == 0


@pytest.mark.parametrize("refused", ["version", jail._CREATE, jail._ADD, jail._RESTRICT])
def test_what_a_kernel_refuses_is_an_error_and_leaves_no_descriptor(tmp_path, refused):
    ctypes.set_errno(errno.EPERM)
    kernel = Kernel(0) if refused == "version" else Kernel(refuses=(refused,))
    before = open_files()
    with pytest.raises(OSError, match="not permitted"):
        jail._landlock(kernel, [(tmp_path, jail._READ)], False)
    assert open_files() <= before


def filtered(machine, network, monkeypatch):
    """Return the filter of a machine as a function of its architecture, a call and an argument."""
    made = []

    def prctl(option, mode, head, *_):
        size, address = struct.unpack("<H6xQ", head)
        made.extend(struct.iter_unpack("<HBBI", ctypes.string_at(address, 8 * size)))
        return 0

    monkeypatch.setattr(jail.platform, "machine", lambda: machine)
    jail._seccomp(types.SimpleNamespace(prctl=prctl), network)

    def verdict(arch: int, number: int, argument: int = 0) -> str:
        data, held, at = struct.pack("<IIQQ", number, arch, 0, argument), 0, 0
        while True:
            code, then, other, value = made[at]
            at += 1
            if code == 0x20:
                (held,) = struct.unpack_from("<I", data, value)
            elif code == 0x06:
                return {0x7FFF0000: "allowed", 0x00050001: "refused"}[value]
            else:
                at += then if {0x15: held == value, 0x35: held >= value}[code] else other

    return verdict


# By the kernel's tables of calls, in this order: read, execve, socket, ptrace, process_vm_readv,
# process_vm_writev, kcmp, pidfd_getfd, io_uring_setup.
NUMBERS = {"x86_64": (0xC000003E, (0, 59, 41, 101, 310, 311, 312, 438, 425))}
NUMBERS["aarch64"] = (0xC00000B7, (63, 221, 198, 117, 270, 271, 272, 438, 425))
UNIX, *OTHERS = 1, 2, 10, 16, 17, 38, 40, 44  # families: INET, INET6, NETLINK, PACKET, ALG, VSOCK


@pytest.mark.parametrize("machine", NUMBERS)
def test_calls_that_reach_out_of_a_process_are_refused_by_whatever_number(machine, monkeypatch):
    arch, (read, execve, socket, *others) = NUMBERS[machine]
    verdict = filtered(machine, False, monkeypatch)
    open_to_all = filtered(machine, True, monkeypatch)
    for one in (verdict, open_to_all):
        assert {one(arch, read), one(arch, execve), one(arch, socket, UNIX)} == {"allowed"}
        assert {one(arch, number) for number in others} == {"refused"}
        assert one(0x40000003, read) == "refused"  # the table of 32 bits, which numbers others
        assert one(arch, (1 << 30) + read) == "refused"
    assert {verdict(arch, socket, family) for family in (0, *OTHERS)} == {"refused"}
    assert {open_to_all(arch, socket, family) for family in OTHERS} == {"allowed"}


def test_a_filter_of_calls_is_for_known_machines(monkeypatch):
    with pytest.raises(OSError, match="not permitted"):
        jail._seccomp(Kernel(refuses=(jail._SET_SECCOMP,)), False)
    monkeypatch.setattr(jail.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="unknown on riscv64"):
        jail._seccomp(Kernel(), False)


def test_limits_and_steps_that_fail_are_named_and_the_process_runs_without_them(monkeypatch):
    kernel = Kernel(0)

    def refuse(kind, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(jail.ctypes, "CDLL", lambda *given, **more: kernel)
    monkeypatch.setattr(jail.resource, "setrlimit", refuse)
    monkeypatch.setattr(jail.Path, "write_text", lambda path, text: len(text))
    kernel.syscall = type("Call", (), {"__call__": lambda self, *given: 0})()
    monkeypatch.setattr(jail.platform, "machine", lambda: "riscv64")
    failed = jail.enter([], [], memory_bytes=1 << 40)
    limits = [jail.resource.RLIMIT_CORE, jail.resource.RLIMIT_NOFILE, jail.resource.RLIMIT_DATA]
    assert failed[:3] == [f"limit {kind}: not allowed to raise maximum limit" for kind in limits]
    assert failed[3].startswith("Landlock (files, signals): ")
    assert failed[4].startswith("seccomp (sockets, other processes): numbers of system calls")


@pytest.mark.parametrize(
    ("device", "asked", "isolation", "order", "limits"),
    [
        ("cpu", "", "process", {"programs": {"writes": False}}, {"memory_bytes": 7, "gpus": False}),
        (  # compilers need more than a function
            "cpu",
            "",
            "process",
            {"programs": {"writes": True}},
            {"memory_bytes": None, "gpus": False},
        ),
        ("cpu", "", "server", {"programs": {"writes": True}}, {"memory_bytes": 7, "gpus": False}),
        ("cpu", "", "none", {"programs": None}, None),
        ("gpu", "0", "process", {"programs": {"writes": False}}, None),
        (
            "gpu",
            "",
            "process",
            {"programs": {"writes": False}},
            {"memory_bytes": None, "gpus": True},
        ),
        ("gpu", "", "process", {"programs": {"writes": True}}, None),  # XLA's assembler starts
        ("gpu", "", "process", {"programs": {"writes": False}, "guard": {"every_s": 1}}, None),
    ],
)
def test_which_processes_are_in_a_jail(device, asked, isolation, order, limits, monkeypatch):
    monkeypatch.setenv(jail.GPU_JAIL, asked)
    assert jail.limits(order, isolation, device, 7) == limits
