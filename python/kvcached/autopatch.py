"""Imported by `kvcached_hooks.pth` at every start of a Python where `ENABLE_KVCACHED` is set.

The engines' plug-in hooks reach the same places; this one is for processes that load no plug-ins (`VLLM_PLUGINS`,
`SGLANG_PLUGINS`, engines built by hand, Ray's actors). Either or both may run. Neither imports an engine: a hook
waits for the engine to be imported, and `KVCACHED_AUTOPATCH=false` keeps both from waiting;
`install()` of `kvcached.integration.vllm.plugin` or `.sglang.plugin` then does it by hand.
"""

from __future__ import annotations

import logging

from kvcached.integration.sglang import plugin as sglang
from kvcached.integration.vllm import plugin as vllm

try:
    vllm.register()
    sglang.register()
except Exception:  # this runs in every Python process of the environment, most of which are not ours to fail
    logging.getLogger("kvcached").warning("kvcached cannot hook into engines here", exc_info=True)
