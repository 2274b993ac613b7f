"""Adapters whose experts an instance takes over while its LoRA Server is lost. No jax.

Such an adapter is one more in the instance's own LoRA slots: the whole of it, under a digest of its
own, beside the part without experts that serves while the server does. Nothing is on the device
before it is needed; the whole lies in host memory (`shards.SplitWeights`).
"""

import dataclasses

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.weights import AdapterWeights
from serving.loading.adapter_loader import AdapterLoader
from serving.lora_server.shards import SplitWeights


@dataclasses.dataclass(eq=False)
class _Live:
    """An adapter that live requests need, and whether sequences run on the whole of it."""

    entry: AdapterEntry  # of the whole
    weights: AdapterWeights  # its own
    requests: int = 0
    users: int = 0
    instead: bool = False  # the server will not have it


class LocalExperts:
    """Threads as one AdapterLoader has them; the keys are the digests of the files."""

    def __init__(self, loader: AdapterLoader):
        """`loader` has the slots, of which some have room for experts."""
        self._loader = loader
        self._live: dict[str, _Live] = {}
        self._kept: dict[str, AdapterEntry] = {}  # wholes that the loader knows

    def retain(self, entry: AdapterEntry) -> None:
        """A request that needs the adapter is queued."""
        if isinstance(entry.weights, SplitWeights):
            if entry.digest not in self._live:
                whole = entry.weights.whole
                whole_entry = dataclasses.replace(entry, digest=whole.digest, weights=whole)
                self._live[entry.digest] = _Live(whole_entry, whole)
            self._live[entry.digest].requests += 1

    def drop(self, digest: str) -> None:
        """Such a request has ended."""
        live = self._live.get(digest)
        if live is not None:
            live.requests -= 1
            if not live.requests:
                del self._live[digest]

    def knows(self, digest: str) -> bool:
        """True if a live request needs the adapter, and it has experts."""
        return digest in self._live

    def users(self, digest: str) -> int:
        """Return how many sequences run on the whole adapter."""
        live = self._live.get(digest)
        return 0 if live is None else live.users

    def stands_in(self, digest: str) -> bool:
        """True if the adapter is served here although the server is there."""
        live = self._live[digest]
        return live.instead or live.users > 0

    def can_serve(self, digest: str) -> bool:
        """True if the whole adapter is on the device, or could be brought there now."""
        live = self._live.get(digest)
        if live is None:
            return False
        is_placed = self._loader.is_placed(live.entry.digest)
        return is_placed or self._loader.can_place(live.weights)

    def serve_instead(self, digest: str) -> None:
        """The server will not have the adapter: serve the requests there are without it."""
        self._live[digest].instead = True

    def acquire(self, digest: str) -> int | None:
        """Return the whole adapter's slot and count one more user; None while it is not there."""
        live = self._live[digest]
        if digest not in self._kept:
            self._kept[digest] = live.entry
            self._loader.retain(live.entry)
        slot = self._loader.acquire(live.entry.digest)
        live.users += slot is not None
        return slot

    def release(self, digest: str) -> None:
        """Count one user less."""
        live = self._live[digest]
        live.users -= 1
        self._loader.release(live.entry.digest)

    def is_loading(self, digest: str) -> bool:
        """True if the whole adapter is on its way."""
        return self._loader.is_loading(self._live[digest].entry.digest)

    def collect(self) -> None:
        """The server is there: let go of what nobody uses any more."""
        for digest, entry in list(self._kept.items()):
            if digest not in self._live:
                del self._kept[digest]
                self._loader.drop(entry.digest)

    @property
    def is_busy(self) -> bool:
        """True if `collect` has anything to do."""
        return any(digest not in self._live for digest in self._kept)

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is kept for nobody."""
        assert not self._live, f"adapters {sorted(self._live)} are kept for nobody"
