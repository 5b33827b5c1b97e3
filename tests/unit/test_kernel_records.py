"""Records of kernels: what is stored is found, by exactly its key, and nothing of others is ever lost."""

from __future__ import annotations

import datetime
import json
import logging
import multiprocessing
import stat
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcached import kernel_records
from kvcached.errors import KVCachedConfigError
from kvcached.kernel_records import KernelRecord, lookup, records, store, this_machine, user_file

if TYPE_CHECKING:
    from pathlib import Path

H200 = KernelRecord(
    engine="vllm",
    version="0.29.0",
    backend="FLASH_ATTN/3",
    device="NVIDIA H200",
    hole_safe=True,
    top_ids=True,
    cases=450,
    detail="holes: 150 cases; top ids: 300 cases",
    when=datetime.date(2026, 1, 2),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without records, and a wheel without any."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped(monkeypatch, tmp_path, [])
    return tmp_path / "kvcached" / "kernels.json"


def shipped(monkeypatch: pytest.MonkeyPatch, folder: Path, entries: Any) -> None:
    """Have the wheel bring these."""
    (folder / "wheel").mkdir(exist_ok=True)
    (folder / "wheel" / kernel_records.SHIPPED).write_text(json.dumps(entries))
    monkeypatch.setattr(kernel_records.importlib.resources, "files", lambda package: folder / "wheel")


def find(record: KernelRecord) -> KernelRecord | None:
    machine = this_machine() if record.device == "cpu" else "sm_90"
    return lookup(record.engine, record.version, record.backend, record.device, machine)


def changed(record: KernelRecord, **members: Any) -> KernelRecord:
    return KernelRecord(**vars(record) | members)


words = st.text(max_size=12)
some_records = st.builds(
    KernelRecord,
    engine=st.sampled_from(["vllm", "sglang"]),
    version=words,
    backend=words,
    device=st.sampled_from(["cpu", "NVIDIA H200", "é"]),
    hole_safe=st.booleans(),
    top_ids=st.booleans(),
    cases=st.integers(0, 10**6),
    detail=words,
    when=st.dates(),
    machine=st.sampled_from(["", this_machine(), "another"]),
)


@given(st.lists(st.lists(some_records, max_size=4), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_what_is_stored_last_under_a_key_is_what_is_known(
    cache: Path, stores: list[list[KernelRecord]]
) -> None:
    cache.unlink(missing_ok=True)
    expected: dict[tuple[str, ...], KernelRecord] = {}
    for batch in stores:
        store(batch)
        expected |= {record.key: record for record in batch}
    assert {record.key: record for record in records()} == expected
    assert len(records()) == len(expected)


def test_nothing_is_known_at_first() -> None:
    assert find(H200) is None
    assert records() == []


def test_a_gpus_record_holds_for_others_of_its_compute_capability() -> None:
    def found(device: str, machine: str) -> KernelRecord | None:
        return lookup(H200.engine, H200.version, H200.backend, device, machine)

    of_kind = changed(H200, machine="sm_90")
    store([of_kind])
    assert found("NVIDIA H100", "sm_90") == found("NVIDIA H200", "sm_90") == of_kind
    assert found("NVIDIA A100", "sm_80") is None
    assert found("cpu", "sm_90") is None  # no CPU is called so, and none counts
    own = changed(H200, device="NVIDIA H100", machine="sm_90", hole_safe=False)
    store([own])
    assert found("NVIDIA H100", "sm_90") == own  # by its own name first
    assert found("NVIDIA H200", "sm_90") == of_kind


@pytest.mark.parametrize("member", ["engine", "version", "backend", "device"])
def test_a_record_holds_for_exactly_what_it_names(member: str) -> None:
    store([H200])
    assert find(H200) == H200
    assert find(changed(H200, **{member: getattr(H200, member) + "0"})) is None


def test_the_file_is_the_users_own(cache: Path) -> None:
    assert store([H200]) == cache == user_file()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_the_users_record_is_preferred_to_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped(monkeypatch, tmp_path, [H200.to_json()])
    assert find(H200) == H200
    own = changed(H200, hole_safe=False)
    store([own])
    assert find(H200) == own


def test_a_record_of_a_cpu_holds_for_its_machine_and_one_without_a_machine_for_all() -> None:
    cpu = changed(H200, device="cpu", machine="another")
    store([cpu])
    assert find(cpu) is None
    here = changed(cpu, machine=this_machine())
    store([here])
    assert find(cpu) == here
    assert len(records()) == 2
    everywhere = changed(cpu, machine="", backend="OTHER")
    store([everywhere])
    assert find(everywhere) == everywhere


def test_a_machine_is_known_by_its_model_and_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(text: str) -> str:
        with mock.patch.object(kernel_records.Path, "read_text", return_value=text):
            return this_machine()

    one = machine("model name\t: Some CPU\nflags\t: avx2 avx512f\nmodel name\t: Some CPU\n")
    assert one.startswith("Some CPU, instructions ")
    assert machine("model name: Some CPU\nflags: avx512f avx2\n") == one
    assert machine("model name: Some CPU\nflags: avx2\n") != one
    with mock.patch.object(kernel_records.Path, "read_text", side_effect=OSError):
        assert this_machine()


@pytest.mark.parametrize("content", ["", "{", "{}", "null", '"list"', "\xff\xfe"])
def test_a_malformed_file_is_ignored_with_a_warning_and_never_overwritten(
    cache: Path,
    content: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped(monkeypatch, tmp_path, [H200.to_json()])
    cache.parent.mkdir()
    cache.write_bytes(content.encode("latin-1"))
    with caplog.at_level(logging.WARNING, "kvcached"):
        assert find(H200) == H200
    (warning,) = caplog.messages
    assert str(cache) in warning
    assert "remove it" in warning
    with pytest.raises(KVCachedConfigError, match="repair it or remove it") as refused:
        store([H200])
    assert str(cache) in str(refused.value)
    assert cache.read_bytes() == content.encode("latin-1")
    assert [path.name for path in cache.parent.iterdir() if path.suffix != ".lock"] == [cache.name]


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {**H200.to_json(), "hole_safe": 1},
        {**H200.to_json(), "cases": True},
        {**H200.to_json(), "when": "yesterday"},
        {**H200.to_json(), "version": None},
    ],
)
def test_an_entry_that_cannot_be_read_is_ignored_and_kept(
    cache: Path, entry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text(json.dumps([entry]))
    with caplog.at_level(logging.WARNING, "kvcached"):
        assert find(H200) is None
    assert str(cache) in caplog.text
    store([H200])
    assert find(H200) == H200
    assert json.loads(cache.read_text()) == [entry, H200.to_json()]


def test_an_entry_of_a_later_version_is_read_and_keeps_its_members(cache: Path) -> None:
    later = {**H200.to_json(), "nodes": 4}
    cache.parent.mkdir()
    cache.write_text(json.dumps([later]))
    assert find(H200) == H200
    store([changed(H200, backend="TRITON_ATTN")])
    assert json.loads(cache.read_text())[0] == later


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "kvcached"):
        assert find(H200) is None
    assert str(cache) in caplog.text


def _store_many(backend: str, count: int) -> None:
    for i in range(count):
        store([changed(H200, backend=f"{backend}{i}")])


def test_concurrent_writers_keep_each_others_records() -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_store_many, args=(name, 8)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {record.backend for record in records()} == {f"{name}{i}" for name in "abcd" for i in range(8)}


def test_a_write_that_fails_leaves_the_old_records(cache: Path) -> None:
    store([H200])
    with (
        mock.patch.object(kernel_records.os, "replace", side_effect=OSError("disk full")),
        pytest.raises(OSError, match="disk full"),
    ):
        store([changed(H200, backend="other")])
    assert records() == [H200]
    assert sorted(path.name for path in cache.parent.iterdir()) == ["kernels.json", "kernels.lock"]


@pytest.mark.parametrize("elsewhere", ["", "relative/path"])
def test_without_a_usable_setting_the_home_directory_is_used(
    elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_file() == tmp_path / ".cache" / "kvcached" / "kernels.json"


def test_without_a_home_directory_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    with mock.patch.object(kernel_records.Path, "home", side_effect=RuntimeError("no home")):
        assert find(H200) is None
        with pytest.raises(KVCachedConfigError, match="XDG_CACHE_HOME"):
            store([H200])


def test_what_the_wheel_brings_can_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    text = kernel_records.importlib.resources.files("kvcached").joinpath(kernel_records.SHIPPED).read_text()
    entries = json.loads(text)
    assert [KernelRecord.from_json(entry).to_json() for entry in entries] == entries
