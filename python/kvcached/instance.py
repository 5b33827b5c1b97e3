"""This process as `kvctl` sees it: one record a process, one row a pool."""

from __future__ import annotations

import atexit
import os
import threading

from kvcached import _core
from kvcached.config import Settings

__all__ = ["process_record"]

_lock = threading.Lock()
_records: dict[int, _core.InstanceRecord] = {}


def process_record(engine: str, device: str) -> _core.InstanceRecord:
    """The record of this process, made on the first call under `KVCACHED_IPC_NAME` (default: the engine's name and the pid).

    Args:
        engine: what runs here, e.g. "vllm 0.29.0". device: "cuda:N" or "cpu".

    Raises:
        KVCachedConfigError: a bad name, or one that another live process holds.
    """
    pid = os.getpid()  # a forked child is another instance
    with _lock:
        if pid not in _records:
            name = Settings.from_env().ipc_name or f"{engine.split()[0]}-{pid}"
            record = _records[pid] = _core.InstanceRecord(name, engine, device)
            atexit.register(
                record.close
            )  # module globals may outlive the interpreter's last chance to drop them
        return _records[pid]
