"""Settings from the environment: what is accepted, and that nothing else passes silently."""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvcached.config import Settings, declared_settings, settings_table
from kvcached.errors import KVCachedConfigError, TermsError

NUMBERS = [
    "KVCACHED_PAGE_MB",
    "KVCACHED_MIN_RESERVED_MB",
    "KVCACHED_MAX_RESERVED_MB",
    "KVCACHED_HANDLE_CACHE_MB",
    "KVCACHED_MAX_CACHED_TOKENS",
]
SIZES = ["KVCACHED_MIN", "KVCACHED_LIMIT", "KVCACHED_DEVICE_BUDGET", "KVCACHED_FREE_WATERMARK"]
MOST_MB = 1 << 30


def refusal(env: dict[str, str]) -> str:
    with pytest.raises(KVCachedConfigError) as refused:
        Settings.from_env(env)
    return str(refused.value)


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert dataclasses.asdict(settings) == {
        "enabled": False,
        "autopatch": True,
        "strict": False,
        "ipc_name": None,
        "page_mb": None,
        "min_reserved_mb": 0,
        "max_reserved_mb": 48,
        "handle_cache_mb": 0,
        "layout": "auto",
        "unbacked": "auto",
        "min_bytes": 0,
        "limit": (1 << 64) - 1,
        "device_budget_bytes": None,
        "cache_idle_s": 60.0,
        "free_watermark": None,
        "max_cached_tokens": None,
        "page_order": "lowest",
        "ipc_timeout_s": 10.0,
        "log_level": "info",
        "python": "python3",
    }
    assert settings.page_bytes is None
    assert (settings.min_reserved_bytes, settings.max_reserved_bytes) == (0, 48 << 20)
    assert settings.limit_bytes is None
    assert (settings.free_watermark_bytes("cuda:1"), settings.free_watermark_bytes("cpu")) == (1 << 30, 0)


def test_every_setting_can_be_stated() -> None:
    stated = Settings.from_env(
        {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_AUTOPATCH": "off",
            "KVCACHED_STRICT": "1",
            "KVCACHED_IPC_NAME": "llama-8b.a_1",
            "KVCACHED_PAGE_MB": "16",
            "KVCACHED_MIN_RESERVED_MB": "128",
            "KVCACHED_MAX_RESERVED_MB": "0128",
            "KVCACHED_MIN": "512M",
            "KVCACHED_LIMIT": "1.5GiB",
            "KVCACHED_DEVICE_BUDGET": "80g",
            "KVCACHED_CACHE_IDLE_S": "0",
            "KVCACHED_FREE_WATERMARK": "100000",
            "KVCACHED_MAX_CACHED_TOKENS": "0",
            "KVCACHED_PAGE_ORDER": "highest",
            "KVCACHED_LOG_LEVEL": "DEBUG",
            "PATH": "/bin",
        }
    )
    assert (stated.enabled, stated.autopatch, stated.strict) == (True, False, True)
    assert (stated.page_mb, stated.min_reserved_mb, stated.max_reserved_mb) == (16, 128, 128)
    assert (stated.ipc_name, stated.page_order, stated.log_level) == ("llama-8b.a_1", "highest", "debug")
    assert (stated.page_bytes, stated.min_reserved_bytes) == (16 << 20, 128 << 20)
    assert (stated.min_bytes, stated.limit_bytes, stated.device_budget_bytes) == (
        512 << 20,
        3 << 29,
        80 << 30,
    )
    assert (stated.cache_idle_s, stated.max_cached_tokens) == (0, 0)
    assert stated.free_watermark_bytes("cuda:0") == stated.free_watermark_bytes("cpu") == 100000


def test_the_process_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if "KVCACHED" in v]:
        monkeypatch.delenv(variable)
    assert not Settings.from_env().enabled
    monkeypatch.setenv("ENABLE_KVCACHED", "yes")
    assert Settings.from_env().enabled


@pytest.mark.parametrize("variable", ["ENABLE_KVCACHED", "KVCACHED_AUTOPATCH", "KVCACHED_STRICT"])
def test_truth_has_four_words_and_falsehood_too(variable: str) -> None:
    field = {"ENABLE_KVCACHED": "enabled"}.get(variable, variable.removeprefix("KVCACHED_").lower())
    for word in ["true", "1", "yes", "on", "True", "ON"]:
        assert getattr(Settings.from_env({variable: word}), field) is True
    for word in ["false", "0", "no", "off", "False"]:
        assert getattr(Settings.from_env({variable: word}), field) is False
    for word in ["", "2", "truee", " true", "enable", "y"]:
        message = refusal({variable: word})
        assert f"{variable}={word!r} " in message
        assert "true, 1, yes, on, false, 0, no, off" in message


def test_a_malformed_value_is_explained() -> None:
    assert refusal({"KVCACHED_PAGE_MB": "16MiB"}) == (
        "KVCACHED_PAGE_MB='16MiB' is not accepted: give a whole number from 1 to 1073741824 (unit: MiB), "
        "or unset it for the default (chosen for the model)"
    )
    assert refusal({"KVCACHED_LOG_LEVEL": "loud"}) == (
        "KVCACHED_LOG_LEVEL='loud' is not accepted: give debug, info, warning, error, "
        "or unset it for the default (info)"
    )
    assert "KVCACHED_PAGE_MB='0' " in refusal({"KVCACHED_PAGE_MB": "0"})
    assert refusal({"KVCACHED_IPC_TIMEOUT": "soon"}) == (
        "KVCACHED_IPC_TIMEOUT='soon' is not accepted: give seconds from 0.1 to 3600 (unit: s), "
        "or unset it for the default (10)"
    )
    for text in ("0", "0.05", "3601", "-1", "nan", "inf", "1e1", " 1", "1_0", "1."):
        assert f"KVCACHED_IPC_TIMEOUT={text!r} " in refusal({"KVCACHED_IPC_TIMEOUT": text})
    assert Settings.from_env({"KVCACHED_IPC_TIMEOUT": "0.25"}).ipc_timeout_s == 0.25
    assert "KVCACHED_PAGE_ORDER='random' " in refusal({"KVCACHED_PAGE_ORDER": "random"})
    assert refusal({"KVCACHED_LIMIT": "10GB"}) == (
        "KVCACHED_LIMIT='10GB' is not accepted: give none, a size up to 1024T: bytes, or with a binary unit "
        "(`512M`, `1.5GiB`) (unit: bytes), or unset it for the default (none)"
    )
    assert "give seconds from 0 to 86400 " in refusal({"KVCACHED_CACHE_IDLE_S": "86401"})


@pytest.mark.parametrize("variable", SIZES)
def test_sizes_are_bytes_or_have_a_binary_unit(variable: str) -> None:
    def bytes_of(text: str) -> int:
        settings = Settings.from_env({variable: text})
        return {
            "KVCACHED_MIN": settings.min_bytes,
            "KVCACHED_LIMIT": settings.limit_bytes,
            "KVCACHED_DEVICE_BUDGET": settings.device_budget_bytes,
            "KVCACHED_FREE_WATERMARK": settings.free_watermark_bytes("cuda:0"),
        }[variable]

    accepted = {
        "0": 0,
        "0M": 0,
        "123456789": 123456789,
        "1k": 1024,
        "512M": 512 << 20,
        "512mib": 512 << 20,
        "1.5G": 3 << 29,
        "0.000001K": 0,
        "0.25TiB": 1 << 38,
        "1024T": 1 << 50,
        str(1 << 50): 1 << 50,
    }
    assert {text: bytes_of(text) for text in accepted} == accepted
    refused = [
        "",
        "M",
        "-1",
        "+1M",
        "1.5",
        "1.M",
        ".5M",
        "1 M",
        " 1M",
        "1M ",
        "1e3",
        "1_0M",
        "1MB",
        "1B",
        "1iB",
    ]
    refused += [
        "nan",
        "inf",
        "1,5G",
        "1P",
        str((1 << 50) + 1),
        "1025T",
        "1K\n",
        "1\u212a",
        "\u0661M",
        "9" * 5000,
    ]
    for text in refused:
        assert refusal({variable: text}).startswith(f"{variable}=")
    if variable == "KVCACHED_LIMIT":
        assert Settings.from_env({variable: "None"}).limit_bytes is None
    else:
        assert "is not accepted" in refusal({variable: "none"})


@given(
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
    st.sampled_from(["KVCACHED_LIMIT", "KVCACHED_DEVICE_BUDGET"]),
)
def test_a_limit_or_budget_is_not_below_the_minimum(least: int, most: int, variable: str) -> None:
    env = {"KVCACHED_MIN": f"{least}K", variable: f"{most}K"}
    if most < least:
        assert refusal(env) == (
            f"{variable} ({most << 10} bytes) is below KVCACHED_MIN ({least << 10} bytes): raise the one or lower the other"
        )
    else:
        assert Settings.from_env(env).min_bytes == least << 10


@pytest.mark.parametrize("variable", ["KVCACHED_LIMIT", "KVCACHED_DEVICE_BUDGET"])
def test_an_engine_needs_a_page_and_its_reserve(variable: str) -> None:
    page = 2 << 20
    Settings.from_env({variable: "2M"}).check_start(page)
    Settings.from_env({}).check_start(page)
    with pytest.raises(TermsError) as refused:
        Settings.from_env({variable: "2097151"}).check_start(page)
    assert str(refused.value) == (
        f"{variable} (2097151 bytes) is below what an engine needs to start, 2097152 bytes: a page of 2097152 bytes. "
        "Raise it, or set KVCACHED_PAGE_MB to smaller pages"
    )
    reserve = {"KVCACHED_MIN_RESERVED_MB": "3"}
    Settings.from_env({variable: "6M"} | reserve).check_start(page)
    with pytest.raises(TermsError, match="a page of 2097152 bytes and KVCACHED_MIN_RESERVED_MB"):
        Settings.from_env({variable: "5M"} | reserve).check_start(page)


@pytest.mark.parametrize("name", ["", ".", ".hidden", "a/b", "a b", "ä", "a\n", "n" * 65])
def test_a_bad_instance_name_is_refused(name: str) -> None:
    assert "KVCACHED_IPC_NAME=" in refusal({"KVCACHED_IPC_NAME": name})


def test_the_longest_instance_name_is_accepted() -> None:
    assert Settings.from_env({"KVCACHED_IPC_NAME": "n" * 64}).ipc_name == "n" * 64


def test_the_maximum_is_not_below_the_minimum() -> None:
    message = refusal({"KVCACHED_MIN_RESERVED_MB": "65"})  # the default maximum counts too
    assert message == (
        "KVCACHED_MAX_RESERVED_MB (48 MiB) is below KVCACHED_MIN_RESERVED_MB (65 MiB): "
        "raise the one or lower the other"
    )
    assert Settings.from_env({"KVCACHED_MIN_RESERVED_MB": "48"}).min_reserved_mb == 48


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("KVCACHED_PAGE_SIZE_MB", "KVCACHED_PAGE_MB"),
        ("KVCACHED_MAX_RESERVED", "KVCACHED_MAX_RESERVED_MB"),
        ("KVCACHED_MIN_RESERVE_MB", "KVCACHED_MIN_RESERVED_MB"),
        ("KVCACHED_LOGLEVEL", "KVCACHED_LOG_LEVEL"),
        ("KVCACHED_ENABLE", "ENABLE_KVCACHED"),
        ("KVCACHED_page_mb", "KVCACHED_PAGE_MB"),
        ("KVCACHED_LIMIT_MB", "KVCACHED_LIMIT"),
        ("KVCACHED_CACHE_IDLE", "KVCACHED_CACHE_IDLE_S"),
    ],
)
def test_an_unknown_variable_of_ours_names_the_nearest(unknown: str, nearest: str) -> None:
    assert refusal({unknown: "1"}) == (
        f"{unknown!r} is not a setting of kvcached; the nearest is {nearest}. Rename or unset it"
    )


def test_variables_of_others_are_not_ours() -> None:
    assert Settings.from_env({"KVCACHE_SIZE": "x", "MY_KVCACHED_X": "x", "kvcached_x": "x"}) == Settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().page_mb = 3  # type: ignore[misc]


def test_every_field_is_declared_once_with_what_a_reader_needs() -> None:
    declared = declared_settings()
    assert len(declared) == len(dataclasses.fields(Settings)) == len({s.variable for s in declared})
    for setting in declared:
        assert "KVCACHED" in setting.variable
        assert all([setting.default, setting.kind.accepts, setting.meaning])
        assert setting.variable.endswith("_MB") == (setting.unit == "MiB")
        assert (setting.variable in SIZES) == (setting.unit == "bytes")


def test_the_document_shows_the_declared_table() -> None:
    document = Path(__file__).parents[2] / "docs" / "SETTINGS.md"
    assert settings_table() in document.read_text(encoding="utf-8")


def is_number(text: str, least: int) -> bool:
    plain = 0 < len(text) <= 10 and set(text) <= set("0123456789")
    return plain and least <= int(text) <= MOST_MB


@given(st.sampled_from(NUMBERS), st.text(max_size=30) | st.integers().map(str) | st.floats().map(str))
@example("KVCACHED_PAGE_MB", "9" * 5000)  # int() has a limit of its own on digits
@example("KVCACHED_PAGE_MB", "\N{ARABIC-INDIC DIGIT FOUR}")
@example("KVCACHED_PAGE_MB", "1_0")
@example("KVCACHED_PAGE_MB", "16\n")
@example("KVCACHED_PAGE_MB", "\udcff")
@example("KVCACHED_MIN_RESERVED_MB", "-0")
def test_a_malformed_number_is_a_config_error_and_nothing_else(variable: str, text: str) -> None:
    assume(not is_number(text, least=1 if variable == "KVCACHED_PAGE_MB" else 0))
    message = refusal({variable: text})
    assert message.startswith(f"{variable}=")
    assert len(message) < 600
    assert message.isprintable()


@given(st.integers(0, MOST_MB), st.integers(0, MOST_MB))
def test_every_pair_of_reserves_is_taken_or_refused(least_mb: int, most_mb: int) -> None:
    env = {"KVCACHED_MIN_RESERVED_MB": str(least_mb), "KVCACHED_MAX_RESERVED_MB": str(most_mb)}
    if most_mb < least_mb:
        assert "raise the one or lower the other" in refusal(env)
    else:
        settings = Settings.from_env(env)
        assert (settings.min_reserved_bytes, settings.max_reserved_bytes) == (least_mb << 20, most_mb << 20)
        assert settings.max_reserved_bytes < 1 << 63


@given(st.dictionaries(st.text(max_size=20).map("KVCACHED_".__add__), st.text(max_size=20), max_size=4))
def test_no_environment_raises_anything_else(env: dict[str, str]) -> None:
    with contextlib.suppress(KVCachedConfigError):
        Settings.from_env(env)
