"""Entry of the zygote's process, which imports all that a function needs.

Imports make little garbage: without looks for it they take a tenth less time. What they made stays
for good, so that later looks pass it over: the first one would take a tenth of a second.
"""

import gc
import importlib
import socket
import sys

from serving.functions.late_imports import lean


def main(control: socket.socket) -> None:
    """Be the zygote of the agent at the other end of the connection, until it has gone."""
    gc.disable()
    with lean():
        zygote = importlib.import_module("serving.functions.zygote")
    gc.freeze()
    gc.enable()
    zygote.main(control)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as agent:
        main(agent)
