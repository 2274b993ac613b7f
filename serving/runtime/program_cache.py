"""Compiled programs outlive their process: a second start reads them instead of compiling again.

jax asks for them; `program_files` keeps them. A folder that is set in jax
(`JAX_COMPILATION_CACHE_DIR`) stays jax's own, but is turned off where other users may write it: a
program is code. `JAX_ENABLE_COMPILATION_CACHE=false` turns all of this off.

Isolated functions have folders apart (`keep_programs_apart`), so that a server never loads what one
of them has written.
"""

import hashlib
import logging
from pathlib import Path

import jax
from jax._src import compilation_cache as jax_cache  # its public face takes no other cache
from jax._src.interpreters import pxla  # jax.clear_caches forgets what others run, too

from lora_jax import own_files
from lora_jax.ops import dispatch, native
from serving.runtime.program_files import ProgramFiles

logger = logging.getLogger(__name__)

_MAX_BYTES = 8 << 30  # programs used longest ago go first
_MAX_STEP_BYTES = 2 << 30
_MIN_COMPILE_S = 0.2  # faster ones are not worth a file


def keep_programs() -> None:
    """Let jax keep the programs that this process compiles in the folder of compiled kernels."""
    named = jax.config.jax_compilation_cache_dir
    if named is not None and "://" in named:  # not of this machine
        return
    folder = Path(named) if named else dispatch.cache_folder() / "programs" / _machine()
    try:
        folder = own_files.own_folder(folder)
    except OSError as error:
        jax.config.update("jax_compilation_cache_dir", None)
        logger.warning("Programs are compiled anew at each start: %s", error)
    else:
        if named:
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
        _give_jax(ProgramFiles(folder, _MAX_BYTES), str(folder))
    jax_cache.reset_cache()  # jax looks at the settings once, maybe before this


def keep_programs_apart(kind: str, *, writes: bool, demands: bool = False) -> list[Path]:
    """Do as `keep_programs` in folders that processes of this kind have; return those there are.

    Without `writes` nothing is added to them; with `demands` a step that is not there is NotKept.
    A later `keep_programs` leaves it so. Folders are made here, also those of steps, before a
    process may lose the right to.
    """
    named = jax.config.jax_compilation_cache_dir
    if named is not None and "://" in named:
        return []
    base = dispatch.cache_folder() / "programs" if named is None else Path(named)
    try:
        own_files.own_folder(base)
        folder = own_files.own_folder(base / kind / _machine())
    except OSError as error:
        jax.config.update("jax_compilation_cache_dir", None)
        logger.warning("Programs are compiled anew at each start: %s", error)
        return []
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # one start makes all
    _give_jax(ProgramFiles(folder, _MAX_BYTES, writes=writes, demands=demands), str(folder))
    jax_cache.reset_cache()
    steps = step_files()
    return [folder] if steps is None else [folder, steps[0].folder]


def step_files() -> tuple[ProgramFiles, ProgramFiles] | None:
    """Return files for whole steps, and those of `keep_programs` around them; None: that is off."""
    folder = jax.config.jax_compilation_cache_dir
    if folder is None or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    cache = jax_cache.get_file_cache(folder)
    programs = None if cache is None else cache[0]
    if not isinstance(programs, ProgramFiles):
        return None
    try:
        steps = own_files.own_folder(Path(folder).parent / "steps" / Path(folder).name)
    except OSError as error:
        logger.warning("Steps are traced anew at each start: %s", error)
        return None
    options = {"writes": programs.writes, "demands": programs.demands}
    return ProgramFiles(steps, _MAX_STEP_BYTES, **options), programs


def executable_in(program: bytes) -> bytes:
    """Return XLA's serialised executable in a program that jax has kept."""
    executable, _ = jax_cache.extract_executable_and_time(jax_cache.decompress_executable(program))
    return executable


def forget_lowered() -> None:
    """Let jax forget what it lowered that nobody can call any more; live programs stay as they are.

    One of jax's caches has a program that keeps its unused arguments as the value of its own weak
    key: with it stay the compiled code and its pages, some 5,000 maps of a process for the steps of
    one engine, and Linux gives a process 65,530. An entry that is asked for again is made at once.
    """
    pxla._dce_jaxpr.cache_clear()


def _give_jax(files: ProgramFiles, folder: str) -> None:
    """Have jax use `files` while its cache is in this folder."""
    make = jax_cache.get_file_cache
    jax_cache.get_file_cache = lambda path: (files, path) if path == folder else make(path)


def _machine() -> str:
    """Return a name for what jax's own key leaves out: the features of this CPU."""
    return hashlib.sha256(native.cpu_name().encode()).hexdigest()[:12]
