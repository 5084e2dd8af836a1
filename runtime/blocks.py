"""The pages of the KV cache: who holds which, and which can be found again by their content. No torch.

A page is in one of three states: held (reference count above 0), cached (nobody holds it, its content can still be found by
its digest) or free (nothing worth keeping). Page 0 is reserved for padding and never given away.

A page's digest covers its tokens and, through its parent's digest, all tokens before it, so equal digests mean equal
prefixes. Only full pages have one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def root_digest(salt: bytes) -> bytes:
    """Where a chain begins. Chains with different salts never meet, so one tenant cannot probe another's prompts."""
    return blake2b(salt, digest_size=16, person=b"kv-page-root").digest()


def page_digests(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """The digests of the pages that ``tokens`` fill, each with the one before it as its parent.

    128 bits, not Python's ``hash``: a collision would show one request another's context.
    """
    data, width, digests = array("q", tokens).tobytes(), 8 * page_size, []
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=16).digest()
        digests.append(parent)
    return digests


class BlockManager:
    """Hands out pages, counts their holders, finds cached prefixes, evicts the least recently used."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        for name, value, least in (("num_pages", num_pages, 2), ("page_size", page_size, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least} (page 0 is reserved), got {value!r}")
        self.num_pages, self.page_size, self.prefix_cache = num_pages, page_size, prefix_cache
        self._refs = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the lowest page first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.evictions = 0

    @property
    def usable_pages(self) -> int:
        """Pages that requests can hold: all but the reserved one."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    def pages_needed(self, num_tokens: int, held: int) -> int:
        """Pages missing to store ``num_tokens`` when ``held`` are there. Every check and every growth asks here."""
        return max(0, -(-num_tokens // self.page_size) - held)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend ``pages`` until it stores ``num_tokens``. All or nothing; False when pages are missing."""
        needed, free, refs = self.pages_needed(num_tokens, len(pages)), self._free, self._refs
        if needed == 1 and free:  # as a decode asks, a dozen times a step
            page = free.pop()
            refs[page] = 1
            pages.append(page)
            return True
        if needed > self.num_available:
            return False
        if needed:
            taken = free[: -needed - 1 : -1]  # from the top of the stack
            del free[-needed:]
            taken += [self._evict() for _ in range(needed - len(taken))]
            for page in taken:
                refs[page] = 1
            pages += taken
        return True

    def release(self, pages: list[int]) -> None:
        """Drop one reference of each page and empty the list. The tail of a prefix becomes evictable before its head."""
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"page {page} released more often than taken"
            if self._refs[page] == 0:
                if self._digests[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None
        pages.clear()

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix of ``digests``, not yet taken."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, pages: Sequence[int]) -> None:
        """Add one reference to each page that ``lookup`` found."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def register(self, page: int, digest: bytes) -> None:
        """Let a held page be found by its content. Call it only once its K/V has certainly been written.

        Of two pages with equal content the first stays known; the other becomes free when it is released.
        """
        assert self._refs[page] > 0, f"page {page} registered while nobody holds it"
        if self.prefix_cache and self._digests[page] is None and digest not in self._page_of:
            self._digests[page] = digest
            self._page_of[digest] = page

    def clear_cache(self) -> None:
        """Forget all cached prefixes, e.g. after the weights have changed. Pages in use stay held, but are not found again."""
        self._page_of.clear()
        self._digests = [None] * self.num_pages
        self._free.extend(reversed(self._cached))
        self._cached.clear()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        digest = self._digests[page]
        assert digest is not None
        del self._page_of[digest]  # both ways, or a later lookup finds a page that holds other tokens
        self._digests[page] = None
        self.evictions += 1
        return page

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert every invariant, given the page lists of all requests. For tests and for debugging."""
        counts = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                counts[page] += 1
        assert counts == self._refs, "reference counts differ from the holders"
        assert counts[0] == 0, "the reserved page is held"
        idle = self._free + list(self._cached)
        assert len(set(idle)) == len(idle), "a page is idle twice"
        assert sorted(idle) == [page for page in range(1, self.num_pages) if counts[page] == 0], "pages are lost or shared"
        assert all(self._digests[page] is None for page in self._free), "a free page kept its digest"
        assert all(self._digests[page] is not None for page in self._cached), "a cached page lost its digest"
        known = {digest: page for page, digest in enumerate(self._digests) if digest is not None}
        assert known == self._page_of, "digests and pages do not match both ways"
