"""Errors of kvcached, in two families (docs/ERRORS.md lists them with what to do).

*Pressure* is recoverable: `KVCachePoolExhausted`; wait, free something, try again. *Unknown state* is not:
`StateConsistencyError`; stop using the pool. Between them `MapQuarantinedError`: the pages named are lost, the pool
goes on; and `QuarantinedResizeError`: it cannot shrink below what such pages hold. `KVCachedConfigError` and its kind
mean that the user must act; the message says how.
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
]
