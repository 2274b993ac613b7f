"""A folder of this host that the hosts of instances must see too. No jax, no ray."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path


def require_seen(folder: str, sees: Mapping[str, Callable[[str, bytes], bool]]) -> None:
    """Raise ConnectionError unless each host sees a new file of the folder.

    `sees` are the hosts by name: each is called with the path of a file and its content, and
    returns whether it has this file. Raises OSError where the folder cannot be written.
    """
    content, probe = secrets.token_bytes(16), Path(folder, f".seen-{secrets.token_hex(8)}")
    probe.write_bytes(content)
    try:
        blind = [name for name, sees_file in sees.items() if not sees_file(str(probe), content)]
    finally:
        probe.unlink(missing_ok=True)
    if blind:
        raise ConnectionError(
            f"The folder {folder} of this host is not seen by {', '.join(blind)}. Instances share "
            "there what was loaded at run time and the tokens of keys: give --state-dir a folder "
            "that all hosts have, or leave out --enable-runtime-lora, --keys-file and "
            "--key-tokens-per-minute."
        )
