"""Compiled steps in files: a process that runs the same steps again neither traces nor lowers them.

jax's own cache keeps what the compiler made; to find it, jax traces and lowers the program first,
which costs more than compiling did. A file here is found by what the program is made from: the
code, the settings, the sizes, and the kinds of its arguments.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered, Traced
from jaxlib import xla_client  # jax has no public face of what it makes its own keys of

from lora_jax.ops import dispatch, native
from lora_jax.ops.cpu.build import available
from serving.runtime.code_files import code_digest
from serving.runtime.program_cache import executable_in
from serving.runtime.program_files import ProgramFiles, step_keys

logger = logging.getLogger(__name__)

_LIBRARIES = "jax", "jaxlib", "flax", "numpy"
_WHEELS = "jax_cuda", "nvidia_"  # beginnings of their names: plugins, cuDNN, ptxas and others
_READERS = max(1, min(2, (os.cpu_count() or 1) // 2))  # beside the thread that needs the step
_SETTINGS = "JAX_", "XLA_", "LORA_JAX_"  # beginnings of names of environment variables
# Where files are kept. A folder that is moved, or comes with a container, has the same programs.
_FOLDERS = frozenset({"LORA_JAX_CACHE", "JAX_COMPILATION_CACHE_DIR", "jax_compilation_cache_dir"})


OF_GPU = ("jax.experimental.pallas.mosaic_gpu",)  # imports of programs with Mosaic's kernels

KernelChoices = dict[str, list[dict[str, Any]]]  # as dispatch.table gives them


class NotKept(LookupError):
    """There is no file of a step that this process is to read, not to make."""


@dataclasses.dataclass(frozen=True)
class KeptSteps:
    """Files of compiled steps, and the parts of their key that all steps share."""

    files: ProgramFiles
    programs: ProgramFiles  # jax's: XLA cannot write once more what was read from there
    identity: str
    anew: bool = False  # compile what jax has once more, so that it is kept
    lazy: bool = False  # an engine is ready when the first one is read

    def keep(self, name: str, jitted: Any, *facts: Any) -> "KeptJit":
        """Return the jitted function, with its programs kept; `facts` say what it closes over."""
        return KeptJit(jitted, self, f"{self.identity} {name} {facts}")


class KeptJit:
    """Called and lowered as the jitted function is, whose last argument is static: trees."""

    def __init__(self, jitted: Any, steps: KeptSteps, identity: str):
        self._jitted, self._steps, self._identity = jitted, steps, identity
        # By static arguments, then by what the others look like.
        self._made: dict[tuple[Any, ...], dict[tuple[Any, ...], KeptProgram]] = {}
        # Of the last call where no other program has its static arguments: trees, others, program.
        self._last: tuple[Any, dict[str, Any], Compiled] | None = None
        self._choices: dict[str, KernelChoices] = {}  # by key: jax traces a program once
        self._jax_read: set[str] = set()  # keys of programs that jax has read from its own files

    def lower(self, *arguments: Any, **static: Any) -> "KeptProgram":
        """Return the program for these arguments; its `compile` reads it where it is kept."""
        return self.trace(*arguments, **static).lower()

    def trace(self, *arguments: Any, **static: Any) -> "KeptProgram":
        """Return the program for these arguments, traced unless it is kept; `lower` is next."""
        *given, trees = arguments
        called = trees, *static.values()
        leaves = jax.tree.leaves(given)
        kinds = [(a.shape, str(a.dtype), getattr(a, "weak_type", False)) for a in leaves]
        text = f"{self._identity} {called} {jax.tree.structure(given)} {kinds}"
        key = hashlib.sha256(text.encode()).hexdigest()
        trace = functools.partial(self._trace, key, *arguments, **static)
        program = KeptProgram(trace, self._steps, key, self._jax_read)
        self._made.setdefault(called, {})[_shapes(given)] = program
        self._last = None
        return program

    def close(self) -> None:
        """Let go of all programs, and of those that are not read yet; no call follows."""
        for programs in self._made.values():
            for program in programs.values():
                program.give_up()
        self._made.clear()
        self._last = None

    def _trace(self, key: str, *arguments: Any, **static: Any) -> tuple[Traced, KernelChoices]:
        """Return a program, ready to lower, and the kernels that its own trace chose."""
        with dispatch.noted() as choices:
            traced = self._jitted.trace(*arguments, **static)
        chosen = self._choices[key] = choices.table() or self._choices.get(key, {})
        return traced, chosen

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        *given, trees = arguments
        last = self._last
        if last is not None and last[0] is trees and last[1] == static:
            return last[2](*given)
        programs = self._made.get((trees, *static.values()), {})
        if len(programs) == 1:
            (program,) = programs.values()
            self._last = trees, static, program.compiled
        else:
            program = programs.get(_shapes(given))
        return self._jitted(*arguments, **static) if program is None else program.compiled(*given)


def _shapes(given: list[Any]) -> tuple[Any, ...]:
    """Return the shapes of the last argument: weights, which come before, are always the same."""
    return tuple(a.shape for a in jax.tree.leaves(given[-1]))


class KeptProgram:
    """A program that is read from its file, or traced, lowered, compiled and written to it."""

    def __init__(
        self,
        trace: Callable[[], tuple[Traced, KernelChoices]],
        steps: KeptSteps,
        key: str,
        jax_read: set[str],
    ):
        self._steps, self._key, self._jax_read = steps, key, jax_read
        used.append(key)
        self._ahead = _AHEAD.pop(key, None)
        found = _found(steps.files, key) if self._ahead is None else self._ahead.found.result()
        self._kept = None if found is None else found[1]
        if found is not None:
            dispatch.remember(found[0])
        if self._kept is None and steps.files.demands:
            raise NotKept(f"step {key} is not kept in {steps.files.folder}")
        # Until it is compiled: the arguments that it is lowered for are the engine's own arrays.
        self._trace: Callable[[], tuple[Traced, KernelChoices]] | None = trace
        self._traced = None if self.is_kept else trace()
        self._lowered: tuple[Lowered, KernelChoices] | None = None
        self._compiling: Future[Compiled] = Future()
        _PROGRAMS.add(self)

    @property
    def is_kept(self) -> bool:
        """True if `compile` reads it from a file."""
        return self._kept is not None

    @property
    def is_done(self) -> bool:
        """True if `compiled` and `error` do not wait."""
        return self._compiling.done()

    @property
    def is_given_up(self) -> bool:
        """True if nothing waits for it: its engine has ended."""
        return self._compiling.cancelled()

    @property
    def error(self) -> BaseException | None:
        """The error of reading or compiling it; waits for `compile`."""
        return self._compiling.exception()

    @property
    def compiled(self) -> Compiled:
        """The program; waits for `compile`."""
        return self._compiling.result()

    def lower(self) -> Self:
        """Return this program, lowered unless it is read from a file."""
        if self._traced is not None:
            traced, choices = self._traced
            self._lowered, self._traced = (traced.lower(), choices), None
        return self

    def compile(self) -> Compiled:
        """Return the program, which calls take from now on; any thread may compile it, once.

        Raises CancelledError after `give_up`.
        """
        if not self._compiling.set_running_or_notify_cancel():
            return self.compiled
        try:
            self._compiling.set_result(self._read() or self._compile())
        except BaseException as error:
            self._compiling.set_exception(error)
        self._let_go()
        return self.compiled

    def give_up(self) -> None:
        """Neither read nor compile it any more, if no thread has begun to."""
        if self._compiling.cancel():
            self._let_go()

    def _let_go(self) -> None:
        self._kept = self._trace = self._traced = self._lowered = self._ahead = None

    def _read(self) -> Compiled | None:
        if self._kept is None:
            return None
        try:
            return _loaded(self._kept) if self._ahead is None else self._ahead.loaded.result()
        except Exception as error:  # of XLA: it is compiled again, and written over
            logger.warning("A step that was kept cannot be loaded: %s", error)
            return None

    def _compile(self) -> Compiled:
        """Return the program, which is kept; one that jax had with the executable of jax's file."""
        assert self._trace is not None, "a program is compiled once"
        if self._lowered is None and self._traced is None:  # its file was of no use
            self._traced = self._trace()
        self.lower()
        assert self._lowered is not None
        (lowered, choices), programs = self._lowered, self._steps.programs
        reading = programs.unread() if self._steps.anew else contextlib.nullcontext()
        with programs.watched() as read, reading:
            compiled = lowered.compile()
        if self._key not in self._jax_read:  # lowered again, it would be what was read before
            self._keep(compiled, choices, read)
        if read:
            self._jax_read.add(self._key)
        return compiled

    def _keep(self, compiled: Compiled, choices: KernelChoices, read: list[bytes]) -> None:
        """Keep the program; `read` are files in which jax found it, of one at most."""
        try:
            program = _serialised(compiled, *map(executable_in, read))
            self._steps.files.put(self._key, pickle.dumps((choices, program)))
        except (ValueError, NotImplementedError, OSError, pickle.PicklingError, TypeError) as error:
            text = "A step is not kept in %s, and the next start compiles it again: %s"
            logger.warning(text, self._steps.files.folder, error)


class _Ahead:
    """A step that threads read before the engine that runs it is there."""

    def __init__(self, files: ProgramFiles, key: str, pool: ThreadPoolExecutor):
        self.found = pool.submit(_found, files, key)
        self.loaded = pool.submit(self._load)

    def _load(self) -> Compiled | None:
        found = self.found.result()
        return None if found is None else _loaded(found[1])


used: list[str] = []  # keys of the steps that this process has asked for, in order
_AHEAD: dict[str, _Ahead] = {}
_PROGRAMS: "weakref.WeakSet[KeptProgram]" = weakref.WeakSet()


def compiled_programs() -> list[Compiled]:
    """Return the programs of this process's engines, all of which are asked for; waits for them."""
    return [program.compiled for program in list(_PROGRAMS) if not program.is_given_up]


def read_ahead(files: ProgramFiles, keys: list[str]) -> None:
    """Begin to read these steps, in order: the engine that this process makes will ask for them.

    A step that it does not ask for costs the memory of its program. What is no key is left out.
    """
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="ahead")
    for key in step_keys(keys):
        _AHEAD[key] = _Ahead(files, key, pool)
    pool.shutdown(wait=False)


def _found(files: ProgramFiles, key: str) -> tuple[Any, tuple[Any, ...]] | None:
    """Return a kept program's choices of kernels and its parts; None where it, or one, is not."""
    kept = files.get(key)
    if kept is None:
        return None
    choices, program = pickle.loads(kept)
    named = {one["implementation"] for op in choices.values() for one in op}
    if not named <= {*dispatch.IMPLEMENTATIONS, dispatch.COMPOSED}:
        return None  # the code of another package's backend is in no digest
    if not all(_READY[name]() for name in _READY if name in named):
        return None
    if missed := _built_since(choices):
        kernels = ", ".join(missed)
        logger.info("A kept step is made again: it was made without kernels of %s.", kernels)
        return None
    return choices, program


def _built_since(choices: KernelChoices) -> list[str]:
    """Return implementations that could not be built when a step was traced, and are there now."""
    declined = [one["declined"] for op in choices.values() for one in op]
    unbuilt = {name for reasons in declined for name in reasons if _is_unbuilt(reasons[name])}
    return [name for name in sorted(unbuilt & _READY.keys()) if _READY[name]()]


def _is_unbuilt(reason: str) -> bool:
    return reason.endswith(dispatch.NOT_BUILT)


def _loaded(program: tuple[Any, ...]) -> Compiled:
    devices = jax.devices()[:1]
    return serialize_executable.deserialize_and_load(*program, execution_devices=devices)


def _serialised(compiled: Compiled, executable: bytes | None = None) -> tuple[Any, ...]:
    """Return what `_loaded` takes; `executable` is XLA's own form of one that it has read.

    XLA's CPU would write an executable that it has read without its functions.
    """
    if executable is None:
        return serialize_executable.serialize(compiled)

    class Pickler(serialize_executable._JaxPjrtPickler):
        def persistent_id(self, obj: Any) -> Any:
            is_executable = isinstance(obj, xla_client.LoadedExecutable)
            return ("exec", executable) if is_executable else super().persistent_id(obj)

    arguments, tree = jax.tree.flatten(compiled.args_info)
    with io.BytesIO() as file:
        made: Any = compiled._executable
        Pickler(file).dump((made._unloaded_executable, arguments, compiled._no_kwargs))
        return file.getvalue(), tree, compiled.out_tree


def _mosaic_is_ready() -> bool:
    """Import what XLA calls Mosaic's kernels by, as tracing one would."""
    for name in OF_GPU:
        importlib.import_module(name)
    return True


# Custom calls that a program finds by name, and who gives them to XLA.
_READY: dict[str, Callable[[], bool]] = {
    "ffi": available,
    "cuda": dispatch.backend_kernel("cuda", "load_kernels"),
    "pallas_gpu": _mosaic_is_ready,
}


def identity(fields: dict[str, Any], model: Path) -> str:
    """Return what all programs of an engine depend on, beside their own arguments.

    `fields` are those of the engine's config, `model` is its folder.
    """
    env = {n: v for n, v in os.environ.items() if n.startswith(_SETTINGS)}
    parts = {
        "code": code_digest(),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "wheels": [] if jax.default_backend() == "cpu" else _wheels(),
        "machine": native.cpu_name(),
        "device": [d.device_kind for d in jax.devices()],
        "platform": jax.devices()[0].client.platform_version,
        "topology": _topology(),
        "cores": len(os.sched_getaffinity(0)),
        "environment": _without_folders(env),
        "settings": _without_folders(jax.config.values),
        "config": hashlib.sha256((model / "config.json").read_bytes()).hexdigest(),
        "fields": fields,
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _without_folders(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(settings[name]) for name in sorted(settings) if name not in _FOLDERS}


def _wheels() -> list[str]:
    """Return names and versions of what XLA runs and compiles with on an accelerator."""
    folders = [folder for place in sys.path for folder in Path(place).glob("*.dist-info")]
    return sorted({folder.name for folder in folders if folder.name.startswith(_WHEELS)})


def _topology() -> int | None:
    """Return XLA's fingerprint of the device that programs run on; None where it has none."""
    try:
        return xla_client.get_topology_for_devices(jax.devices()[:1]).fingerprint()
    except jax.errors.JaxRuntimeError:
        return None
