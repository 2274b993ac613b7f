"""Process with everything imported and no device touched, which becomes a function by fork.

Importing jax and the engine takes seconds, a fork milliseconds. Nothing here may use a device or
start a thread: what a child inherits has to be as good as new.

An order does not wait for what a function can import beside the rest of its start: the zygote
imports that while nobody asks for a function, the engine at once behind a first order. Only a GPU's
driver takes so long that the engine is among it.
"""

import collections
import contextlib
import functools
import gc
import importlib
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from jax._src import xla_bridge  # plugins are found behind the first device elsewhere

from lora_jax.memory.wire import ShareError, is_readable, receive_fds, receive_header, send_header
from lora_jax.ops.cpu.build import reads_quads
from lora_jax.ops.dispatch import Declined, backend_kernel
from serving.functions import function_process, jail
from serving.functions.late_imports import lean
from serving.runtime.code_files import code_digest
from serving.steps.kept_steps import OF_GPU

# What is imported without an order, in parts; an order that comes meanwhile waits for one part.
_ALL = "lora_jax.models.loader", function_process.CALLS, function_process.TENANT
# Devices on which a start waits for a driver, long enough for imports beside that.
_OVERLAPPING = ("gpu",)
_IDLE = *_ALL, "pydantic", "fastapi", "uvicorn.server", function_process.HTTP
_END_S = 20  # for a function to leave; the kernel then ends it, as where a step hangs for good
_QUIET_S = 0.2  # after the last order; an agent that waits for this process asks at once
# That the first program imports elsewhere.
_LATE = (
    "jaxlib.mlir.dialects.mhlo",
    "jaxlib.mlir.dialects.builtin",
    "jax.experimental.multihost_utils",
)
_TENANTS = "serving.lora_server.transport.tenants"
_KERNELS = {"cpu": reads_quads, "gpu": backend_kernel("cuda", "load_kernels")}


def main(control: socket.socket) -> None:
    """Fork a function per order until the agent has gone; each order comes with its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent ends its functions
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes children that have ended
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while jax's threads sleep
    code_digest()  # which every function asks for
    idle: collections.deque[str] = collections.deque(_IDLE)
    send_header(control, {"ready": True})
    while True:
        _import_until_asked(control, idle)
        try:
            order = receive_header(control)
            (end,) = receive_fds(control, 1)
        except ShareError:
            return
        if order["device"] == "gpu":
            idle.extend(name for name in OF_GPU if name not in sys.modules)
        _prepare(order["device"], order["tenants"])
        if order["device"] not in _OVERLAPPING:
            _import_all(idle)
        if not _lacks(idle):
            _learn_shapes(order["model"], order["dtype"])
        gc.freeze()  # no child looks through what is here for garbage: a third of a second
        pid = os.fork()
        if pid == 0:
            _be_function(control, end)
        os.close(end)
        send_header(control, {"pid": pid})
        _import_all(idle)  # else each later function would, too


def _import_all(idle: "collections.deque[str]") -> None:
    """Import what every function needs and is still among these modules."""
    while _lacks(idle):
        _import(idle.popleft())


def _lacks(idle: "collections.deque[str]") -> bool:
    """Return whether something that every function needs has not been imported yet."""
    return bool(idle) and idle[0] in _ALL


def _import_until_asked(control: socket.socket, names: "collections.deque[str]") -> None:
    """Import these modules, which are then taken off, while no order waits."""
    wait_s = _QUIET_S
    while names and not is_readable(control, wait_s):
        _import(names.popleft())
        wait_s = 0.0


def _import(name: str) -> None:
    """Import a module if it is there; imports make little garbage, and looks for it take time."""
    gc.disable()
    try:
        with contextlib.suppress(ImportError), lean():
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def _prepare(device: str, tenants: bool) -> None:
    """Do once what each function would do in the same way. No device is touched.

    A function may run no compiler, so that it needs the kernels of its device here.
    """
    with _waits_for_programs():
        _load_plugins()
        with contextlib.suppress(Declined):
            if device in _KERNELS:
                _KERNELS[device]()
        with contextlib.suppress(NotImplementedError):  # the function says it
            if tenants:
                importlib.import_module(_TENANTS).prepare()
    jail.code_folders([])


@functools.cache
def _learn_shapes(model: str, dtype: str | None) -> None:
    """Do once what the engine of each function would do to know the model's arrays."""
    loader = importlib.import_module("lora_jax.models.loader")
    with contextlib.suppress(ValueError, OSError, TypeError):  # the function says it
        config, wanted = loader.read_config(Path(model)), loader.wanted_dtype(Path(model), dtype)
        loader.abstract(config, wanted)


@contextlib.contextmanager
def _waits_for_programs() -> Iterator[None]:
    """Let a compiler's failure be seen: where SIGCHLD is ignored, every program has status 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _load_plugins() -> None:
    """Load jax's plugins, CUDA's without a check of versions: no fork survives what it starts."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    with contextlib.redirect_stdout(sys.stderr):  # they say what they leave out
        xla_bridge._discover_and_register_pjrt_plugins()
    for name in _LATE:
        _import(name)


def _be_function(control: socket.socket, end: int) -> None:
    """Run a function in this fresh child, and leave without the parent's clean-up."""
    status = 1
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with socket.socket(fileno=end) as connection:
            function_process.main(connection, lambda: signal.alarm(_END_S))
        status = 0
    except BrokenPipeError:  # the agent has gone before this process was ready
        pass
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
