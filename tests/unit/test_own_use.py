"""What this process uses of a device that it shares."""

from __future__ import annotations

import pytest

from kvcached.integration.own_use import MAX_REST_BYTES, OwnUse
from tests.devices import GIB, Device


@pytest.mark.parametrize("nvml", [True, False])
class TestOwnUse:
    def test_growth_is_this_process_alone(self, nvml):
        device = Device(neighbour=60 * GIB, nvml=nvml)
        own = device.own_use()
        start, total = own.info()
        assert total == 140 * GIB
        assert start == own.free_at_start >= 139 * GIB, "the neighbour's memory counts as free"
        device.reserved = 16 * GIB
        device.context += GIB // 4
        assert start - own.info()[0] == 16 * GIB + GIB // 4

    @pytest.mark.parametrize("change", [-50, 30])
    def test_neighbours_come_and_go(self, nvml, change):
        device = Device(neighbour=60 * GIB, nvml=nvml)
        own = device.own_use()
        start = own.info()[0]
        device.neighbour += change * GIB
        device.reserved = 16 * GIB
        grown = start - own.info()[0]
        assert 16 * GIB <= grown <= 16 * GIB + (0 if nvml else MAX_REST_BYTES)

    def test_never_negative(self, nvml):
        device = Device(neighbour=60 * GIB, nvml=nvml)
        own = device.own_use()
        device.neighbour = 0
        assert own.bytes() >= 0


def test_nvml_of_another_process_id_namespace_is_not_believed():
    """A process id that is ours only by accident."""
    own = OwnUse(
        reserved=lambda: 20 * GIB, device_info=lambda: (100 * GIB, 140 * GIB), by_process=lambda: 3 * GIB
    )
    assert own.bytes() == 20 * GIB
