"""Seams on fake modules: verified before anything is touched, applied whole or not at all."""

from __future__ import annotations

import functools
import sys
import types

import pytest

from kvcached.errors import KVCachedConfigError
from kvcached.integration.patching import PatchSet, Seam, SeamError, Versions

SUPPORTED = Versions("1.2", "1.4")


def original_add(a, b):
    return a + b


class Counter:
    def __init__(self, start):
        self.value = start

    def step(self, by=1):
        self.value += by
        return self.value


class Inherits(Counter):
    pass


@pytest.fixture
def engine(monkeypatch):
    """Two modules: `fake_engine` defines, `fake_user` captured `add` by two names."""
    module, user = types.ModuleType("fake_engine"), types.ModuleType("fake_user")
    module.add = original_add
    # A fresh class each time: `apply` writes into it.
    module.Counter = type("Counter", (), dict(vars(Counter)))
    module.Inherits = type("Inherits", (module.Counter,), {})
    module.constant = 3
    user.add, user.plus, user.unrelated = module.add, module.add, len
    monkeypatch.setitem(sys.modules, "fake_engine", module)
    monkeypatch.setitem(sys.modules, "fake_user", user)
    return module, user


def doubled(original):
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return 2 * original(*args, **kwargs)

    return replacement


def seam(target="fake_engine:add", parameters=("a", "b"), make=doubled, versions=SUPPORTED, **options):
    return Seam(target, make, parameters, versions, why="a test", **options)


STEP = "fake_engine:Counter.step"


@pytest.mark.parametrize("parameters", [("a", ...), ("a", "b", ...), (...,)])
def test_any_other_parameters(engine, parameters):
    PatchSet("fake", [seam(parameters=parameters)]).verify("1.2")


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("1.2", True),
        ("1.2.0", True),
        ("1.3.9+cpu", True),
        ("1.3rc1", True),
        ("1.1.9", False),
        ("1.4", False),
        ("1.10", False),
        ("2", False),
        ("dev", False),
        ("", False),
    ],
)
def test_versions(version, inside):
    assert (version in SUPPORTED) is inside


def test_apply_replaces_and_restore_puts_back(engine):
    module, _ = engine
    before = (module.add, module.Counter.step)
    patches = PatchSet("fake", [seam(), seam(STEP, ("self", "by"))])
    patches.verify("1.3.0")
    assert (module.add, module.Counter.step) == before, "verify touches nothing"
    patches.apply()
    assert module.add(1, 2) == 6
    assert module.Counter(0).step(4) == 8
    patches.restore()
    assert (module.add, module.Counter.step) == before
    assert not patches.applied


def test_second_apply_is_a_no_op(engine):
    module, _ = engine
    patches = PatchSet("fake", [seam()])
    patches.apply()
    replaced = module.add
    patches.apply()
    patches.verify("0.1")  # an applied set is not judged again
    assert module.add is replaced
    assert module.add(1, 2) == 6
    patches.restore()
    patches.restore()
    assert module.add is original_add


def test_another_set_does_not_patch_over_ours(engine):
    ours = PatchSet("fake", [seam()])
    ours.apply()
    with pytest.raises(SeamError, match="already replaced"):
        PatchSet("fake", [seam()]).verify("1.3")
    ours.restore()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (seam("fake_missing:add"), "fake_missing cannot be imported"),
        (seam("fake_engine:nothing"), "no nothing of its own"),
        (seam("fake_engine:Nothing.step"), "there is no Nothing"),
        (seam("fake_engine:Inherits.step", ("self", "by")), "no step of its own"),
        (seam("fake_engine:constant"), "expected a function, found int"),
        (seam(parameters=("a",)), r"expected parameters \(a\), found \(a, b\)"),
        (seam(parameters=("b", ...)), r"expected parameters \(b, \.\.\.\), found \(a, b\)"),
        (seam(parameters=("a", "b", "c", ...)), r"expected parameters \(a, b, c, \.\.\.\)"),
        (seam(STEP, ("self", "by", "more")), r"expected parameters \(self, by, more\), found \(self, by\)"),
        (seam(versions=Versions("1", "1.3")), "written for >=1,<1.3"),
    ],
)
def test_a_wrong_seam_is_named_and_nothing_is_patched(engine, wrong, message):
    module, user = engine
    patches = PatchSet("fake", [seam(also_rebind=True), wrong])
    with pytest.raises(SeamError, match=message) as raised:
        patches.verify("1.3")
    assert "fake 1.3: " in str(raised.value)
    assert wrong.target in str(raised.value)
    assert isinstance(raised.value, KVCachedConfigError)
    assert module.add is original_add
    assert user.add is original_add


def test_failure_in_the_middle_restores_all(engine):
    module, user = engine

    def broken(original):
        raise ValueError("cannot be made")

    step = module.Counter.step
    patches = PatchSet("fake", [seam(also_rebind=True), seam(STEP, ("self", "by"), broken)])
    with pytest.raises(SeamError, match="cannot be made"):
        patches.apply()
    assert module.add is original_add
    assert user.add is original_add
    assert module.Counter.step is step
    assert not patches.applied


def test_failure_while_rebinding_restores_all(engine, monkeypatch):
    module, user = engine

    class Frozen(types.ModuleType):
        def __setattr__(self, name, value):
            raise AttributeError("frozen")

    frozen = Frozen("fake_frozen")
    vars(frozen)["add"] = original_add
    monkeypatch.setitem(sys.modules, "fake_frozen", frozen)
    with pytest.raises(SeamError, match="frozen"):
        PatchSet("fake", [seam(also_rebind=True)]).apply()
    assert module.add is original_add
    assert user.add is original_add
    assert user.plus is original_add


def test_captured_names_are_rebound(engine):
    module, user = engine
    patches = PatchSet("fake", [seam(also_rebind=True)])
    patches.apply()
    assert user.add(1, 2) == user.plus(1, 2) == 6
    assert user.add is user.plus is module.add
    assert user.unrelated is len
    patches.restore()
    assert user.add is user.plus is original_add


def test_captured_names_stay_without_also_rebind(engine):
    _, user = engine
    patches = PatchSet("fake", [seam()])
    patches.apply()
    assert user.add is original_add
    patches.restore()


def test_restore_leaves_what_others_replaced_later(engine, caplog):
    module, _ = engine
    patches = PatchSet("fake", [seam()])
    patches.apply()
    module.add = later = doubled(module.add)
    patches.restore()
    assert module.add is later
    assert "replaced again by others" in caplog.text


def test_what_is_only_relied_on_is_verified_and_left(engine):
    module, _ = engine
    patches = PatchSet("fake", [seam(), seam(STEP, ("self", "by"), make=None)])
    step = module.Counter.step
    patches.verify("1.3")
    patches.apply()
    assert module.Counter.step is step
    assert "relied on: a test" in patches.describe()
    patches.restore()
    with pytest.raises(SeamError, match="expected parameters"):
        PatchSet("fake", [seam(STEP, ("self",), make=None)]).verify("1.3")


def test_describe_names_every_seam(engine):
    patches = PatchSet("fake", [seam(), seam(STEP, ("self", "by"))])
    text = patches.describe()
    assert "2 seams, not applied" in text
    assert "fake_engine:Counter.step (>=1.2,<1.4): a test" in text
