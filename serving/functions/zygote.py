"""Process with everything imported and no device touched, which becomes a function by fork.

Importing jax and the engine takes seconds, a fork milliseconds. Nothing here may use a device or
start a thread: what a child inherits has to be as good as new.
"""

import contextlib
import os
import signal
import socket
import sys
import warnings

from lora_jax.memory.wire import ShareError, receive_fds, receive_header, send_header
from lora_jax.ops.cpu.build import available
from serving.functions import function_process  # brings jax and the engine
from serving.lora_server.transport.tenants import prepare
from serving.steps.kept_steps import code_digest


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
        if order.get("device") == "cpu":
            available()  # a function may run no compiler
        if order.get("tenants"):
            with contextlib.suppress(NotImplementedError):  # the function says it
                prepare()
        pid = os.fork()
        if pid == 0:
            _be_function(control, end)
        os.close(end)
        send_header(control, {"pid": pid})


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
