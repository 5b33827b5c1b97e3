"""Where vLLM lets us in: one trampoline on `Executor.__init__`.

vLLM calls `register` (entry point `vllm.general_plugins`) in every process it starts, front ends and model
inspection among them. Only where an engine runs is an executor constructed, and that before its worker, its
memory profile, its KV cache and its scheduler exist: there everything else is verified and put in place, or
nothing is. Settings are read at that moment too, so that each engine of a process has those of its own
start.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import Any

import wrapt

from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError
from kvcached.integration.patching import PatchSet, Seam, Versions
from kvcached.integration.vllm import native, refusals, seams
from kvcached.integration.vllm.memory import EngineMemory

__all__ = ["engine_patches", "install", "register"]

logger = logging.getLogger("kvcached")

_EXECUTOR = "vllm.v1.executor.abstract"


def register() -> None:
    """Entry point: `install`, if this environment asks for it. Called any number of times."""
    if _wanted():
        install()


def _wanted() -> bool:
    try:
        settings = Settings.from_env()
    except KVCachedConfigError:
        # Said where an engine starts, once, and not in every process.
        return os.environ.get("ENABLE_KVCACHED", "").lower() not in ("", "0", "false", "no", "off")
    return settings.enabled and settings.autopatch


def install() -> None:
    """Put the trampoline in place as soon as vLLM's executor is imported; now, if it already is."""
    wrapt.register_post_import_hook(_put_trampoline, _EXECUTOR)


def _put_trampoline(_module: object) -> None:
    try:
        _ENTRY.verify(_version())
        _ENTRY.apply()
    except KVCachedConfigError as error:
        native.decline(error)


def _executor_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any) -> None:  # noqa: N807
        memory = _prepare(self, vllm_config)
        original(self, vllm_config)
        if memory is None:
            return
        try:
            refusals.check_model(vllm_config, self.get_kv_cache_specs()[0])
        except KVCachedConfigError as error:
            native.run_natively(self, error)
            return
        # An engine that is dropped without a shutdown leaves nothing behind.
        weakref.finalize(self, memory.close).atexit = False

    return __init__


def _prepare(executor: Any, vllm_config: Any) -> EngineMemory | None:
    """Everything in place for this engine, or None and nothing changed."""
    EngineMemory.detach(vllm_config.cache_config)
    try:
        settings = Settings.from_env()
        if not settings.enabled:
            return None
        _log_from(settings.log_level)
        version = _version()
        patches = engine_patches(version, vllm_config.device_config.device_type)
        patches.verify(version)
        refusals.check_engine(vllm_config, type(executor))
        patches.apply()
    except Exception as error:  # an engine must not die of us, whatever it is
        native.decline(error)
        return None
    memory = EngineMemory(settings, f"vllm {version}")
    memory.attach(vllm_config.cache_config)
    return memory


@functools.cache
def engine_patches(version: str, device_type: str) -> PatchSet:
    """The seams of this process's engines: one set, applied once, whatever the number of engines."""
    return seams.patch_set(version, device_type)


def _version() -> str:
    from vllm.version import __version__

    return str(__version__)


def _log_from(level: str) -> None:
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [kvcached] %(message)s", "%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)


_ENTRY = PatchSet(
    "vllm",
    [
        Seam(
            f"{_EXECUTOR}:Executor.__init__",
            _executor_init,
            ("self", "vllm_config"),
            Versions("0", "1000"),
            "constructed only where an engine runs, before anything that we change",
        )
    ],
)
