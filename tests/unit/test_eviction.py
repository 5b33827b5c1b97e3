"""Which pages go when cached prefixes give memory back: the choice alone, against one that looks at everything."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kvcached.integration.vllm.eviction import choose_pages

PAGES = 6


def by_brute_force(cached: list[int], held: list[int]) -> list[int]:
    """Every page whose held blocks are all cached, by when its youngest block was used."""
    whole = [page for page in set(cached) if cached.count(page) == held[page]]
    return sorted(whole, key=lambda page: len(cached) - cached[::-1].index(page))


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Cached blocks by page, oldest first, and what each page holds beside."""
    cached = draw(st.lists(st.integers(0, PAGES - 1), max_size=24))
    count = Counter(cached)
    beside = draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=PAGES, max_size=PAGES))
    return cached, [count[page] + beside[page] for page in range(PAGES)]


@given(pools(), st.integers(0, PAGES + 1))
def test_the_least_recently_used_pages_that_empty_and_no_others(pool, wanted):
    cached, held = pool
    assert list(islice(choose_pages(cached, held), wanted)) == by_brute_force(cached, held)[:wanted]


@given(pools(), st.integers(1, PAGES))
def test_what_is_chosen_empties_at_the_least_cost(pool, wanted):
    """Of all choices of as many pages, the one that loses the oldest content: its youngest block is as old as can be."""
    cached, held = pool
    chosen = list(islice(choose_pages(cached, held), wanted))
    youngest = {page: place for place, page in enumerate(cached)}
    assert all(cached.count(page) == held[page] for page in chosen)
    kept = [page for page in by_brute_force(cached, held) if page not in chosen]
    assert all(youngest[gone] < youngest[stays] for gone in chosen for stays in kept)


@given(pools())
def test_reads_no_further_than_the_page_that_is_asked_for(pool):
    cached, held = pool
    read = iter(cached)
    for page in choose_pages(read, held):
        assert page not in list(read), "the youngest block of a page was the last that was read"
        break
