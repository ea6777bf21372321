"""Every error this project raises on purpose, and the one that means a bug.

KVStoreError: ConfigError, ProtocolError, NotSupported, NotYet, and TierError: TierFull,
TierIOError (may be retried), BlockCorrupt.
InvariantBroken is a BaseException, so that no `except Exception` catches it.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of all expected errors."""


class ConfigError(KVStoreError):
    """A setting is wrong; the message names the found and the expected value."""


class ProtocolError(KVStoreError):
    """A message that the local protocol does not allow; its sender is disconnected."""


class NotSupported(KVStoreError):
    """This engine, model or platform is not served; said once, at start-up."""


class NotYet(KVStoreError):
    """This engine is served, but not at this moment; it may ask again soon."""


class TierError(KVStoreError):
    """One tier failed one job."""


class TierFull(TierError):
    """No room until something is evicted."""


class TierIOError(TierError):
    """The medium failed; the same job may succeed later."""


class BlockCorrupt(TierError):
    """Length or checksum is wrong; the copy must be dropped."""


class InvariantBroken(BaseException):
    """A bug in this project. Not an Exception, so that nobody swallows it by accident."""


def check(condition: object, broken: str) -> None:
    """Raise InvariantBroken unless condition holds; survives `python -O`."""
    if not condition:
        raise InvariantBroken(broken)
