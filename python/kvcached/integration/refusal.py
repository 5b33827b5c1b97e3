"""Engines that kvcached does not carry: they run natively with one clear warning, or do not start
(`KVCACHED_STRICT`). An engine that is carried and whose stated terms cannot be kept does not start.
"""

from __future__ import annotations

import logging
import os
from typing import NoReturn

from kvcached.config import Settings
from kvcached.errors import KVCachedConfigError, TermsError

__all__ = ["UnsupportedConfiguration", "decline", "refuse"]

logger = logging.getLogger("kvcached")


class UnsupportedConfiguration(KVCachedConfigError):  # noqa: N818 (named for what the user reads)
    """kvcached does not carry this engine; the message names the one thing that stands in the way."""


def refuse(what: str, hint: str = "") -> NoReturn:
    """Say what stands in the way.

    Raises:
        UnsupportedConfiguration: always.
    """
    raise UnsupportedConfiguration(f"{what} is not supported yet" + (f"; {hint}" if hint else ""))


def decline(error: Exception) -> None:
    """Nothing was changed yet: warn and let the engine start without us.

    Raises:
        KVCachedConfigError: `error` itself where the user asked for kvcached or nothing, or for terms that nobody keeps to natively.
    """
    if isinstance(error, TermsError):
        raise error
    if _strict():
        if isinstance(error, KVCachedConfigError):
            raise error
        raise KVCachedConfigError(f"kvcached cannot be used here: {error!r}") from error
    logger.warning("kvcached is off for this engine, which runs natively: %s", str(error))
    logger.debug("reason", exc_info=error)


def _strict() -> bool:
    """Of this variable alone: another one may be what is wrong."""
    name = "KVCACHED_STRICT"
    try:
        return Settings.from_env({name: os.environ[name]} if name in os.environ else {}).strict
    except KVCachedConfigError:
        return True  # said something about strictness that we do not understand: the safe reading
