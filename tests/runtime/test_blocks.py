"""The block manager: pages, prefix hashes, reference counts, eviction."""

from __future__ import annotations

import pytest

from runtime.blocks import BlockManager, page_digests, root_digest


def digests_of(tokens: list[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    return page_digests(root_digest(salt), tokens[: len(tokens) // page_size * page_size], page_size)


def test_digests_made_at_once_are_those_made_page_by_page() -> None:
    tokens = list(range(40))
    chain = [root_digest(b"a")]
    for start in range(0, 40, 8):
        chain += page_digests(chain[-1], tokens[start : start + 8], 8)
    assert page_digests(root_digest(b"a"), tokens, 8) == chain[1:] and len(set(chain)) == 6


def fill(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Take pages for ``tokens`` and register the full ones, as a request that has been computed would."""
    pages: list[int] = []
    assert blocks.grow(pages, len(tokens))
    for page, digest in zip(pages, digests_of(tokens, blocks.page_size, salt), strict=False):
        blocks.register(page, digest)
    return pages


@pytest.mark.parametrize("num_pages", [0, 1, -3, None, 2.0, True])
def test_b160_page_counts_that_cannot_serve_are_refused(num_pages: object) -> None:
    with pytest.raises(ValueError, match="num_pages: expected an integer of at least 2"):
        BlockManager(num_pages, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [0, -1, None])
def test_b160_page_sizes_that_cannot_serve_are_refused(page_size: object) -> None:
    with pytest.raises(ValueError, match="page_size"):
        BlockManager(4, page_size)  # type: ignore[arg-type]


def test_page_zero_is_never_given_away() -> None:
    blocks = BlockManager(4, 2)
    pages: list[int] = []
    assert blocks.grow(pages, 6)
    assert sorted(pages) == [1, 2, 3]
    assert blocks.usable_pages == 3 and blocks.num_available == 0


def test_b080_check_and_growth_agree_at_the_page_boundary() -> None:
    blocks = BlockManager(2, 4)
    pages: list[int] = []
    assert blocks.grow(pages, 3)
    assert blocks.grow(pages, 4), "the page has room for a fourth token"
    assert pages == [1]
    assert not blocks.grow(pages, 5), "a fifth needs a second page, and there is none"
    assert pages == [1], "a growth that fails changes nothing"


def test_growth_is_all_or_nothing() -> None:
    blocks = BlockManager(4, 4)
    pages: list[int] = []
    assert not blocks.grow(pages, 13)
    assert pages == [] and blocks.num_available == 3


def test_a_prefix_is_found_by_its_content_and_shared() -> None:
    blocks = BlockManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    first = fill(blocks, tokens)
    found = blocks.lookup(digests_of(tokens, 2))
    assert found == first[:2], "only full pages are found"
    blocks.take(found)
    blocks.check([first, found])
    blocks.release(first)
    blocks.check([found])


def test_equal_pages_after_different_prefixes_are_different() -> None:
    blocks = BlockManager(8, 2)
    fill(blocks, [1, 2, 9, 9])
    assert blocks.lookup(digests_of([3, 4, 9, 9], 2)) == []


def test_salts_keep_tenants_apart() -> None:
    blocks = BlockManager(8, 2)
    pages = fill(blocks, [1, 2, 3, 4], salt=b"alice")
    assert blocks.lookup(digests_of([1, 2, 3, 4], 2, salt=b"bob")) == []
    assert blocks.lookup(digests_of([1, 2, 3, 4], 2, salt=b"alice")) == pages


def test_b148_an_evicted_page_is_forgotten_both_ways() -> None:
    blocks = BlockManager(5, 2)
    first = fill(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    digests = digests_of([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert len(blocks.lookup(digests)) == 4
    blocks.release(first)
    second = fill(blocks, [10, 11, 12, 13])
    blocks.check([second])
    assert blocks.evictions == 2
    found = blocks.lookup(digests)
    assert len(found) == 2 and not set(found) & set(second), "the tail went first, the head can still be used"


def test_the_least_recently_used_prefix_goes_first() -> None:
    blocks = BlockManager(4, 2)
    old, new = fill(blocks, [1, 1]), fill(blocks, [2, 2])
    blocks.release(old)
    blocks.release(new)
    touched = blocks.lookup(digests_of([1, 1], 2))
    blocks.take(touched)
    blocks.release(touched)
    pages: list[int] = []
    blocks.grow(pages, 4)  # one free page, then one eviction
    assert blocks.lookup(digests_of([1, 1], 2)) != []
    assert blocks.lookup(digests_of([2, 2], 2)) == []


def test_free_pages_are_used_before_cached_ones() -> None:
    blocks = BlockManager(6, 2)
    kept = fill(blocks, [1, 2, 3, 4])
    blocks.release(kept)
    pages: list[int] = []
    blocks.grow(pages, 6)
    assert blocks.evictions == 0 and len(blocks.lookup(digests_of([1, 2, 3, 4], 2))) == 2


def test_two_pages_with_equal_content_leave_one_known() -> None:
    blocks = BlockManager(6, 2)
    first, second = fill(blocks, [1, 2]), fill(blocks, [1, 2])
    assert first != second
    blocks.release(second)
    blocks.check([first])
    assert blocks.lookup(digests_of([1, 2], 2)) == first


def test_without_a_prefix_cache_nothing_is_found() -> None:
    blocks = BlockManager(6, 2, prefix_cache=False)
    pages = fill(blocks, [1, 2])
    assert blocks.lookup(digests_of([1, 2], 2)) == []
    blocks.release(pages)
    blocks.check([])


def test_clearing_forgets_content_and_keeps_holders() -> None:
    blocks = BlockManager(6, 2)
    held, cached = fill(blocks, [1, 2]), fill(blocks, [3, 4])
    blocks.release(cached)
    blocks.clear_cache()
    blocks.check([held])
    assert blocks.lookup(digests_of([1, 2], 2)) == [] and blocks.lookup(digests_of([3, 4], 2)) == []
    blocks.release(held)
    blocks.check([])
