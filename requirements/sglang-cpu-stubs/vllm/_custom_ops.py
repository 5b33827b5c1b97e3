"""The operators that SGLang imports from vLLM where it finds no kernels of its own."""

from typing import NoReturn


def _absent(*_args: object, **_options: object) -> NoReturn:
    raise NotImplementedError("vLLM is not installed in this environment")


rotary_embedding = rms_norm = fused_add_rms_norm = _absent
