"""A GPU that is shared, as the driver and torch would count it."""

from __future__ import annotations

from kvcached.integration.own_use import OwnUse

GIB = 1 << 30


class Device:
    """A GPU of 140 GiB with a neighbour; counts as the driver and torch would."""

    def __init__(self, *, neighbour: int, context: int = GIB // 2, nvml: bool) -> None:
        self.total, self.neighbour, self.context, self.nvml = 140 * GIB, neighbour, context, nvml
        self.reserved = 0

    def own_use(self) -> OwnUse:
        return OwnUse(
            reserved=lambda: self.reserved,
            device_info=lambda: (self.total - self.neighbour - self.context - self.reserved, self.total),
            by_process=lambda: self.context + self.reserved if self.nvml else None,
        )
