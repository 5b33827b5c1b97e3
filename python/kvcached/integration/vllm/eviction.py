"""Which cached prefixes go when their memory is wanted: pure.

Memory goes back by the page, so a cached block is worth evicting only where all that its page holds can go with it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["choose_pages"]


def choose_pages(cached: Iterable[int], held: Sequence[int]) -> Iterator[int]:
    """Pages of which nothing is left once their cached blocks are evicted, the least recently used first. A page is as old as its
    youngest block: a prefix that was just used keeps its neighbours.

    Reads no more of `cached` than it needs for the pages that are asked for.

    Args:
        cached: page of each cached block, the least recently used block first.
        held: blocks that each page holds, cached or not.
    """
    seen: Counter[int] = Counter()
    for page in cached:
        seen[page] += 1
        if seen[page] == held[page]:
            yield page
