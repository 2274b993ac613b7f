"""Process that watches over a backbone: maps it for reading, and hashes it when asked."""

from typing import Any

import jax

from lora_jax.memory.arena import ImportedArena, parse_manifest
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.wire import ShareError, close_all, receive_fds, receive_header, send_header


def run(connection: Any, order: dict[str, Any]) -> None:
    """Publish what the pages hold, and answer checks until the other side has gone.

    Ready means that every array has the bytes of the manifest, or says which have not.
    """
    manifest = parse_manifest(order["manifest"])
    fds = receive_fds(connection, len(manifest.blocks))
    try:
        arena = ImportedArena(for_platform(jax.default_backend()), manifest, fds)
    except (ValueError, OSError, NotImplementedError) as error:
        send_header(connection, {"error": f"The backbone cannot be watched: {error}"})
        return
    finally:
        close_all(fds)
    send_header(connection, {"ready": True, "digest": manifest.digest, "changed": arena.changed()})
    try:
        while True:
            call = receive_header(connection)
            send_header(connection, {"id": call["id"], "value": arena.changed()})
    except ShareError:
        arena.close()
