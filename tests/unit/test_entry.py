"""How an engine lets us in, on an engine that is made up."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.errors import KVCachedConfigError, TermsError
from kvcached.integration.entry import Entry, start
from kvcached.integration.patching import PatchSet, Seam, Versions
from kvcached.integration.refusal import refuse

if TYPE_CHECKING:
    from collections.abc import Callable

ANY = Versions("0", "1000")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_to(**variables: str) -> None:
        for name in (
            "ENABLE_KVCACHED",
            "KVCACHED_AUTOPATCH",
            "KVCACHED_STRICT",
            "KVCACHED_LIMIT",
            "KVCACHED_MIN",
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_to()
    return set_to


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with an `Engine` that takes arguments."""
    module = ModuleType("made_up_engine")

    class Engine:
        def __init__(self, arguments: object) -> None:
            self.arguments = arguments

    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def entry(*parameters: Any) -> Entry:
    def announced(original: Any) -> Any:
        def __init__(self: Any, arguments: object) -> None:  # noqa: N807
            original(self, ("elastic", arguments))

        return __init__

    return Entry(
        "made up", Seam("made_up_engine:Engine.__init__", announced, parameters, ANY, "here"), lambda: "1.0"
    )


@pytest.mark.parametrize(
    ("variables", "put"),
    [
        ({}, False),
        ({"ENABLE_KVCACHED": "true"}, True),
        ({"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "false"}, False),
        ({"ENABLE_KVCACHED": "true", "KVCACHED_NONSENSE": "1"}, True),
        ({"KVCACHED_NONSENSE": "1"}, False),
    ],
)
def test_the_seam_is_put_where_the_environment_asks_for_it(engine, environment, variables, put):
    environment(**variables)
    entry("self", "arguments").register()
    assert engine.Engine(7).arguments == (("elastic", 7) if put else 7)


def test_once_however_often_it_is_registered(engine, environment):
    environment(ENABLE_KVCACHED="true")
    made = entry("self", ...)
    for _ in range(3):
        made.register()
    made.install()
    assert engine.Engine(7).arguments == ("elastic", 7)


def test_another_engine_than_was_declared_runs_natively(engine, environment, caplog):
    environment(ENABLE_KVCACHED="true")
    entry("self", "something_else").register()
    assert engine.Engine(7).arguments == 7
    assert "something_else" in caplog.text and "natively" in caplog.text


def test_or_does_not_start_where_kvcached_is_insisted_on(engine, environment):
    """Not from `register`: SGLang swallows what a plug-in raises."""
    environment(ENABLE_KVCACHED="true", KVCACHED_STRICT="1")
    entry("self", "something_else").register()
    with pytest.raises(KVCachedConfigError, match="something_else"):
        engine.Engine(7)


def test_without_the_class_there_is_nobody_else_to_say_it(engine, environment):
    environment(ENABLE_KVCACHED="true", KVCACHED_STRICT="1")
    del engine.Engine
    with pytest.raises(KVCachedConfigError, match="there is no Engine"):
        entry("self", ...).register()


class TestStart:
    def begin(self, check: Callable[[], None] = lambda: None) -> Any:
        return start("made up", lambda: "1.0", lambda version: [PatchSet(f"made up {version}", [])], check)

    def test_an_engine_that_is_carried_starts_with_its_settings(self, environment):
        environment(ENABLE_KVCACHED="true", KVCACHED_PAGE_MB="4")
        launch = self.begin()
        assert (launch.name, launch.settings.page_mb) == ("made up 1.0", 4)

    def test_one_that_nobody_asked_about_does_not(self, environment):
        def never() -> None:
            pytest.fail("asked")

        assert self.begin(never) is None

    @pytest.mark.parametrize(
        "terms",
        [{"KVCACHED_LIMIT": "10GB"}, {"KVCACHED_LIMIT": "1M", "KVCACHED_MIN": "2M"}, {"KVCACHED_MIN": "all"}],
    )
    def test_terms_that_cannot_be_kept_end_the_start_whatever_strictness_says(self, environment, terms):
        environment(ENABLE_KVCACHED="true", KVCACHED_STRICT="0", **terms)
        with pytest.raises(TermsError):
            self.begin()

    @pytest.mark.parametrize("error", [None, RuntimeError("an engine must not die of us")])
    def test_one_that_is_refused_does_not(self, environment, caplog, error):
        def check() -> None:
            if error:
                raise error
            refuse("a feature", "do without")

        environment(ENABLE_KVCACHED="true")
        assert self.begin(check) is None
        assert ("a feature is not supported yet; do without" if error is None else "die of us") in caplog.text
        environment(ENABLE_KVCACHED="true", KVCACHED_STRICT="1")
        with pytest.raises(KVCachedConfigError):
            self.begin(check)
