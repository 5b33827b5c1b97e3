"""The public package kvcached 0.1.6, to compare with: a black box, by the functions that it documents.

Their names are those of our own API, their exact signatures are not known: what a call takes is found out by calling it, or by
`inspect.signature`, and what was taken is told.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PEER_PAGE_BYTES = 2 << 20  # in each buffer
FORM_CHARS = 400
CXX_RUNTIME = "libstdc++.so.6"


def environment(folder: str) -> dict[str, str]:
    """Of a process of the peer's: ours is not on its path, and nothing of it acts on engines.

    The peer's library brings a C++ runtime of its own, which dies in the first number that it prints unless the system's is
    there before it.
    """
    env = {key: value for key, value in os.environ.items() if "KVCACHED" not in key}
    return env | {"PYTHONPATH": folder, "LD_PRELOAD": CXX_RUNTIME}


def preload(env: dict[str, str], library: str) -> None:
    """Load this one too, before all others."""
    env["LD_PRELOAD"] = " ".join([library, *env.get("LD_PRELOAD", "").split()])


def call_any(
    function: Callable[..., Any],
    *forms: tuple[tuple[Any, ...], dict[str, Any]],
    taken: dict[str, str] | None = None,
) -> Any:
    """Calls it in the first form that its signature takes, which is noted in `taken`."""
    errors = []
    for arguments, keywords in forms:
        try:
            answer = function(*arguments, **keywords)
        except TypeError as error:
            errors.append(f"{error}: {arguments} {keywords}")
            continue
        if answer is False:
            raise SystemExit(f"{function.__name__}{arguments} {keywords} answered False")
        if taken is not None:
            taken[function.__name__] = f"{arguments} {keywords}"[:FORM_CHARS]
        return answer
    raise SystemExit(f"{function.__name__} takes none of: " + "; ".join(errors))


def call_named(function: Callable[..., Any], known: dict[str, Any], *, taken: dict[str, str]) -> Any:
    """Calls it with those of the `known` values that its parameters name; notes its signature in `taken`."""
    name = function.__name__
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"{name} does not tell its signature: {error}") from error
    taken[name] = str(signature)[:FORM_CHARS]
    kinds = inspect.Parameter
    named = [
        p for p in signature.parameters.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]
    missing = [p.name for p in named if p.default is kinds.empty and p.name not in known]
    if missing:
        raise SystemExit(f"{name}{signature}: nobody knows what {', '.join(missing)} should be")
    positional = [known[p.name] for p in named if p.kind is kinds.POSITIONAL_ONLY and p.name in known]
    keywords = {
        p.name: known[p.name] for p in named if p.kind is not kinds.POSITIONAL_ONLY and p.name in known
    }
    return function(*positional, **keywords)


def init(vmm_ops: Any, device: str, *, contiguous: bool, taken: dict[str, str] | None = None) -> None:
    """Its `init_kvcached`, with its own size of a page."""
    import torch

    call_any(
        vmm_ops.init_kvcached,
        ((device, 0, contiguous), {}),
        ((device,), {"page_size": 0, "contiguous_layout": contiguous}),
        ((device, PEER_PAGE_BYTES, contiguous), {}),
        ((torch.device(device), 0, contiguous), {}),
        taken=taken,
    )


def create(vmm_ops: Any, device: str, size: int, layers: int, *, taken: dict[str, str] | None = None) -> Any:
    """Its `create_kv_tensors`: `size` bytes of cache in each layer, K and V together, of 16-bit elements."""
    import torch

    return call_any(
        vmm_ops.create_kv_tensors,
        ((size, 2, device, layers, 2, 0), {}),
        ((size, 2, device, layers), {"num_kv_buffers": 2}),
        ((size, 2, device, layers), {}),
        ((size, 2, torch.device(device), layers), {}),
        taken=taken,
    )
