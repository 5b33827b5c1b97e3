"""This process as others see it: one record a process, one row a pool, and its part of the devices that it shares."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from kvcached import _core
from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError, TermsError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Hardware", "discard_record", "hardware", "has_record", "process_record", "shares"]

logger = logging.getLogger("kvcached")

_lock = threading.Lock()
_records: dict[int, _core.InstanceRecord] = {}


class Hardware(NamedTuple):
    """A device by what it is, and not by the number that a process sees it under.

    `identity`: "GPU-<uuid>" or "host". `total_bytes`: what it has; of the host's memory what the host backend may use.
    """

    identity: str
    total_bytes: int


def hardware(device: str) -> Hardware:
    """Of "cuda:N", "hip:N" or "cpu". Raises `DriverUnavailableError` where there is no such driver."""
    return Hardware(_core.identity(device), _core.mem_info(device)[1])


def process_record(
    engine: str, device: str, on: Sequence[Hardware], page_bytes: int | None = None
) -> _core.InstanceRecord:
    """The record of this process, made on the first call under `KVCACHED_IPC_NAME` (default: the engine's name and the pid), with which
    the process takes part in the budget of its devices.

    Args:
        engine: what runs here, e.g. "vllm 0.29.0". device: as people see it: "cuda:N", "cuda:0,1" or "cpu".
        on: the device of each rank. page_bytes: of the memory that is about to be reserved, where that is known.

    Raises:
        KVCachedConfigError: a bad name, or one that another live process holds.
        TermsError: a limit or budget in which not even one page fits; a minimum that does not fit beside those of the others; another
            budget by which others live.
    """
    pid = os.getpid()  # a forked child is another instance
    with _lock:
        if pid not in _records:
            settings = Settings.from_env()
            if page_bytes is not None:
                settings.check_start(page_bytes)
            record = _core.InstanceRecord(
                settings.ipc_name or f"{engine.split()[0]}-{pid}",
                engine,
                device,
                limit_bytes=settings.limit_bytes,
                min_bytes=settings.min_bytes,
            )
            try:
                record.share(
                    list(on),
                    budget_bytes=settings.device_budget_bytes,
                    free_watermark_bytes=settings.free_watermark_bytes(device),
                    cache_idle_s=settings.cache_idle_s,
                )
            except KVCachedConfigError as error:
                record.close()
                raise TermsError(str(error)) from error
            except BaseException:
                record.close()
                raise
            # Module globals may outlive the interpreter's last chance to drop them.
            atexit.register(record.close)
            _records[pid] = record
        return _records[pid]


def has_record() -> bool:
    """Whether others see this process."""
    return os.getpid() in _records


def discard_record() -> None:
    """Nothing came of what the record of this process was made for: others see it no longer, and its minimum is theirs."""
    with _lock:
        record = _records.pop(os.getpid(), None)
    if record is not None:
        atexit.unregister(record.close)
        record.close()


def shares(record: _core.InstanceRecord, on: Sequence[Hardware]) -> bool:
    """Whether memory on these devices is charged to this process's part of them. It is not where an earlier engine of this process
    lies on others; that is said in a warning.
    """
    mine = record.shared_devices
    if mine == [each.identity for each in on]:
        return True
    if mine is not None:
        logger.warning(
            "another engine of this process lies on %s, this one on %s: its memory counts in no budget and no limit",
            ", ".join(mine),
            ", ".join(each.identity for each in on),
        )
    return False
