"""Process with everything imported and no device touched, which becomes a function by fork.

Importing jax and the engine takes seconds, a fork milliseconds. Nothing here may use a device or
start a thread: what a child inherits has to be as good as new.
"""

import contextlib
import functools
import importlib
import os
import signal
import socket
import sys
import warnings

from jax._src import xla_bridge  # plugins are found behind the first device elsewhere

from lora_jax.memory.wire import ShareError, receive_fds, receive_header, send_header
from lora_jax.ops.cpu.build import available
from lora_jax.ops.dispatch import Declined, backend_kernel
from serving.functions import function_process  # brings jax and the engine
from serving.lora_server.transport.tenants import prepare
from serving.steps.kept_steps import code_digest

_KERNELS = {"cpu": available, "gpu": backend_kernel("cuda", "load_kernels")}


def main(control: socket.socket) -> None:
    """Fork a function per order until the agent has gone; each order comes with its socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent ends its functions
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes children that have ended
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while jax's threads sleep
    code_digest()  # which every function asks for
    send_header(control, {"ready": True})
    while True:
        try:
            order = receive_header(control)
            (end,) = receive_fds(control, 1)
        except ShareError:
            return
        _load_kernels(order.get("device"))
        if order.get("tenants"):
            with contextlib.suppress(NotImplementedError):  # the function says it
                prepare()
        pid = os.fork()
        if pid == 0:
            _be_function(control, end)
        os.close(end)
        send_header(control, {"pid": pid})


def _load_kernels(device: str | None) -> None:
    """Give the kernels of this device to XLA: a function may run no compiler."""
    if device == "gpu":
        _load_plugin()
    with contextlib.suppress(Declined):
        if device in _KERNELS:
            _KERNELS[device]()


@functools.cache
def _load_plugin() -> None:
    """Load jax's libraries of CUDA and Mosaic's compiler. No device is touched.

    The plugin's check of versions would initialise CUDA, which no fork survives.
    """
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    xla_bridge._discover_and_register_pjrt_plugins()
    with contextlib.suppress(ImportError):
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def _be_function(control: socket.socket, end: int) -> None:
    """Run a function in this fresh child, and leave without the parent's clean-up."""
    status = 1
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with socket.socket(fileno=end) as connection:
            function_process.main(connection)
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        main(agent)
