"""Pages of sequences, and rows of their images: given for a prompt, found again. No jax."""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf

from serving.api.images import EncodeImage, ImageStats
from serving.api.request import PageMove, Sequence, SequenceState
from serving.scheduling.pages.exchange import PoolShares
from serving.scheduling.pages.extents import PageExtents
from serving.scheduling.pages.host_pages import HostPages, HostPageStats
from serving.scheduling.pages.prefix_cache import PageCache, PrefixCacheStats, PrefixChain, is_part
from serving.scheduling.sequence_images import SequenceImages


class SequencePages:
    """Gives pages of one PageCache to sequences and lets them share prefixes.

    A sequence is opened when it is added and closed when it ended; it holds pages only while it
    runs. Pages become findable as soon as their tokens are known and planned: steps run in order,
    so whoever is planned later reads them complete.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_encoder_rows: int = 0,
        num_host_pages: int = 0,
        *,
        enable_prefix_caching: bool,
        extents: Callable[[PageCache], PageExtents] | None = None,
    ):
        """With `extents` pages have memory only while they need it, else always."""
        self._images = SequenceImages(num_encoder_rows)
        self._host = HostPages(num_host_pages)
        options = {"enable_prefix_caching": enable_prefix_caching, "on_evict": self._take_out}
        self._cache = PageCache(num_pages, page_size, **options, are_absent=extents is not None)
        self._extents = None if extents is None else extents(self._cache)
        self._remembers = enable_prefix_caching
        self._chains: dict[Sequence, PrefixChain] = {}
        self._registered: dict[Sequence, int] = {}  # pages of running sequences others can find
        self._faults: dict[str, int] = {}  # by adapter digest: how often its pages were forgotten

    @property
    def usage(self) -> float:
        """Share of the pages that running sequences hold, 0 to 1."""
        return self._cache.usage

    @property
    def num_free(self) -> int:
        """Pages that no running sequence holds."""
        return self._cache.num_free

    @property
    def stats(self) -> PrefixCacheStats:
        return self._cache.stats

    def remember(self, wanted: bool) -> None:
        """Let pages be found and become findable, where they may be; not while not `wanted`."""
        self._cache.enabled = wanted and self._remembers

    def num_pages(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self._cache.page_size)

    def open(self, sequence: Sequence) -> None:
        """Begin to know a sequence."""
        request = sequence.request
        faults = self._faults.get(request.adapter_digest, 0)
        owner = request.adapter_digest + (f" after {faults}" if faults else "")
        owner += f" on {sequence.weights}" if sequence.weights else ""
        self._chains[sequence] = PrefixChain(
            owner, request.cache_salt, self._cache.page_size, request.images
        )

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence that holds no pages."""
        del self._chains[sequence]

    def start_step(
        self, num_running: int = 0, num_idle: int = 0, *, is_starving: bool = False
    ) -> None:
        """Let go of what no step to come reads; each running sequence may need one more page.

        `num_idle` more sequences wait, for which there are rows; with `is_starving` one has waited
        too long for its adapter.
        """
        self._images.start_step()
        if self._extents is not None:
            self._extents.start_step(num_running, num_idle, is_starving=is_starving)

    def planned(self, now: float) -> None:
        """Note that a step goes to the device."""
        if self._extents is not None:
            self._extents.planned(now)

    def completed(self, num_tokens: int, num_rows: int, now: float) -> None:
        """Note the end of the oldest step in flight, of so many tokens."""
        if self._extents is not None:
            self._extents.completed(num_tokens, num_rows, now)

    def take_encodes(self) -> tuple[EncodeImage, ...]:
        """Return what towers compute before the step that is planned, once."""
        return self._images.take_encodes()

    def take_moves(self) -> tuple[PageMove, ...]:
        """Return the pages that move between device and host before the step planned, once."""
        return self._host.take_moves()

    @property
    def pool_shares(self) -> PoolShares:
        """The shares of the page pool now; nothing without one."""
        return PoolShares() if self._extents is None else self._extents.shares

    @property
    def host_stats(self) -> HostPageStats:
        """Counters and use of KV pages in host memory."""
        return self._host.stats

    @property
    def image_stats(self) -> ImageStats:
        """Counters and use of the encoder cache."""
        return self._images.stats

    def give(self, sequence: Sequence, reserve: int) -> bool:
        """Hold pages for all tokens so far, known prefixes included; False changes nothing.

        Rows of the images that are not in known prefixes belong to it.

        `reserve` pages must stay free. The sequence's num_computed then counts the known prefix;
        its first time also counts as a look-up in the cache.
        """
        total, size = len(sequence.token_ids), self._cache.page_size
        keys, matched, last = [], [], []
        if self.can_match(sequence):
            usable = (total - 1) // size  # at least one token is computed
            keys = self._chains[sequence].keys(sequence.token_ids, usable)
            matched = self._cache.match(keys)
            last = self._match_last(sequence) if len(matched) == usable else []
        brought = self._host.pin(keys[len(matched) :])
        num_cached = total - 1 if last else len(matched) * size
        matched += last
        needed = self.num_pages(total) - len(matched)
        waits = self._extents is not None and self._extents.want(needed + reserve)
        has_room = needed + reserve <= self._cache.num_free and not waits
        sequence.num_computed = num_cached + len(brought) * size
        if not has_room or not self._images.give(sequence):
            self._cache.free(matched)
            self._host.unpin()
            sequence.num_computed = 0
            return False
        fresh = self._cache.allocate(needed)
        assert fresh is not None
        if self._extents is not None:
            self._extents.matched(matched)
        self._bring_in(brought, fresh[: len(brought)])
        sequence.pages = matched + fresh
        self._registered[sequence] = len(matched) + len(brought)
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed
            if self.can_match(sequence):
                num_prompt = sequence.num_prompt
                self._cache.record(num_prompt, num_cached)
                self._host.record(num_prompt - num_cached, len(brought) * size)
        return True

    def _match_last(self, sequence: Sequence) -> list[int]:
        """Return the page of the last token where a task head answers, and nobody holds the page.

        A head samples nothing: only the last token is written to it, once more, with the same bits.
        """
        if not self._has_last(sequence):
            return []
        return self._cache.match_last(self._chains[sequence].last_key(sequence.token_ids))

    def _has_last(self, sequence: Sequence) -> bool:
        """Return whether the page of the last token saves a sequence anything."""
        is_alone = len(sequence.token_ids) % self._cache.page_size == 1
        return sequence.request.head is not None and not is_alone

    def _take_out(self, page: int, key: bytes) -> None:
        """Keep a full page in host memory; others only help who asks the same again."""
        if not is_part(key):
            self._host.take_out(page, key)

    def _bring_in(self, keys: SequenceOf[bytes], pages: SequenceOf[int]) -> None:
        """Fill held pages from the host before the next step; others may find them from now on."""
        self._host.bring_in(keys, pages)
        self._host.unpin()
        for key, page in zip(keys, pages, strict=True):
            self._cache.register(page, key)

    def grow(self, sequence: Sequence, count: int = 1) -> bool:
        """Hold pages for the next `count` tokens to compute; False (no change) without room."""
        computed, pages = sequence.num_computed + count, sequence.pages
        if computed <= len(pages) * self._cache.page_size:
            return True
        missing = self.num_pages(computed) - len(pages)
        if self._extents is not None and missing > self._cache.num_blank:
            self._extents.want(missing, urgent=True)
        fresh = self._cache.allocate(missing)
        if fresh is None:
            return False
        sequence.pages = pages + fresh
        return True

    def take_back(self, sequence: Sequence) -> None:
        """Take all pages from a sequence; full ones can be found until their place is needed."""
        self.register(sequence)
        self._register_last(sequence)
        self._images.take_back(sequence)
        del self._registered[sequence]
        self._cache.free(sequence.pages)
        sequence.pages = []

    def register_all(self, sequences: Iterable[Sequence]) -> None:
        """Do what `register` does for each; most have filled no page since."""
        if not self._cache.enabled:
            return
        size, registered = self._cache.page_size, self._registered
        for sequence in sequences:
            # No more than these tokens are known.
            if sequence.num_computed >= (registered[sequence] + 1) * size:
                self.register(sequence)

    def register(self, sequence: Sequence) -> None:
        """Let others find the pages that the steps planned so far fill with known tokens."""
        if not self._cache.enabled:
            return
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        done, full = self._registered[sequence], num_known // self._cache.page_size
        if full <= done:
            return
        keys = self._chains[sequence].keys(sequence.token_ids, full)
        for page, key in zip(sequence.pages[done:full], keys[done:], strict=True):
            self._cache.register(page, key)
        self._registered[sequence] = full

    def _register_last(self, sequence: Sequence) -> None:
        """Let the page of the last token be found, if all tokens have been planned."""
        total, pages = len(sequence.token_ids), sequence.pages
        is_done = sequence.num_computed == total and len(pages) == self.num_pages(total)
        if not (self._cache.enabled and is_done and self._has_last(sequence)):
            return
        if total % self._cache.page_size:  # else it is full, and registered
            self._cache.register(pages[-1], self._chains[sequence].last_key(sequence.token_ids))

    def can_match(self, sequence: Sequence) -> bool:
        """True if its prompt may come from the cache, which yields no log-probabilities."""
        return self._cache.enabled and sequence.request.sampling.prompt_logprobs is None

    def prompt_is_findable(self, sequence: Sequence) -> bool:
        """True if all prompt pages of a running sequence can serve another one."""
        return self._registered[sequence] >= (sequence.num_prompt - 1) // self._cache.page_size

    def follows(self, sequence: Sequence, siblings: Iterable[Sequence]) -> bool:
        """True if another choice of the request is about to compute this one's prompt pages."""
        if not sequence.index or not self.can_match(sequence):
            return False
        running = (s for s in siblings if s.state is SequenceState.RUNNING)
        first = next(running, None)
        return first is not None and not self.prompt_is_findable(first)

    def forget_adapters(self, digests: Collection[str]) -> None:
        """Never find a page of these adapters again. None of their sequences may hold any."""
        for digest in digests:
            self._faults[digest] = self._faults.get(digest, 0) + 1
        for sequence in self._chains:
            if sequence.request.adapter_digest in digests:
                if sequence in self._registered:
                    raise ValueError(f"{sequence.request.request_id} still holds pages.")
                self.open(sequence)

    def check_integrity(self, live: SequenceOf[Sequence], running: SequenceOf[Sequence]) -> None:
        """Raise AssertionError when pages and the sequences that are to hold them disagree."""
        self._cache.check_integrity([sequence.pages for sequence in running])
        if self._extents is not None:
            self._extents.check_integrity()
        self._images.check_integrity(running)
        self._host.check_integrity()
        assert set(self._chains) == set(live), "a sequence is lost or kept too long"
        assert set(self._registered) == set(running), "who runs and who holds pages disagree"
        for sequence in running:
            held = len(sequence.pages) * self._cache.page_size
            assert sequence.num_computed <= held, f"{sequence.num_computed} tokens in {held} places"
