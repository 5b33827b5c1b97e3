"""What is known of attention kernels over a KV cache with holes: one record for each backend, engine version and device.

`python -m kvcached.verify_kernels` makes them (docs/KERNELS.md); `KVCACHED_UNBACKED` and `KVCACHED_LAYOUT` consult them where they
are "auto". Two places hold them, as JSON lists of one form: the user's file, which is asked first, and the file that the wheel brings.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import importlib.resources
import json
import logging
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "KernelRecord",
    "device_name",
    "lookup",
    "machine_of",
    "records",
    "store",
    "this_machine",
    "user_file",
]

logger = logging.getLogger("kvcached")

SHIPPED = "verified_kernels.json"


@dataclass(frozen=True)
class KernelRecord:
    """What one backend of one engine version did on one device.

    Args:
        engine: "vllm" or "sglang". version: of the engine, compared exactly.
        backend: by the engine's name for it, with its own version where it has one ("FLASH_ATTN/3", "TRITON_ATTN", "triton").
        device: the GPU's name as torch gives it ("NVIDIA H200"), or "cpu".
        hole_safe: no row without memory was touched, whatever stale entries pointed at.
        top_ids: the highest block ids of an id space as large as the card gave the same bits as the same data in dense tensors.
        cases: batches that were run for both. detail: how it went, for people.
        when: the day of the run.
        machine: what kernels are chosen by there, `machine_of`. Empty in a record that holds for every device of that name.
    """

    engine: str
    version: str
    backend: str
    device: str
    hole_safe: bool
    top_ids: bool
    cases: int
    detail: str
    when: datetime.date
    machine: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What there is at most one record of in a file."""
        return (self.engine, self.version, self.backend, self.device, self.machine)

    def to_json(self) -> dict[str, Any]:
        """As a file holds it."""
        return asdict(self) | {"when": self.when.isoformat()}

    @classmethod
    def from_json(cls, entry: object) -> KernelRecord:
        """The record of an entry; members that it does not know are ignored. Raises `ValueError` saying what is wrong."""
        if not isinstance(entry, dict):
            raise ValueError(f"{_shown(entry)} is not an object")
        values: dict[str, Any] = {}
        for name, kind in _KINDS.items():
            value = entry.get(name, "" if name == "machine" else None)
            if type(value) is not kind:  # a bool is an int, but not here
                raise ValueError(f"{name} is {_shown(value)}, not {kind.__name__}")
            values[name] = value
        return cls(**values | {"when": datetime.date.fromisoformat(values["when"])})


_KINDS: dict[str, type] = {
    field.name: {"bool": bool, "int": int}.get(str(field.type), str) for field in fields(KernelRecord)
}


def lookup(engine: str, version: str, backend: str, device: str, machine: str) -> KernelRecord | None:
    """The record of exactly this backend and engine version that holds for a device; None where there is none.

    One of the device by its name is preferred; on a GPU one of another name but the same compute capability counts too, as the
    kernels are the same. Of several the user's own comes before a shipped one. A file that cannot be read is ignored with a
    warning.

    Args:
        engine, version, backend: as in the record.
        device: `device_name`. machine: `machine_of`.
    """
    candidates = [
        record
        for record in records()
        if (record.engine, record.version, record.backend) == (engine, version, backend)
    ]
    of_that_name = (r for r in candidates if r.device == device and r.machine in ("", machine))
    of_that_kind = (r for r in candidates if "cpu" not in (device, r.device) and r.machine == machine)
    return next(of_that_name, None) or next(of_that_kind, None)


def records() -> list[KernelRecord]:
    """All that are known, the user's own first. What cannot be read is left out with a warning."""
    known = []
    for name, text in _texts():
        try:
            entries = _entries(text)
        except ValueError as error:
            logger.warning(
                "kernel records ignored: %s: %s. Repair it or remove it, then verify again", name, error
            )
            continue
        for entry in entries:
            try:
                known.append(KernelRecord.from_json(entry))
            except ValueError as error:
                logger.warning("a kernel record of %s is ignored: %s", name, error)
    return known


def store(new: Iterable[KernelRecord]) -> Path:
    """Put records into the user's file, each in the place of an older one of the same key. Others stay, also those that this
    version cannot read. Processes that store at the same time keep each other's records. Returns the file.

    Raises:
        KVCachedConfigError: no home directory, or a file that is not a list of records; it is left as it is. OSError: the file
        cannot be written.
    """
    path = user_file()
    if path is None:
        raise KVCachedConfigError("there is no home directory to keep kernel records in: set XDG_CACHE_HOME")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        try:
            entries = _entries(path.read_bytes())
        except FileNotFoundError:
            entries = []
        except ValueError as error:
            raise KVCachedConfigError(
                f"{path} is not a file of kernel records ({error}): repair it or remove it"
            ) from error
        added = {record.key: record.to_json() for record in new}
        kept = [entry for entry in entries if _key(entry) not in added]
        _replace(path, json.dumps([*kept, *added.values()], indent=1) + "\n")
    return path


def user_file() -> Path | None:
    """Where this user's records are; None without a home directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache and os.path.isabs(cache):
        return Path(cache) / "kvcached" / "kernels.json"
    try:
        return Path.home() / ".cache" / "kvcached" / "kernels.json"
    except RuntimeError:
        return None


def device_name(device: str) -> str:
    """What records call a device ("cuda:N" or "cpu"): the GPU's name as torch gives it, or "cpu"."""
    if device == "cpu":
        return device
    import torch

    return str(torch.cuda.get_device_name(device))


def machine_of(device: str) -> str:
    """What kernels are chosen by on a device ("cuda:N" or "cpu"): a GPU's compute capability ("sm_90"), a CPU's model and
    instruction set.
    """
    if device == "cpu":
        return this_machine()
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def this_machine() -> str:
    """This machine's CPU as far as kernels are chosen by it: model and instruction set."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    model = facts.get("model name") or platform.processor() or platform.machine()
    instructions = " ".join(sorted((facts.get("flags") or facts.get("Features") or "").split()))
    return f"{model}, instructions {hashlib.sha256(instructions.encode()).hexdigest()[:8]}"


# ------------------------------------------------------------ files


def _texts() -> Iterator[tuple[str, bytes]]:
    """Name and content of each file, in the order of preference."""
    path = user_file()
    if path is not None:
        try:
            yield str(path), path.read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("kernel records ignored: %s", error)
    yield SHIPPED, importlib.resources.files("kvcached").joinpath(SHIPPED).read_bytes()


def _entries(text: bytes) -> list[Any]:
    """The entries of a file. Raises `ValueError` for one that is no JSON list."""
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError(f"{_shown(entries)} is not a list")
    return entries


def _key(entry: object) -> tuple[str, ...] | None:
    try:
        return KernelRecord.from_json(entry).key
    except ValueError:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A file of its own: the one with the records is replaced, and a lock on it would be a lock on what it was."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """Readers see the old content or the new, never a part. Mode 0600."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."
