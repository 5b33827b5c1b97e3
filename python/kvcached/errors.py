"""Errors of kvcached, in two families (docs/ERRORS.md lists them with what to do).

*Pressure* is recoverable: `KVCachePoolExhausted`; wait, free something, try again. *Unknown state* is not:
`StateConsistencyError`; stop using the pool. Between them `MapQuarantinedError`: the pages named are lost, the pool
goes on; and `QuarantinedResizeError`: it cannot shrink below what such pages hold. `KVCachedConfigError` and its kind
mean that the user must act; the message says how. Of that kind is `TermsError`: an engine does not start without the terms that were
stated for it, whatever `KVCACHED_STRICT` says.
"""

from kvcached._core import (
    BlockError,
    DriverError,
    DriverUnavailableError,
    GeometryError,
    KVCachedConfigError,
    KVCachedError,
    KVCachePoolExhausted,
    MapQuarantinedError,
    QuarantinedResizeError,
    StateConsistencyError,
)

__all__ = [
    "BlockError",
    "DriverError",
    "DriverUnavailableError",
    "GeometryError",
    "KVCachePoolExhausted",
    "KVCachedConfigError",
    "KVCachedError",
    "MapQuarantinedError",
    "QuarantinedResizeError",
    "StateConsistencyError",
    "TermsError",
]


class TermsError(KVCachedConfigError):
    """How much memory an engine may have was stated (`KVCACHED_LIMIT`, `KVCACHED_MIN`, `KVCACHED_DEVICE_BUDGET`) and cannot be
    kept to, or it cannot take part in the budget of its device. Run natively it would take what others live by.
    """
