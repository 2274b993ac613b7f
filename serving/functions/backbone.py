"""Process that loads a base model into an arena, hands its descriptors to the agent and ends.

The memory stays as long as somebody holds a descriptor: the agent does, and passes them to every
function once. So no process with weights mapped for writing is left when functions run.
"""

import contextlib
import socket
import sys

import jax

from lora_jax.memory.platforms import for_platform
from lora_jax.memory.wire import ShareError, close_all, receive_header, send_fds, send_header
from lora_jax.models.shared_weights import load_into_arena


def main(connection: socket.socket) -> None:
    """Answer one order for a model with a manifest and descriptors, or with an error."""
    order = receive_header(connection)
    try:
        memory = for_platform(jax.default_backend())
        _, config, arena = load_into_arena(order["model"], memory, dtype=order["dtype"])
        if config.vision is not None:
            raise ValueError(f"{config.model_type} takes images, which functions do not serve yet")
        fds = arena.export()
    except (ValueError, OSError, NotImplementedError) as error:
        send_header(connection, {"error": f"Cannot share {order['model']}: {error}"})
        return
    manifest = arena.manifest
    about = {"digest": manifest.digest, "device": jax.default_backend()}
    send_header(connection, {"manifest": manifest.fields(), **about})
    send_fds(connection, fds)
    close_all(fds)
    with contextlib.suppress(ShareError):  # the agent has gone, or could not take them: it says so
        receive_header(connection)  # descriptors in flight are lost if their sender ends too early


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as end:
        main(end)
