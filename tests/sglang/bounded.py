"""A pool on a device that others use too: it has memory for so many pages and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached import _core

if TYPE_CHECKING:
    import numpy as np


class BoundedPool(_core.Pool):
    """Memory for `budget_pages` pages, which may change at any time. Credit is what was left when the device was asked."""

    budget_pages = 1 << 20
    _credit_pages = 0

    def _mapped(self) -> int:
        assert self.quiesce()  # what is on its way back is room
        return len(self.ftensor.mapped_pages())

    def _room(self) -> int:
        return max(0, self.budget_pages - self._mapped())

    def at_most(self) -> int:
        """Blocks that can be had with the memory that there is."""
        return min(self.available_size(), self.backed_size() + self._room() * self.geometry.blocks_per_page)

    def refused(self) -> None:
        """Called where memory could not be had."""

    def _settle_credit(self, before: int, refused: bool) -> None:
        self._credit_pages = 0 if refused else max(0, self._credit_pages - (self._mapped() - before))
        if refused:
            self.refused()

    def refresh_credit(self, leave_bytes: int = 0) -> int:
        super().refresh_credit(leave_bytes)
        self._credit_pages = self._room()
        return self.promised_size()

    def promised_size(self) -> int:
        covered = self._credit_pages * self.geometry.blocks_per_page
        return min(self.available_size(), self.backed_size() + covered)

    def alloc(self, n: int) -> list[int] | None:
        before = self._mapped()
        ids = super().alloc(n) if n <= self.at_most() else None
        self._settle_credit(before, refused=ids is None)
        return ids

    def alloc_into(self, out: np.ndarray) -> bool:
        ids = self.alloc(len(out))
        if ids is not None:
            out[:] = ids
        return ids is not None

    def reserve_demand(self, n: int) -> int:
        before = self._mapped()
        on_hand = super().reserve_demand(min(n, self.at_most()))
        self._settle_credit(before, refused=on_hand < n)
        return on_hand
