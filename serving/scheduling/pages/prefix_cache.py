"""Pages of the KV cache: their holders, and full pages that can be used again. No jax.

A full page is known by the SHA-256 of everything before and in it: the adapter's files, the
caller's salt, all tokens and images. Two requests share a page only when all of these agree, so
neither another adapter, nor other weights under the same name, nor another tenant can ever meet it.
"""

import array
import collections
import dataclasses
import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from serving.api.images import PromptImage

_PART = b"part"  # keys of pages that are not full begin with it, and are longer than others


def is_part(key: bytes) -> bool:
    """Return whether a key is that of a page that is not full."""
    return len(key) > hashlib.sha256().digest_size


class PrefixChain:
    """Keys of the full pages of one token sequence, computed as far as asked for.

    key[i] = SHA-256(key[i - 1] | tokens of page i | images in it), and key[-1] =
    SHA-256(adapter, salt). An image counts by its digest and by where in it the page begins, for
    every page that it reaches into.
    """

    def __init__(
        self,
        adapter_digest: str,
        salt: str,
        page_size: int,
        images: Sequence[PromptImage] = (),
    ):
        parts = [part.encode() for part in (adapter_digest, salt)]
        framed = b"".join([len(part).to_bytes(8, "little") + part for part in parts])
        self._root = hashlib.sha256(framed).digest()
        self._page_size, self._images = page_size, images
        self._keys: list[bytes] = []
        self._last: tuple[int, bytes] = -1, b""  # of so many tokens, as it was asked for last

    def keys(self, token_ids: Sequence[int], num_pages: int) -> list[bytes]:
        """Return the keys of the first pages; the tokens before must not have changed."""
        size = self._page_size
        if len(token_ids) < num_pages * size:
            raise ValueError(f"{num_pages} pages of {size} need more than {len(token_ids)} tokens.")
        for i in range(len(self._keys), num_pages):
            before = self._keys[-1] if i else self._root
            tokens = array.array("q", token_ids[i * size : (i + 1) * size])
            parts = before + tokens.tobytes() + self._images_of(i)
            self._keys.append(hashlib.sha256(parts).digest())
        return self._keys[:num_pages]

    def last_key(self, token_ids: Sequence[int]) -> bytes:
        """Return the key of the page of the last token, which need not be full.

        As all tokens it has one that no shorter or longer sequence finds, unless it is full.
        """
        if self._last[0] == len(token_ids):
            return self._last[1]
        count = len(token_ids) // self._page_size
        keys = self.keys(token_ids, count)
        if not (left := token_ids[count * self._page_size :]):
            return keys[-1]
        before = keys[-1] if count else self._root
        tokens = array.array("q", left).tobytes()
        key = _PART + hashlib.sha256(before + tokens + self._images_of(count)).digest()
        self._last = len(token_ids), key
        return key

    def _images_of(self, page: int) -> bytes:
        """Return what a page's key says of images: nothing where there are none."""
        if not self._images:
            return b""
        start, end = page * self._page_size, (page + 1) * self._page_size
        return b"".join(
            [
                image.image.digest + (start - image.start).to_bytes(8, "little", signed=True)
                for image in self._images
                if image.start < end and image.end > start
            ]
        )


@dataclasses.dataclass(frozen=True)
class PrefixCacheStats:
    """Prompt tokens looked up and found since the start."""

    queries: int
    hits: int


class PageWatch(Protocol):
    """Observer of what becomes of pages."""

    def taken(self, page: int, *, fresh: bool) -> None:
        """A page that was free is held; `fresh`: for other contents than it had."""
        ...

    def freed(self, page: int, *, cached: bool) -> None:
        """Nobody holds the page any more."""
        ...

    def blanked(self, page: int) -> None:
        """A cached page is blank now, as a page that is held has the same contents."""
        ...

    def places(self, count: int) -> list[int]:
        """Return the pages for a sequence's next ones: blank, and cached where these are too few.

        There are so many, and all of them are taken next.
        """
        ...


class PageCache:
    """Reference-counted pages; a full page nobody holds stays findable until its place is needed.

    A page is *held* (references > 0), *cached* (none, but it has a key; the least recently used
    goes first) or *blank*; which one is taken next a watch decides, if there is one. Shared pages
    are full, hence never written again, but for those of `match_last`. A page may also be *absent*,
    that is, have no memory: `bring` and `remove` say which.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_prefix_caching: bool = True,
        on_evict: Callable[[int, bytes], None] = lambda page, key: None,
        are_absent: bool = False,
    ):
        """`on_evict` hears of a page, and its key, that is about to be another's."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages} pages of {page_size} tokens cannot hold anything.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enabled = enable_prefix_caching
        self._on_evict = on_evict
        self._references = [0] * num_pages
        self._page_to_key: list[bytes | None] = [None] * num_pages
        self._key_to_page: dict[bytes, int] = {}
        self.watch: PageWatch | None = None
        self._blank = set[int]() if are_absent else set(range(num_pages))
        self._lowest = sorted(self._blank)  # a heap; others than blank ones may be in it
        self._num_absent = num_pages - len(self._blank)
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._queries = self._hits = 0

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold, 0 to 1; absent ones count as free."""
        return 1.0 - (self.num_free + self._num_absent) / self.num_pages

    @property
    def num_blank(self) -> int:
        """Pages that hold nothing."""
        return len(self._blank)

    @property
    def num_absent(self) -> int:
        """Pages that have no memory."""
        return self._num_absent

    def is_held(self, page: int) -> bool:
        """Return whether a sequence holds the page."""
        return self._references[page] > 0

    def is_blank(self, page: int) -> bool:
        """Return whether the page has memory and holds nothing."""
        return page in self._blank

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(queries=self._queries, hits=self._hits)

    def record(self, queries: int, hits: int) -> None:
        """Count a look-up that led to an admission, in tokens."""
        self._queries += queries
        self._hits += hits

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest known prefix, and hold each of them."""
        pages = []
        for key in keys:
            page = self._key_to_page.get(key)
            if page is None:
                break
            pages.append(page)
        for page in pages:
            if not self._references[page]:
                del self._cached[page]
                self._tell_taken(page, fresh=False)
            self._references[page] += 1
        return pages

    def match_last(self, key: bytes) -> list[int]:
        """Return the page of a last key, and hold it, or none where a sequence has it.

        The only holder may write a token of it once more, which gives the bits that are there.
        """
        page = self._key_to_page.get(key)
        return [] if page is None or self._references[page] else self.match([key])

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` pages of unknown content, or None (and no change) when there are too few."""
        if count > self.num_free:
            return None
        if self.watch is None:
            return [self._take(self._next()) for _ in range(count)]
        return [self._take(page) for page in self.watch.places(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Let go of a sequence's pages, given in order; later ones are forgotten first."""
        for page in reversed(pages):
            if not self._references[page]:
                raise ValueError(f"Page {page} is not held.")
            self._references[page] -= 1
            if self._references[page]:
                continue
            cached = self._page_to_key[page] is not None
            if cached:
                self._cached[page] = None
            else:
                self._put_blank(page)
            if self.watch is not None:
                self.watch.freed(page, cached=cached)

    def bring(self, pages: Iterable[int]) -> None:
        """Absent pages have memory now, and are blank."""
        for page in pages:
            self._put_blank(page)
            self._num_absent -= 1

    def remove(self, pages: Sequence[int]) -> None:
        """Have pages that nobody holds be absent; what is cached on them is forgotten."""
        if any(self._references[page] for page in pages):
            raise ValueError(f"A page of {pages} is held.")
        for page in pages:
            if page in self._blank:
                self._blank.discard(page)
            else:
                del self._cached[page]
                self._forget(page)
        self._num_absent += len(pages)

    def register(self, page: int, key: bytes) -> None:
        """Make a held page findable, which is full unless its key says otherwise.

        Of two equal pages that are held the first one stays findable. An equal page that nobody
        holds was not found, because a page before it has gone. It is blank from now on: so the
        pages of a prefix are as old as each other, and none lies twice.
        """
        known = self._key_to_page.get(key)
        if not self.enabled or known == page or (known is not None and self._references[known]):
            return
        if not self._references[page] or self._page_to_key[page] is not None:
            raise ValueError(f"Page {page} is not held or already known by another key.")
        if known is not None:
            self._page_to_key[known] = None
            del self._cached[known]
            self._put_blank(known)
            if self.watch is not None:
                self.watch.blanked(known)
        self._page_to_key[page] = key
        self._key_to_page[key] = page

    def check_integrity(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError when the books disagree, or disagree with the holders' pages."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a page is free twice"
        assert min(self._references) >= 0, "a page was freed twice"
        assert len(free) + self._num_absent == self._references.count(0), "pages are lost"
        if self.watch is None:
            assert self._blank <= set(self._lowest), "a blank page is not found"
        assert all(self._references[page] == 0 for page in free), "a free page is held"
        assert all(self._page_to_key[page] is None for page in self._blank), "blank with a key"
        assert all(self._page_to_key[page] for page in self._cached), "cached without a key"
        keyed = {page: key for page, key in enumerate(self._page_to_key) if key is not None}
        assert keyed == {p: k for k, p in self._key_to_page.items()}, "keys disagree"
        if holders is not None:
            counted = collections.Counter(page for pages in holders for page in pages)
            want = {page: count for page, count in enumerate(self._references) if count}
            assert counted == want, f"held by sequences {counted}, by the books {want}"

    def _next(self) -> int:
        """Return the lowest blank page, else the cached one that was used longest ago."""
        if not self._blank:
            return next(iter(self._cached))
        page = heapq.heappop(self._lowest)
        while page not in self._blank:
            page = heapq.heappop(self._lowest)
        return page

    def _take(self, page: int) -> int:
        """Hold a blank or cached page for other contents, and return it."""
        if page in self._blank:
            self._blank.discard(page)
        else:
            del self._cached[page]
            self._forget(page)
        self._references[page] = 1
        self._tell_taken(page, fresh=True)
        return page

    def _put_blank(self, page: int) -> None:
        self._blank.add(page)
        if self.watch is None:
            heapq.heappush(self._lowest, page)

    def _forget(self, page: int) -> None:
        """Let nobody find what is on a page that was cached."""
        key = self._page_to_key[page]
        assert key is not None
        del self._key_to_page[key]
        self._page_to_key[page] = None
        self._on_evict(page, key)

    def _tell_taken(self, page: int, *, fresh: bool) -> None:
        if self.watch is not None:
            self.watch.taken(page, fresh=fresh)
