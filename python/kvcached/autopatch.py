"""Imported by `kvcached_hooks.pth` at every start of a Python where `ENABLE_KVCACHED` is set.

vLLM's plug-in hook reaches the same place; this one is for processes that load no plug-ins (`VLLM_PLUGINS`,
engines built by hand). Either or both may run. Neither imports an engine: a hook waits for the engine to be
imported, and `KVCACHED_AUTOPATCH=false` keeps both from waiting;
`kvcached.integration.vllm.plugin.install()` then does it by hand.
"""

from __future__ import annotations

import logging

from kvcached.integration.vllm import plugin

try:
    plugin.register()
except Exception:  # this runs in every Python process of the environment, most of which are not ours to fail
    logging.getLogger("kvcached").warning("kvcached cannot hook into engines here", exc_info=True)
