"""A device for scheduler tests: its tokens depend on everything the scheduler must get right.

The K/V of a token is a hash of the adapter, and of all tokens up to it, built from the K/V of the
position before as found in the *pages*; a wrong page, a stale slot or a token read too early give
other hashes. Plans are captured when they are made and run later, as on a real device.
"""

import dataclasses
import hashlib

from serving.api.request import (
    Merged,
    ScheduledChunk,
    Sequence,
    SequenceResult,
    StepPlan,
    TokenLogprobs,
)


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def kv_root(adapter: str) -> int:
    return digest("root", adapter)


def arithmetic(adapter: str, weights: str | None) -> str:
    """Name what computes a row: its adapter, on weights with another one, or its own, merged."""
    return f"{adapter} on {weights}" if weights else adapter


def next_token(kv: int, seed: int, position: int, vocab: int) -> int:
    return digest("token", kv, seed, position) % vocab


def expected_tokens(
    prompt: tuple[int, ...], adapter: str, seed: int, count: int, vocab: int
) -> list[int]:
    """What a sequence gives when it runs alone."""
    kv, tokens = kv_root(adapter), list(prompt)
    for token in prompt:
        kv = digest(kv, token)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(kv, seed, len(tokens), vocab))
        kv = digest(kv, tokens[-1])
    return tokens[len(prompt) :]


@dataclasses.dataclass(frozen=True)
class Captured:
    """One chunk as the device sees it: nothing the host may change later."""

    chunk: ScheduledChunk
    row: int
    adapter: str
    pages: tuple[int, ...]
    seed: int
    tokens: tuple[int | None, ...]  # None: on the device only


class FakeDevice:
    def __init__(self, num_pages: int, page_size: int, vocab: int, slots: dict[int, str]):
        self.page_size = page_size
        self.vocab = vocab
        self.kv: list[int | None] = [None] * (num_pages * page_size)
        self.last_token: dict[int, int] = {}
        self.slots = slots  # adapter slot -> digest of what is loaded there
        self.computed = 0

    def capture(self, plan: StepPlan) -> list[Captured]:
        rows = [chunk.sequence.row for chunk in plan.chunks]
        assert len(set(rows)) == len(rows), f"a row twice in one step: {rows}"
        return [self._capture(chunk, plan.merged) for chunk in plan.chunks]

    def _capture(self, chunk: ScheduledChunk, merged: Merged | None) -> Captured:
        seq: Sequence = chunk.sequence
        end = chunk.start + chunk.num_tokens
        assert seq.row >= 0
        assert end <= len(seq.pages) * self.page_size
        known = seq.token_ids[chunk.start : end - len(chunk.drafts)]
        unknown = chunk.num_tokens - len(chunk.drafts) - len(known)
        assert unknown <= 1, "only the last token before the drafts may be unknown"
        adapter = self.slots[seq.slot] if seq.slot >= 0 else ""
        assert adapter == seq.request.adapter_digest, "the slot holds another adapter"
        if merged is not None:
            assert self.slots[merged.slot] == merged.digest, "the merged adapter has lost its slot"
            adapter = arithmetic(adapter, merged.digest)
        tokens = (*known, *[None] * unknown, *chunk.drafts)
        return Captured(chunk, seq.row, adapter, tuple(seq.pages), seq.seed, tokens)

    def run(self, step: list[Captured]) -> list[SequenceResult]:
        """All writes of a step come before its reads, layer by layer; so they do here."""
        return [self._run(captured) for captured in step]

    def _run(self, captured: Captured) -> SequenceResult:
        chunk = captured.chunk
        kv = kv_root(captured.adapter)
        if chunk.start:
            before = self.kv[self._place(captured, chunk.start - 1)]
            assert before is not None, "the chunk reads a place nobody wrote"
            kv = before
        kvs = []
        for i, token in enumerate(captured.tokens):
            token = self.last_token[captured.row] if token is None else token
            kv = digest(kv, token)
            kvs.append(kv)
            self.kv[self._place(captured, chunk.start + i)] = kv
            self.computed += 1
        if not chunk.samples:
            return SequenceResult(chunk, None, None, self._scores(chunk, kvs))
        end, drawn = chunk.start + chunk.num_tokens, []
        for place in range(len(chunk.drafts), -1, -1):  # drafts that follow the token's place
            kv = kvs[len(kvs) - 1 - place]
            drawn.append(next_token(kv, captured.seed, end - place, self.vocab))
        right = [guess == token for guess, token in zip(chunk.drafts, drawn, strict=False)]
        count = right.index(False) if False in right else len(right)
        self.last_token[captured.row] = drawn[count]
        more = tuple(SequenceResult(chunk, token) for token in drawn[1 : count + 1])
        return SequenceResult(chunk, drawn[0], None, self._scores(chunk, kvs), more=more)

    def _scores(self, chunk: ScheduledChunk, kvs: list[int]) -> tuple[TokenLogprobs, ...]:
        if not chunk.prompt_logprobs:
            return ()
        prompt = chunk.sequence.request.prompt_ids
        places = range(chunk.start, min(chunk.start + chunk.num_tokens, len(prompt) - 1))
        return tuple(
            TokenLogprobs(prompt[p + 1], -float(kvs[p - chunk.start] % 1000), 1, {}) for p in places
        )

    def _place(self, captured: Captured, position: int) -> int:
        page = captured.pages[position // self.page_size]
        return page * self.page_size + position % self.page_size


class FakeResidency:
    """A few adapter slots; loads take ticks, idle adapters go least recently used first."""

    def __init__(self, num_slots: int, ticks: int = 2):
        self.slots = dict.fromkeys(range(num_slots), "")
        self.users: dict[str, int] = {}
        self.ready_in: dict[str, int] = {}
        self.order: list[str] = []  # placed digests, least recently used first
        self.ticks = ticks
        self.loads: list[str] = []
        self.pinned: set[str] = set()
        self.protected: frozenset[str] = frozenset()

    def tick(self) -> None:
        for adapter in list(self.ready_in):
            self.ready_in[adapter] -= 1
            if self.ready_in[adapter] <= 0:
                del self.ready_in[adapter]

    def slot_of(self, adapter: str) -> int:
        return next(slot for slot, held in self.slots.items() if held == adapter)

    def acquire(self, adapter: str) -> int | None:
        if adapter in self.ready_in:
            return None
        if adapter in self.order:
            self.users[adapter] = self.users.get(adapter, 0) + 1
            self._touch(adapter)
            return self.slot_of(adapter)
        self._load(adapter)
        return None

    def release(self, adapter: str) -> None:
        assert self.users[adapter] > 0
        self.users[adapter] -= 1

    def is_loading(self, adapter: str) -> bool:
        return adapter in self.ready_in

    def is_resident(self, adapter: str) -> bool:
        return adapter in self.order and adapter not in self.ready_in

    def protect(self, adapters: frozenset[str]) -> None:
        self.protected = adapters

    def can_merge(self, adapter: str) -> bool:
        return adapter in self.order and adapter != "e"

    def pool_of(self, adapter: str) -> str | None:
        return None if adapter in self.pinned else "slots"

    def _touch(self, adapter: str) -> None:
        self.order.remove(adapter)
        self.order.append(adapter)

    def _load(self, adapter: str) -> None:
        free = [slot for slot, held in self.slots.items() if not held]
        kept = {*self.ready_in, *self.protected}
        idle = [a for a in self.order if not self.users.get(a) and a not in kept]
        if not free and not idle:
            return
        if not free:
            free = [self.slot_of(idle[0])]
            self.order.remove(idle[0])
        self.slots[free[0]] = adapter
        self.order.append(adapter)
        self.loads.append(adapter)
        self.ready_in[adapter] = self.ticks
