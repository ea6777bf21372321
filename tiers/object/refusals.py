"""What `kvstore check` says of a bucket: whether it can be used, and what bounds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvstore.config import ObjectConfig
from kvstore.core.errors import ConfigError
from kvstore.units import one_line

LOOK_S = 3.0
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_QUOTA = re.compile(r"x-rgw-quota-(user|bucket)-(size|objects)", re.IGNORECASE)


def refuse(config: ObjectConfig) -> None:
    """Raise ConfigError where the client is missing, or does not take the settings."""
    try:
        from tiers.object.bucket import client_of  # noqa: PLC0415 - it is optional
    except ImportError as exc:
        raise ConfigError(f'[object] needs obstore ({exc}): pip install "kvstore[object]"') from exc
    client_of(config, LOOK_S)


def look(config: ObjectConfig) -> Iterator[tuple[bool, str]]:
    """Ask the bucket. Yields sentences, and whether each is as it should be; refuse() is first."""
    import obstore  # noqa: PLC0415 - it is optional
    from obstore.exceptions import BaseError  # noqa: PLC0415

    from tiers.object.bucket import TRIAL, client_of, reason_of  # noqa: PLC0415

    why = "it answers for an object that no store puts"
    try:
        obstore.get(client_of(config, LOOK_S), TRIAL)  # unlike that of a HEAD its answer has a body
    except FileNotFoundError as exc:
        why = "there is no such bucket" if any(code in str(exc) for code in _NO_BUCKET) else ""
    except (BaseError, OSError) as exc:
        why = reason_of(exc)
    if why:
        yield False, f"{config.url} cannot be used now: {why}"
        return
    yield True, f"{config.url} answers"
    if config.url.startswith("s3://"):
        yield from _bounds(config)
    else:
        yield False, "its life cycle and quota are not read: see to it that objects expire"


def _bounds(config: ObjectConfig) -> Iterator[tuple[bool, str]]:
    """Say whether objects expire, and whether the bucket has a quota, where the API shows that."""
    try:
        import boto3  # noqa: PLC0415 - it is optional
        from botocore.config import Config  # noqa: PLC0415
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
    except ImportError:
        yield False, "its life cycle and quota are not read: that needs boto3"
        return
    bucket, _, folder = config.url.removeprefix("s3://").partition("/")
    limits = Config(
        connect_timeout=LOOK_S,
        read_timeout=LOOK_S,
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "path"} if config.endpoint else {},
    )
    region = {"region_name": "us-east-1"} if config.endpoint else {}
    at = config.endpoint or None
    try:
        client = boto3.client("s3", endpoint_url=at, config=limits, **region)
    except (BotoCoreError, ValueError) as exc:
        yield False, f"its life cycle and quota are not read: {one_line(str(exc), 200)}"
        return
    try:
        kept = client.get_bucket_versioning(Bucket=bucket).get("Status")
        rules = client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
    except (BotoCoreError, ClientError) as exc:
        if "NoSuchLifecycleConfiguration" not in str(exc):
            yield False, f"its life cycle cannot be read: {' '.join(str(exc).split())[:200]}"
            return
        rules = []
    rules = [rule for rule in rules if _applies(rule, folder)]
    days = min(filter(None, (rule.get("Expiration", {}).get("Days") for rule in rules)), default=0)
    if days and kept and not any("NoncurrentVersionExpiration" in rule for rule in rules):
        yield (
            False,
            "no rule lets old versions of objects that have expired go: it grows without end",
        )
    elif days:
        yield True, f"objects expire after {days} days"
    else:
        yield False, "no rule of its life cycle lets these objects expire: it grows without end"
    try:
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except (BotoCoreError, ClientError) as exc:
        yield False, f"its quota cannot be read: {' '.join(str(exc).split())[:200]}"
        return
    quotas = [f"{name} {value}" for name, value in headers.items() if _is_quota(name, value)]
    if quotas:
        yield True, f"quota: {', '.join(sorted(quotas))}"
    else:
        yield False, "it shows no quota: set one where the storage has them"


def _applies(rule: dict[str, Any], folder: str) -> bool:
    """Tell whether a rule of a life cycle is for all objects of a folder."""
    found = rule.get("Filter", {})
    prefix = found.get("Prefix", rule.get("Prefix", ""))
    narrow = any(name != "Prefix" for name in found)
    return rule.get("Status") == "Enabled" and f"{folder}/".startswith(prefix) and not narrow


def _is_quota(name: str, value: str) -> bool:
    return bool(_QUOTA.fullmatch(name)) and value.isdecimal() and int(value) > 0
