"""Files of --lora-modules over restarts of one of several instances: all serve the same. No jax.

A folder may be overwritten while instances serve what they have read. One that is started anew
reads it again; it then refuses the name, as host memory refuses to read changed files, so that no
two versions answer under it.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lora_jax.adapters.registry_errors import files_changed

logger = logging.getLogger(__name__)


class Registry(Protocol):
    """Interface of the checks; see lora_jax.adapters.registry.AdapterRegistry."""

    def known(self) -> Iterable[Any]: ...

    def unload(self, name: str) -> Any: ...

    def refuse(self, name: str, why: str) -> None: ...


def digests_of(registry: Registry, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of these names' files, of those that are loaded."""
    wanted = {*names}
    return {entry.name: entry.digest for entry in registry.known() if entry.name in wanted}


def refuse_changed(registry: Registry, wanted: Mapping[str, str], paths: Mapping[str, str]) -> None:
    """Refuse names whose files have another digest than is wanted, until they are loaded again."""
    for name, digest in digests_of(registry, wanted).items():
        if digest != wanted[name]:
            why = str(files_changed(name))
            logger.error(
                "%s Its folder is %s; the other instances serve the files from before. Put those "
                "back and restart the server, or give new files a name of their own.",
                why,
                paths[name],
            )
            registry.unload(name)
            registry.refuse(name, why)


def check_same(read: Iterable[Mapping[str, str]]) -> None:
    """Raise ConnectionError, naming the adapter, where two instances have read different files."""
    first: dict[str, str] = {}
    for digests in read:
        for name, digest in digests.items():
            if first.setdefault(name, digest) != digest:
                raise ConnectionError(
                    f"Adapter {name!r}: its files have changed while the instances started, so "
                    "that they have read different ones. Start again when the folder is complete."
                )
