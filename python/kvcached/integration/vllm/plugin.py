"""Where vLLM lets us in: the constructor of the executor.

vLLM calls `register` (entry point `vllm.general_plugins`) in every process it starts, front ends and model
inspection among them. Only where an engine runs is an executor constructed, and that before its worker, its
memory profile, its KV cache and its scheduler exist.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedConfigError
from kvcached.integration import entry
from kvcached.integration.memory import EngineMemory
from kvcached.integration.patching import Seam, Versions
from kvcached.integration.vllm import native, refusals, seams

if TYPE_CHECKING:
    from kvcached.integration.patching import PatchSet

__all__ = ["engine_patches", "install", "register"]


def _executor_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any) -> None:  # noqa: N807
        EngineMemory.detach(vllm_config.cache_config)
        memory = entry.start(
            "vllm",
            _version,
            lambda version: engine_patches(version, vllm_config.device_config.device_type),
            lambda: refusals.check_engine(vllm_config, type(self)),
        )
        if memory is None:
            original(self, vllm_config)
            return
        memory.attach(vllm_config.cache_config)
        original(self, vllm_config)
        try:
            specs = self.get_kv_cache_specs()[0]
            refusals.check_model(vllm_config, specs)
            memory.attended_by(refusals.attention_backends(vllm_config, specs))
        except KVCachedConfigError as error:
            native.run_natively(self, error)
            return
        # An engine that is dropped without a shutdown leaves nothing behind.
        weakref.finalize(self, memory.close).atexit = False

    return __init__


@functools.cache
def engine_patches(version: str, device_type: str) -> PatchSet:
    """The seams of this process's engines: one set, applied once, whatever the number of engines."""
    return seams.patch_set(version, device_type)


def _version() -> str:
    from vllm.version import __version__

    return str(__version__)


_ENTRY = entry.Entry(
    "vllm",
    Seam(
        "vllm.v1.executor.abstract:Executor.__init__",
        _executor_init,
        ("self", "vllm_config"),
        Versions("0", "1000"),
        "constructed only where an engine runs, before anything that we change",
    ),
    _version,
)
register = _ENTRY.register
install = _ENTRY.install
