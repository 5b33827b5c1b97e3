"""What the process of the scheduler asks of the workers, be they in it or in processes of their own.

A question is a function of this module. It goes the way of vLLM's own work (`collective_rpc`), so that a worker answers it when it
has done all that was sent to it before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.errors import KVCachedError
from kvcached.integration.rank import RankMemory
from kvcached.integration.vllm import refusals

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.integration.plan import Plan, Survey

__all__ = ["ask", "check", "refuse", "reserve", "reserve_and_serve", "survey", "synchronise"]


@dataclass(frozen=True)
class _Answer:
    """Of one rank. An error travels in it as it is: vLLM would make a `RuntimeError` of its text."""

    value: Any = None
    error: Exception | None = None


def ask(executor: Any, question: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
    """The answer of each rank, in order.

    Args:
        executor: vLLM's.
        question: `question(worker, rank, *args)` of this module, called with each worker and its `RankMemory`.
        timeout_s: None: as long as the workers live.

    Raises:
        KVCachedError: what the first rank raised that could not answer; all have been asked.
        TimeoutError: they did not answer in time.
    """
    answers = executor.collective_rpc(_answer, timeout_s, (question, *args))
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.value for answer in answers]


def _answer(worker: Any, question: Callable[..., Any], *args: Any) -> _Answer:
    try:
        return _Answer(question(worker, RankMemory.of(worker.vllm_config.cache_config), *args))
    except KVCachedError as error:
        return _Answer(error=error)


def check(worker: Any, rank: RankMemory) -> None:
    """The model is loaded: can it be carried, and by which kernels is it read?

    Raises:
        KVCachedError: what stands in the way.
    """
    if rank.obstacle is not None:
        raise rank.obstacle
    specs = worker.get_kv_cache_spec()
    refusals.check_model(worker.vllm_config, specs)
    rank.attended_by(refusals.attention_backends(worker.vllm_config, specs))


def survey(worker: Any, rank: RankMemory) -> Survey:
    """What the worker's device asks for."""
    return rank.survey(str(worker.device))


def reserve(worker: Any, rank: RankMemory, plan: Plan) -> None:
    """Reserve the KV cache.

    Raises:
        KVCachedError: the driver refused.
    """
    rank.reserve(plan, str(worker.device))


def reserve_and_serve(worker: Any, rank: RankMemory, plan: Plan) -> str:
    """The same where the scheduler is in another process: the address at which it reaches this rank."""
    reserve(worker, rank, plan)
    return rank.serve(worker.rank)


def synchronise(worker: Any, rank: RankMemory) -> None:
    """Wait for the device."""
    rank.synchronise()


def refuse(worker: Any, rank: RankMemory | None) -> None:
    """The engine runs natively: nothing of us stays in this worker."""
    RankMemory.detach(worker.vllm_config.cache_config)
    if rank is not None:
        rank.refuse()
