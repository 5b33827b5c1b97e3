"""The declared seams against the SGLang that is installed."""

from __future__ import annotations

import importlib

import pytest
from sglang.version import __version__

from kvcached.integration.patching import SeamError
from kvcached.integration.sglang import seams


def target(seam):
    owner = importlib.import_module(seam.module)
    for part in seam.path:
        owner = getattr(owner, part)
    return owner


def test_every_seam_is_as_declared():
    seams.patch_set(__version__).verify(__version__)


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18", "0.5.23", "0.4.9", "1.0", "dev"])
def test_versions_that_are_not_carried(version):
    with pytest.raises(SeamError, match=rf"sglang {version} is not supported: use >=0\.5\.17,<0\.5\.18"):
        seams.patch_set(version)


def test_apply_is_idempotent_and_restore_puts_back():
    patches = seams.patch_set(__version__)
    before = {seam: target(seam) for seam in patches.seams}
    patches.verify(__version__)
    assert all(target(seam) is original for seam, original in before.items()), "verify touches nothing"
    patches.apply()
    try:
        replaced = {seam: target(seam) for seam in patches.seams}
        for seam in patches.seams:
            assert (replaced[seam] is before[seam]) is (seam.make is None), seam.target
        patches.apply()
        assert all(target(seam) is now for seam, now in replaced.items())
        with pytest.raises(SeamError, match="already replaced"):
            seams.patch_set(__version__).verify(__version__)
    finally:
        patches.restore()
    assert all(target(seam) is original for seam, original in before.items())
