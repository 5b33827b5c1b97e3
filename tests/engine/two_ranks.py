"""vLLM engines of two ranks, whose workers are processes of their own. Each takes long to start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import psutil
from conftest import Engine, Outcome, plugin_installed, prompt, settings

if TYPE_CHECKING:
    from collections.abc import Callable

TWO_RANKS = {"tensor_parallel_size": 2, "enable_prefix_caching": True}
SHARED = prompt(99, 150)
#: Two passes; the second meets what the first has left in the prefix cache.
PASSES = [
    [prompt(i, 20 + 45 * i) for i in range(4)] + [SHARED + prompt(1, 30)],
    [SHARED + prompt(i, 20 + 10 * i) for i in range(2)] + [prompt(i, 20 + 45 * i) for i in range(2, 4)],
]
DEADLINE_S = 60


def run(engine: Engine) -> Outcome:
    """Both passes, from an empty prefix cache on."""
    assert engine.llm.reset_prefix_cache()
    outcome = Outcome()
    for prompts in PASSES:
        tokens, hits = engine.generate(prompts, max_tokens=12)
        outcome.tokens.append(tokens)
        outcome.hits.append(hits)
    return outcome


def ask(engine: Engine, question: Callable[..., Any], *args: Any) -> list[Any]:
    return engine.core.model_executor.collective_rpc(question, args=args)


def are_gone(pids: list[int]) -> bool:
    """Waits for these processes to end."""
    deadline = time.monotonic() + DEADLINE_S
    while any(map(_runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(model_folder: str, env: dict[str, str], **arguments: Any) -> Engine:
    plugin_installed()
    with settings(**env):
        return Engine(model_folder, **TWO_RANKS | arguments)
