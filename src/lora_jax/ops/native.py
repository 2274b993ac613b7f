"""Compiles a library of XLA custom calls at first use and keeps it in the user's cache."""

import atexit
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from lora_jax import own_files
from lora_jax.ops import dispatch

log = logging.getLogger(__name__)

CPP_COMPILERS = ("g++", "clang++", "c++")
CPP_UNIT = ".cc"
CPP_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-DNDEBUG", "-w")  # and -march
# GCC 12 tunes AVX2 code for the CPU that `-march` names, and some of its tunings are slow. On Zen 3
# 64 rows times a matrix of 2048 x 768 took with Haswell's 0.79 to 0.84 of the time of znver3's, and
# in bfloat16 0.89 of the generic one's and 0.57 of skylake's, with equal bits (bench/README.md).
# With SSE alone Haswell's is up to 1.5 times as slow as the generic one: there the compiler's
# choice stands.
AVX2_TUNING = ("-mtune=haswell",)
# GCC 12 takes AMD Zen 5 for Zen 3, whose tuning moves a loop's addresses through vector registers.
# Products of 4-bit codes took 0.8 to 1.0 of the time with Ice Lake's, plain ones as long.
AVX512_TUNING = ("-mtune=icelake-server",)


class BuildError(RuntimeError):
    """The library could not be compiled or loaded; the message says why."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A compiler of this machine, and the flags that its own files need."""

    path: str
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Library:
    """Sources that become one shared library, and the custom calls in it."""

    name: str  # of the file in the cache
    title: str  # in messages
    compilers: tuple[Compiler, ...]  # the preferred one first; empty where the machine has none
    wanted: str  # what to install then
    flags: tuple[str, ...]
    sources: tuple[Path, ...]  # headers too, in a fixed order
    unit: str  # suffix of the files that are compiled
    targets: tuple[str, ...]  # custom calls, by the names of their symbols
    platform: str  # of XLA
    includes: tuple[Path, ...] = ()  # folders of `sources`, searched for headers; not in the key
    machine: str = ""  # what else the result depends on
    stateful: tuple[str, ...] = ()  # of the custom calls: each place in a program keeps a state
    state: str = ""  # the symbol that makes one; its type's have _id and _info behind that name
    ready: Path | None = None  # a compiled file that is taken as it is

    def key(self, compiler: Compiler) -> str:
        """Return a digest of everything that the compiled library depends on.

        Where the sources lie is not in it: a tree that was moved takes the library of before.
        """
        command = [compiler.path, "--version"]
        version = subprocess.run(command, capture_output=True, check=False).stdout
        digest = hashlib.sha256()
        inputs = (jax.__version__, jaxlib.version.__version__, *self.flags, self.machine)
        for part in (
            *(s.encode() for s in inputs),
            version,
            *(p.read_bytes() for p in self.sources),
        ):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:24]

    @property
    def units(self) -> tuple[Path, ...]:
        """The files that are compiled."""
        return tuple(path for path in self.sources if path.suffix == self.unit)

    def command(
        self, compiler: Compiler, library: Path, *more: str, units: Iterable[Path] | None = None
    ) -> list[str]:
        """Return the command that makes `library` of its units, or of what was made of them."""
        includes = [f"-I{folder}" for folder in (*self.includes, jax.ffi.include_dir())]
        flags = (*self.flags, *compiler.flags, *more)
        files = map(str, self.units if units is None else units)
        return [compiler.path, *flags, *includes, *files, "-o", str(library)]

    def build(self, folder: Path) -> Path:
        """Return the compiled library in `folder`, compiling it if it is not there, or damaged.

        One that is ready is taken where it lies.

        Where the folder cannot be used, or other users may write it, a warning says so and the
        library is compiled in a folder of this process.

        The first compiler that compiles the library serves: wheels of unequal versions may not.

        Raises:
            BuildError: there is no compiler, each fails, or nothing can be written.
        """
        if self.ready is not None:
            return self.ready
        if not self.compilers:
            raise BuildError(f"no {self.wanted} found; install one")
        try:
            return self._built_in(own_files.own_folder(folder))
        except OSError as error:
            _warn_once(f"The {self.title} are compiled anew at each start: {error}")
        try:
            return self._built_in(own_files.own_folder(_private_folder()))
        except OSError as error:
            raise BuildError(f"cannot write the kernel cache: {error}") from error

    def _built_in(self, folder: Path) -> Path:
        """Return the library in a folder that is this user's, by the first compiler that works."""
        files = [folder / f"{self.name}-{self.key(c)}.so" for c in self.compilers]
        if (kept := next((file for file in files if own_files.is_whole(file)), None)) is not None:
            return kept
        failures = []
        for compiler, file in zip(self.compilers, files, strict=True):
            try:
                waiting = f"Waiting for another process that compiles the {self.title}."
                with locked(file.with_suffix(".lock"), waiting):
                    if not own_files.is_whole(file):
                        if file.exists():
                            log.warning("%s is damaged, it is compiled again", file)
                        compile_library(self, compiler, file)
                return file
            except BuildError as error:
                failures.append(str(error))
                if len(failures) < len(self.compilers):
                    log.warning("trying the next compiler: %s", error)
        raise BuildError("; ".join(failures))

    def load(self, folder: Path) -> ctypes.CDLL:
        """Return the library, built if need be, with its custom calls given to XLA.

        Raises:
            BuildError: it cannot be built, or what was built cannot be loaded.
        """
        try:
            library = ctypes.CDLL(str(self.build(folder)))
            handlers = {name: jax.ffi.pycapsule(getattr(library, name)) for name in self.targets}
            if self.stateful:
                self._register_state(library)
                make = jax.ffi.pycapsule(getattr(library, self.state))
                for name in self.stateful:
                    handlers[name] = {"instantiate": make, "execute": handlers[name]}
        except (OSError, AttributeError) as error:
            raise BuildError(f"the {self.title} cannot be loaded: {error}") from error
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=self.platform)
        return library

    def _register_state(self, library: ctypes.CDLL) -> None:
        """Tell XLA the type of the state: before the calls, which name it."""

        def part(name: str) -> Any:
            find = getattr(library, f"{self.state}_{name}")
            find.restype = ctypes.c_void_p
            return jax.ffi.pycapsule(find())

        jax.ffi.register_ffi_type(
            self.state, {"type_id": part("id"), "type_info": part("info")}, platform=self.platform
        )

    def load_or_warn(self, folder: Path, log: logging.Logger, advice: str = "") -> bool:
        """Return whether `load` succeeds; where not, `log` warns that ops run as portable JAX.

        `advice` is what else may be done about it.
        """
        try:
            self.load(folder)
        except BuildError as error:
            text = "%s are off, ops run as plain JAX, slower to compile and to run: %s%s"
            log.warning(text, self.title, error, advice)
            return False
        return True


class Calls:
    """A library's C calls by their short names; each lets go of Python's lock."""

    def __init__(self, library: ctypes.CDLL, prefix: str, signatures: dict[str, tuple]):
        """`signatures` are results and arguments by name; in the library, `prefix` goes before."""
        self._prefix = prefix
        for name, (result, *arguments) in signatures.items():
            call = getattr(library, prefix + name)
            call.restype, call.argtypes = result, arguments
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Callable:
        raise AttributeError(f"the library has no call {self._prefix + name!r}")


def compile_library(what: Library, compiler: Compiler, library: Path) -> None:
    """Compile into a temporary name, then publish: a process loads a whole library or none.

    Raises BuildError where the compiler fails, OSError where the folder's disk is full.
    """
    log.info("Compiling the %s with %s, once for this machine.", what.title, compiler.path)
    _remove_parts(library)
    start = time.perf_counter()
    part = library.with_suffix(f".{os.getpid()}.part")
    run = functools.partial(_run, compiler, library.parent)
    try:
        if what.unit == CPP_UNIT and len(what.units) > 1:
            _compile_side_by_side(what, compiler, part, run)
        else:  # one, or a compiler that has threads of its own
            run(what.command(compiler, part))
        own_files.publish(part, library)
    finally:
        part.unlink(missing_ok=True)
    log.info("Compiled the %s in %.1f s: %s.", what.title, time.perf_counter() - start, library)


def _remove_parts(library: Path) -> None:
    """Remove what a process left behind that was killed while it compiled this library."""
    for left in library.parent.glob(f"{library.stem}.*.part"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _compile_side_by_side(
    what: Library, compiler: Compiler, library: Path, run: Callable[[list[str]], None]
) -> None:
    """Compile each unit by a process of its own, the largest first, and link them."""
    units = sorted(what.units, key=lambda unit: -unit.stat().st_size)
    begin = f"{library.stem}."
    with tempfile.TemporaryDirectory(".part", begin, library.parent) as folder:
        objects = [Path(folder, f"{unit.stem}.o") for unit in units]
        commands = [
            what.command(compiler, made, "-c", units=[unit])
            for unit, made in zip(units, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(run, commands))
        run(what.command(compiler, library, units=objects))


def _run(compiler: Compiler, folder: Path, command: list[str]) -> None:
    """Run a compiler's command that writes to a folder; see compile_library for what it raises."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        output = (result.stderr or result.stdout).strip()[:2000]
        if (full := os.strerror(errno.ENOSPC)) in output:  # no mistake of the compiler
            raise OSError(errno.ENOSPC, full, str(folder))
        raise BuildError(f"{compiler.path} failed: {output}")


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Hold an exclusive lock between processes while the block runs.

    Where another process holds it, the log says `waiting`.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s", waiting)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning at its first call: programs and their callers look for the library in turn."""
    log.warning("%s", text)


@functools.cache
def _private_folder() -> Path:
    """Return a folder of mode 0700 that ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="lora-jax-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cpp_compilers() -> tuple[Compiler, ...]:
    """Return the C++ compilers on the path, the preferred one first."""
    return tuple(Compiler(path) for name in CPP_COMPILERS if (path := shutil.which(name)))


def cpp_sources(folder: Path) -> tuple[Path, ...]:
    """Return the C++ files of a folder in a fixed order."""
    return tuple(sorted(p for p in folder.iterdir() if p.suffix in (".cc", ".h")))


def cpu_features() -> frozenset[str]:
    """Return the features of this machine's CPU; empty where Linux does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def cpu_name() -> str:
    """Return what -march=native depends on: the architecture and the CPU's features."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = ("model name", "flags", "Features")
    features = sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join([platform.machine(), platform.processor(), *features])


def march_flags() -> tuple[str, ...]:
    """Return the compiler's options for `dispatch.march()`: the CPU, and how to tune for it."""
    march = dispatch.march()
    return (f"-march={march}", *_tuning(march))


def _tuning(march: str) -> tuple[str, ...]:
    """Return how to tune code for `march` that uses AVX2 or AVX-512, as far as the name tells.

    The name of a CPU asks for the tuning of that CPU.
    """
    if march == "native" and platform.machine() == "x86_64":
        features = cpu_features()
        if "avx512f" in features:
            return AVX512_TUNING
        return AVX2_TUNING if "avx2" in features else ()
    return AVX2_TUNING if march == "x86-64-v3" else ()


def cpp_library(name: str, title: str, folder: Path, targets: tuple[str, ...]) -> Library:
    """Return a library for XLA's CPU platform, of all C++ files of a folder."""
    return Library(
        name=name,
        title=title,
        compilers=cpp_compilers(),
        wanted=f"C++ compiler ({', '.join(CPP_COMPILERS)})",
        flags=(*CPP_FLAGS, *march_flags()),
        sources=cpp_sources(folder),
        unit=CPP_UNIT,
        targets=targets,
        platform="cpu",
        machine=cpu_name(),
    )
