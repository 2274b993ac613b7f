"""Limits of one process: files, network, signals, resources. No jax.

What the kernel offers without privileges: Landlock for files, TCP and signals, a seccomp filter for
sockets and for reaching into other processes, resource limits. What a kernel lacks is named, and
the process runs without it.
"""

import contextlib
import ctypes
import functools
import os
import platform
import re
import resource
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GPU_JAIL = "LORA_JAX_GPU_JAIL"  # 0: functions on a GPU are in no jail
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls of Landlock, on every machine
_BENEATH, _VERSION_ASKED = 1, 1
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_ALL = (1 << 16) - 1  # of version 5
_OF_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE  # what may be named of what is no folder
_TCP = 0b11  # bind, connect: from version 4
_SCOPES = 0b11  # abstract sockets, signals: from version 6
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_MAX_FILES = 4096
# Numbers of calls: socket, ptrace, process_vm_readv, process_vm_writev, kcmp, and those of all
# machines: pidfd_getfd and io_uring_setup, whose rings make sockets without the first one.
_CALLS = {"x86_64": (0xC000003E, (41, 101, 310, 311, 312, 438, 425))}
_CALLS["aarch64"] = 0xC00000B7, (198, 117, 270, 271, 272, 438, 425)
_OTHER_NUMBERS = 1 << 30  # from here on: the same calls, for programs of 32 bits
_SYSTEM = ("/usr", "/lib", "/lib64", "/sys", "/proc/self", "/proc/cpuinfo", "/proc/meminfo")
_SYSTEM += ("/proc/stat", "/proc/sys")
# Not all of /etc, which holds keys of the machine, nor of /dev, where root could read its disks.
_OF_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "os-release")
_OF_ETC += ("passwd", "group", "nsswitch.conf", "ssl/openssl.cnf", "pki/tls/openssl.cnf")
_OF_ETC += ("crypto-policies", "mime.types")
_OF_NETWORK = ("hosts", "host.conf", "resolv.conf", "gai.conf", "services", "ssl/certs")
_OF_NETWORK += ("pki/tls/certs", "pki/tls/cert.pem", "pki/ca-trust/extracted")
_OF_DEV = "zero", "full", "random", "urandom"
# What CUDA's driver reads beside it, and the threads of this process, which it gives names.
_OF_DRIVER = ("/proc/devices", "/proc/modules", "/proc/driver/nvidia", "/proc/driver/nvidia-uvm")
_THREADS = "/proc/self/task"
_OF_CUDA = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm")  # not its tools and display
_RIGHTS_OF_CUDA = "nvidia-caps"  # to use a part of a GPU, for reading


def limits(
    order: dict[str, Any], isolation: str, device: str, memory_bytes: int | None
) -> dict[str, Any] | None:
    """Return the limits of the process of an agent's order; None: it is in no jail.

    In the jail of a GPU nothing compiles, as XLA's assembler is a program. So neither the process
    that makes programs is in it nor the guard; both have no adapter and no call of a tenant. On a
    CPU the former may hold more than a function, as compilers need it. The process of all adapters
    is in none either: it reads folders that it is told of later.
    """
    if isolation == "none" or order.get("shared"):
        return None
    makes = (order.get("programs") or {}).get("writes")
    if device == "cpu":
        bound = None if makes and isolation == "process" else memory_bytes
        return {"memory_bytes": bound, "gpus": False}
    if makes or order.get("guard") or not stops_compiling(device):
        return None
    return {"memory_bytes": None, "gpus": True}


def bound_of(limits: dict[str, Any] | None) -> str:
    """Return what to add to the error of a process that ended: its bound of memory, if any."""
    num_bytes = None if limits is None else limits["memory_bytes"]
    if num_bytes is None:
        return ""
    return (
        f" It may hold {num_bytes >> 20} MiB (--functions-memory-bytes, memory_bytes): if that is "
        "too little for one function, raise it."
    )


def stops_compiling(device: str) -> bool:
    """Return whether functions on the device compile nothing: they do not in a GPU's jail."""
    return device != "cpu" and os.environ.get(GPU_JAIL) != "0"


def enter(
    reads: Iterable[str | Path],
    writes: Iterable[str | Path],
    lists: Iterable[str | Path] = (),
    *,
    memory_bytes: int | None = None,
    network: bool = False,
    gpus: bool = False,
    programs: Iterable[str | Path] = (),
) -> list[str]:
    """Bind this process, which has one thread, for good; return what the kernel could not do.

    `reads` and `writes` are files and folders with all below them, beside the system's own; of
    `lists` names may be read. Nothing else can be opened, and nothing executed but `programs`,
    which stay in the jail. `memory_bytes` bounds the process' own memory. With `network` internet
    sockets are left, with `gpus` all NVIDIA devices for computing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = _limit(memory_bytes)
    rules = _rules(reads, writes, lists, gpus, network)
    rules += [(path, _READ | _EXECUTE) for path in programs]
    steps = {
        "Landlock (files, signals)": lambda: _landlock(libc, rules, network),
        "seccomp (sockets, other processes)": lambda: _seccomp(libc, network),
    }
    for name, step in steps.items():
        try:
            step()
        except OSError as error:
            failed.append(f"{name}: {error.strerror}")
    return failed


def interpreter() -> list[str]:
    """Return the files that the kernel executes to start this process' interpreter again."""
    maps = Path("/proc/self/maps").read_text()
    loaders = re.findall(r"/\S*/ld-\S+$", maps, re.MULTILINE)
    return sorted({os.path.realpath(sys.executable), *loaders})


def code_folders(without: Iterable[str | Path]) -> list[Path]:
    """Return folders of the interpreter and its modules, none below another one.

    Of one that holds a path of `without`, such as a checkout, the packages that are imported. So
    it is with the current folder, where `python -m` looks for modules too: tenants' files may be
    there.
    """
    private = [f"{os.path.realpath(path)}/" for path in without]
    kept: list[str] = []
    for folder in _folders_of(len(sys.modules)):
        below = bool(kept) and f"{folder}/".startswith(f"{kept[-1]}/")
        if not below and not any(path.startswith(f"{folder}/") for path in private):
            kept.append(folder)
    return [Path(folder) for folder in kept]


@functools.lru_cache(maxsize=1)  # a fork of the zygote has imported nothing more
def _folders_of(num_modules: int) -> list[str]:
    """Return all folders of code, links followed, in an order in which inner ones come later."""
    here = os.path.realpath(os.curdir)
    places = (place for place in sys.path if os.path.isdir(place))
    found = {sys.prefix, sys.base_prefix}
    found |= {place for place in places if os.path.realpath(place) != here}
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)  # `__path__` of torch.classes is no list
        places = getattr(spec, "submodule_search_locations", None) or ()
        found |= {str(place) for place in list(places)[:1]}
    real = {os.path.realpath(folder) for folder in found}
    return sorted(real, key=lambda folder: f"{folder}/")


def _limit(memory_bytes: int | None) -> list[str]:
    failed = []
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _MAX_FILES}
    if memory_bytes is not None:
        limits[resource.RLIMIT_DATA] = memory_bytes
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (least, least))
        except (OSError, ValueError) as error:
            failed.append(f"limit {kind}: {error}")
    with contextlib.suppress(OSError):  # the kernel ends this one first where memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    return failed


def _rules(reads, writes, lists, gpus: bool, network: bool = False) -> list[tuple[str | Path, int]]:
    """Return paths with what is allowed below them."""
    etc = [f"/etc/{name}" for name in (*_OF_ETC, *(_OF_NETWORK if network else ()))]
    dev = [f"/dev/{name}" for name in _OF_DEV]
    rules = [(path, _READ | _LIST) for path in (*_SYSTEM, *etc, *dev, *reads)]
    rules += [(path, _ALL & ~_EXECUTE) for path in (*writes, "/dev/null")]
    rules += [(path, _LIST) for path in ("/dev", *lists)]
    if gpus:
        rules += [(path, _READ | _LIST) for path in _OF_DRIVER]
        rules.append((f"/dev/{_RIGHTS_OF_CUDA}", _READ | _LIST))
        devices = (path for name in _OF_CUDA for path in Path("/dev").glob(name))
        rules += [(path, _READ | _WRITE | _IOCTL) for path in devices]
        rules += [(_THREADS, _WRITE | _TRUNCATE)]
    return rules


def _landlock(libc, rules: list[tuple[str | Path, int]], network: bool) -> None:
    version = libc.syscall(_CREATE, None, 0, _VERSION_ASKED)
    if version < 1:
        _raise()
    handled = _OF_VERSION.get(version, _ALL)
    fields = [handled]
    if version >= 4:
        fields.append(0 if network else _TCP)
    if version >= 6:
        fields.append(_SCOPES)
    data = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = libc.syscall(_CREATE, data, len(data), 0)
    if ruleset < 0:
        _raise()
    try:
        for path, access in rules:
            _allow(libc, ruleset, path, access & handled)
        if libc.syscall(_RESTRICT, ruleset, 0) < 0:
            _raise()
    finally:
        os.close(ruleset)


def _allow(libc, ruleset: int, path: str | Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # nothing that could be opened
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES | _IOCTL
        rule = ctypes.create_string_buffer(struct.pack("<Qi", access, descriptor), 12)
        if libc.syscall(_ADD, ruleset, _BENEATH, rule, 0) < 0:
            _raise()
    finally:
        os.close(descriptor)


def _seccomp(libc, network: bool) -> None:
    """Refuse calls that reach into other processes, and sockets but those of this machine."""
    machine = platform.machine()
    if machine not in _CALLS:
        raise OSError(0, f"numbers of system calls are unknown on {machine}")
    arch, (socket_call, *others) = _CALLS[machine]
    load, equal, least, return_ = 0x20, 0x15, 0x35, 0x06  # of classic BPF
    allow, refuse = 0x7FFF0000, 0x00050000 | 1  # EPERM
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (return_, 0, 0, refuse), (load, 0, 0, 0)]
    program += [(least, 0, 1, _OTHER_NUMBERS), (return_, 0, 0, refuse)]
    for number in others:
        program += [(equal, 0, 1, number), (return_, 0, 0, refuse)]
    if not network:  # AF_UNIX alone
        program += [(equal, 0, 3, socket_call), (load, 0, 0, 16), (equal, 1, 0, 1)]
        program += [(return_, 0, 0, refuse)]
    program.append((return_, 0, 0, allow))
    code = b"".join(struct.pack("<HBBI", *step) for step in program)
    held = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("<H6xQ", len(program), ctypes.addressof(held))
    if libc.prctl(_SET_SECCOMP, _FILTER, head, 0, 0) < 0:
        _raise()


def _raise() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
