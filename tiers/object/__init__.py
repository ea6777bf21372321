"""The object tier: runs of blocks as objects of a bucket that several stores share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.config import ObjectConfig
from kvstore.core.tier import Tier, TierContext

if TYPE_CHECKING:
    from tiers.object.bucket import Bucket


def open_bucket(config: ObjectConfig, secret: bytes | None) -> Bucket:
    """Make the bucket of a store; nothing is sent yet. Raises ConfigError.

    secret: 32 bytes, to encrypt objects with.
    """
    from tiers.object.bucket import Bucket  # noqa: PLC0415 - its client is optional

    return Bucket(config, secret)


def tier_of(context: TierContext, bucket: Bucket) -> Tier:
    """Make the tier of a namespace."""
    from tiers.object.tier import ObjectTier  # noqa: PLC0415 - as above

    return ObjectTier(context, bucket)
