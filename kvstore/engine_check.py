"""Checks of what an engine is given as `--kv-transfer-config`, before it loads its weights.

The settings of the connector are read by the connector's own code, and those of a private store
by a store's; vLLM is not imported.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from connectors.config import SOURCE as OF_EXTRA
from connectors.config import ExtraConfig, block_tokens_of, parse_extra, refuse_engine_id
from kvstore.check import Finding, Level, examine
from kvstore.config import parse
from kvstore.core.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.model_size import BLOCK_SIZE, BLOCK_SIZE_CPU, ModelSize, model_size
from kvstore.settings import refuse_unknown, settings_of
from kvstore.store import admin
from kvstore.units import one_line, shown, sized, wrong
from kvstore.wire.credentials import OtherUserError

SOURCE = "kv-transfer-config"
JSON_MAX = 1 << 16  # characters
KEYS = (
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"),
    *("kv_connector_extra_config", "engine_id", "kv_buffer_device", "kv_port"),
    "enable_permute_local_kv",
)
"""What vLLM 0.32 and 0.33 take."""
EXAMPLE = (
    '{"kv_connector": "TieredConnector", "kv_connector_module_path": "connectors.vllm",'
    ' "kv_role": "kv_both", "kv_load_failure_policy": "recompute",'
    ' "kv_connector_extra_config": {"cpu": "8GiB"}}'
)
REQUIRED = {
    "kv_connector": "TieredConnector",
    "kv_connector_module_path": "connectors.vllm",
    "kv_role": "kv_both",
}
STORE_WAIT_S = 2.0
ANSWER_MAX = 300  # characters
OF_A_PRIVATE_STORE = ("cpu", "numa", "nvme", "peer", "huge pages", "metrics")


def examine_engine(
    text: str, model: Path | None = None, block_size: int | None = None
) -> list[Finding]:
    """Check an engine's settings on this machine. Raises ConfigError for text that is no table.

    text: the JSON; block_size: tokens of the engine's own blocks, None for vLLM's default.
    """
    return list(_findings(_table(text), model, block_size))


def _table(text: str) -> dict[str, Any]:
    if len(text) > JSON_MAX:
        raise ConfigError(f"{SOURCE}: expected up to {JSON_MAX} characters, found {len(text)}")
    try:
        table = json.loads(text)
    except json.JSONDecodeError as exc:
        found = shown(text[exc.pos : exc.pos + 20]) if text[exc.pos :] else "its end"
        raise ConfigError(
            f"{SOURCE}: expected JSON such as {EXAMPLE}, found {found} at line {exc.lineno} column"
            f" {exc.colno}: {exc.msg}"
        ) from None
    except (ValueError, RecursionError) as exc:  # a number with too many digits, or too deep
        raise ConfigError(f"{SOURCE}: expected JSON such as {EXAMPLE}, found {exc}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{SOURCE}: expected an object such as {EXAMPLE}, found {shown(table)}")
    return table


def _findings(
    table: dict[str, Any], model: Path | None, block_size: int | None
) -> Iterator[Finding]:
    outer = table
    if table.get("kv_connector") == "MultiConnector":
        yield from _role(outer)
        table = _child(outer)
    yield from _keys(table)
    yield from _role(table)
    yield from _policy(outer)
    extra, finding = _extra(table)
    yield finding
    size = None
    if model is not None:
        size, finding = _model(model, block_size)
        yield finding
    if extra is None:
        return
    size, finding = _blocks(extra, size, block_size)
    yield finding
    if extra.store is None:
        yield from _private(extra, table, size)
    else:
        yield _shared(extra.store, extra.store_user)


def _child(table: dict[str, Any]) -> dict[str, Any]:
    """Return our child of a MultiConnector. Raises ConfigError where it has none."""
    extra = table.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict) and child.get("kv_connector") == REQUIRED["kv_connector"]:
            return child
    raise ConfigError(
        f"{SOURCE}: expected TieredConnector among kv_connector_extra_config.connectors of a"
        f" MultiConnector, found {shown(children)}; a child is such as {EXAMPLE}"
    )


def _keys(table: dict[str, Any]) -> Iterator[Finding]:
    try:
        for name in table:
            if name in settings_of(ExtraConfig):
                raise ConfigError(
                    f"{SOURCE}: unknown {name}; it belongs into kv_connector_extra_config,"
                    f' such as {{"{name}": {json.dumps(table[name])[:40]}}}'
                )
        refuse_unknown(table, KEYS, SOURCE)
        for name, expected in REQUIRED.items():
            if table.get(name) != expected and name != "kv_role":
                raise ConfigError(f"{SOURCE} {name}: {wrong(shown(expected), table.get(name))}")
        if importlib.util.find_spec(REQUIRED["kv_connector_module_path"]) is None:
            raise ConfigError(f"{SOURCE}: kvstore is not whole here: it has no connectors.vllm")
        if "engine_id" in table:
            refuse_engine_id(str(table["engine_id"]))
    except ConfigError as exc:
        yield Finding(Level.FAIL, "connector", str(exc))
        return
    yield Finding(Level.OK, "connector", "TieredConnector of connectors.vllm")


def _role(table: dict[str, Any]) -> Iterator[Finding]:
    role = table.get("kv_role")
    if role != REQUIRED["kv_role"]:
        error = wrong(shown(REQUIRED["kv_role"]), role)
        yield Finding(Level.FAIL, "role", f"{SOURCE} kv_role: {error}; it hands over, too")


def _policy(table: dict[str, Any]) -> Iterator[Finding]:
    policy = table.get("kv_load_failure_policy")
    if policy not in (None, "fail", "recompute"):
        error = wrong('"recompute"', policy)
        yield Finding(Level.FAIL, "policy", f"{SOURCE} kv_load_failure_policy: {error}")
    elif policy != "recompute":
        text = 'expected "recompute": a failed load is computed; the connector changes it at start'
        yield Finding(Level.NOTE, "policy", f"kv_load_failure_policy: {text}, and logs that")


def _extra(table: dict[str, Any]) -> tuple[ExtraConfig | None, Finding]:
    try:
        extra = parse_extra(table.get("kv_connector_extra_config", {}))
    except ConfigError as exc:
        return None, Finding(Level.FAIL, "extra config", str(exc))
    private = "a private store" if extra.store is None else f"the store at unix://{extra.store}"
    return extra, Finding(Level.OK, "extra config", f"{OF_EXTRA} names {private}")


def _model(model: Path, block_size: int | None) -> tuple[ModelSize | None, Finding]:
    try:
        size = model_size(model, block_tokens=block_size)
    except ConfigError as exc:
        return None, Finding(Level.FAIL, "model", str(exc))
    except KVStoreError as exc:  # its groups are unknown here; the engine knows them
        return None, Finding(Level.NOTE, "model", str(exc))
    return size, Finding(Level.OK, "model", size.describe())


def _blocks(
    extra: ExtraConfig, size: ModelSize | None, block_size: int | None
) -> tuple[ModelSize | None, Finding]:
    """Compare block_tokens with the engine's blocks, as the engine does at its start."""
    engine = size.block_tokens if size is not None else block_size or BLOCK_SIZE
    try:
        tokens = block_tokens_of(extra.block_tokens, engine)
        larger = None if size is None else size.in_blocks_of(tokens)
    except ConfigError as exc:
        told = "" if block_size else "; --block-size N tells another one than vLLM's default"
        return None, Finding(Level.FAIL, "blocks", f"{exc}{told}")
    if block_size is None and tokens % BLOCK_SIZE_CPU and extra.block_tokens:
        text = f"an engine on a CPU has blocks of {BLOCK_SIZE_CPU} and would refuse {tokens}"
        return larger, Finding(Level.NOTE, "blocks", f"{text}; --block-size N tells what yours has")
    return larger, Finding(Level.OK, "blocks", f"{tokens} tokens, the engine's {engine}")


def _private(
    extra: ExtraConfig, table: dict[str, Any], size: ModelSize | None
) -> Iterator[Finding]:
    """Check what a private store needs; a block of the model has to fit into its extents."""
    settings = extra.private_settings(str(table.get("engine_id", "")))
    config = parse(settings, source="the private store")
    for finding in examine(config):
        if finding.what in OF_A_PRIVATE_STORE:
            yield finding
    for name, tier in (("cpu", config.cpu), ("nvme", config.nvme)):
        if size is None or tier is None:
            continue
        try:
            held = size.held(name, tier.capacity_bytes, tier.extent_bytes)
        except ConfigError as exc:
            yield Finding(Level.FAIL, "room", str(exc))
        else:
            text = f"{name}: {sized(tier.capacity_bytes)} hold {held.tokens:,} tokens"
            yield Finding(Level.OK, "room", text)


def _shared(path: str, user: int | None) -> Finding:
    at = f"unix://{path}"
    try:
        stats = admin.stats(path, STORE_WAIT_S, user)
    except KVStoreError as exc:
        said = one_line(str(exc), ANSWER_MAX)
        if isinstance(exc.__cause__, OtherUserError | ProtocolError):
            text = f"{said}; store_user of the extra config names the user of the store"
            return Finding(Level.FAIL, "store", text)
        text = f"{said}; it may start later, and the engine computes until then"
        return Finding(Level.NOTE, "store", text)
    capacity = next((s.value for s in stats if s.name == "kvstore_capacity_bytes"), 0)
    return Finding(Level.OK, "store", f"{at} answers, {sized(int(capacity))} of memory")
