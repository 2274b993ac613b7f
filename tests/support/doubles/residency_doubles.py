"""Doubles around a residency: slots without rows, jobs of one chunk, a server, a stand-in."""

from types import SimpleNamespace

from lora_jax.adapters.allocator import AbstractAllocator, Placed, ResidencyStats
from lora_jax.adapters.entries import PairWeights
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport


class Slots(AbstractAllocator):
    """As many adapters as slots, none of them bigger than another."""

    def check_fits(self, weights):
        if weights.too_large:
            raise ValueError("too large")

    def can_place(self, weights):
        return bool(self._free_slots) and weights.digest not in self._placed

    has_room = can_place  # whose weights are doubles too

    def make_room(self, weights):
        return self.can_place(weights)

    def place(self, weights, *, pinned=False):
        slot = self._free_slots.pop(0)
        self._placed[weights.digest] = Placed(slot, None, pinned)
        return SimpleNamespace(digest=weights.digest, slot=slot)

    def stats(self):
        used = len(self._placed)
        return ResidencyStats(used, self.num_slots, 10 * used, 0)

    def _take_back(self, placed):
        self._return_slot(placed.slot)


class OneStep:
    """A job of one chunk that notes the digest in the state."""

    def __init__(self, placement, state):
        self.placement, self.remaining = placement, 1

    @property
    def done(self):
        return not self.remaining

    def advance(self, state, max_chunks):
        self.remaining = 0
        return (*state, self.placement.digest)


class Room:
    """Expert room that is told how far the steps are."""

    def __init__(self):
        self.is_busy, self.told, self.freed, self.closed, self.trimmed = False, [], 0, 0, 0
        self.tensors = SimpleNamespace(pages=lambda: SimpleNamespace(used_bytes=77), trim=self.trim)

    def trim(self):
        self.trimmed += 1

    def collect(self, dispatched, read):
        self.told.append((dispatched, read))
        freed, self.freed = self.freed, 0
        return freed

    def close(self):
        self.closed += 1

    def check_integrity(self):
        assert not self.is_busy


class Server:
    """Instance side of a LoRA Server that is there or not, with a part of every adapter."""

    def __init__(self):
        self.is_lost, self.is_busy, self.ready, self.failures = False, False, True, []
        self.bound, self.live, self.dropped, self.read = {}, [], [], []
        self.table, self.affected, self.closed, self.wake = None, frozenset(), 0, None
        self.kept = {}  # part of an adapter by digest

    def keep(self, weights):
        return self.kept[weights.digest]

    def retain(self, entry):
        self.live.append(entry.digest)

    def drop(self, digest, dispatched):
        self.live.remove(digest)
        self.dropped.append((digest, dispatched))

    def collect(self, read):
        self.read.append(read)

    def is_ready(self, digest):
        return self.ready

    def bind(self, slot, digest):
        self.bound[slot] = digest

    def bind_local(self, slot):
        self.bound[slot] = "local"

    def take_table(self):
        table, self.table = self.table, None
        return table

    def affected_by(self, status):
        return self.affected if status.any() else frozenset()

    def take_failures(self):
        return self.failures

    def close(self):
        self.closed += 1

    def check_integrity(self):
        assert not self.live


class Whole:
    """Whole adapters for a stand-in: one at a time, in slot 7."""

    def __init__(self):
        self.user, self.known, self.instead, self.collected = None, set(), set(), 0
        self.is_busy, self.is_checked = False, False

    def retain(self, entry):
        self.known.add(entry.digest)

    def drop(self, digest):
        self.known.discard(digest)

    def knows(self, digest):
        return digest in self.known

    def users(self, digest):
        return int(self.user == digest)

    def stands_in(self, digest):
        return digest in self.instead or self.user == digest

    def can_serve(self, digest):
        return self.user in (None, digest)

    def serve_instead(self, digest):
        self.instead.add(digest)

    def acquire(self, digest):
        self.user = digest
        return 7

    def is_loading(self, digest):
        return self.user != digest

    def release(self, digest):
        assert self.user == digest
        self.user = None

    def collect(self):
        self.collected += 1

    def check_integrity(self):
        self.is_checked = True


def entry(name, kind, *, pinned=False, too_large=False):
    """Return an entry of the registry, whose weights are no more than a digest and a kind."""
    digest = f"digest-{name}"
    report = SimpleNamespace(kind=kind)
    weights = SimpleNamespace(digest=digest, report=report, too_large=too_large)
    return SimpleNamespace(name=name, kind=kind, digest=digest, weights=weights, pinned=pinned)


def pair(lora, esft):
    """Return an entry of two that serve a request together."""
    digest = f"{lora.digest}+{esft.digest}"
    report = AdapterReport(AdapterKind.PAIR, "both", digest, {}, 0, 0, {}, 0, 0, None, None)
    weights = PairWeights(lora, esft, report)
    return SimpleNamespace(kind=AdapterKind.PAIR, digest=digest, weights=weights)


LORA, OTHER = entry("l", AdapterKind.LORA), entry("m", AdapterKind.LORA)
ESFT, LAST = entry("e", AdapterKind.ESFT), entry("f", AdapterKind.ESFT)


def device():
    """Return the runner's arrays: nothing is loaded, and the server has told nothing."""
    told = []
    return SimpleNamespace(
        slots=(), reroute_tables=(), told=told, set_remote=lambda *table: told.append(table)
    )
