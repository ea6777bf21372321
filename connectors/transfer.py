"""Hand-over parameters: what vLLM's routers carry from a prefill engine to a decode engine.

The names are those of vLLM's own connectors, so that routers need not know ours. Which blocks are
handed over follows from the prompt's hashes; block ids are passed along and never used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvstore.config import PORT_MAX
from kvstore.errors import ConfigError

_EXPECTED = {
    "remote_engine_id": (str, "a text"),
    "remote_request_id": (str, "a text"),
    "remote_host": (str, "a host"),
    "remote_port": (int, f"a port up to {PORT_MAX}"),
}


class Transfer(msgspec.Struct, frozen=True):
    """How an engine hands over: its id, by push or pull, and how long blocks are held for it."""

    engine: str = ""
    push: bool = False
    lease_ms: int = 30_000


NO_TRANSFER = Transfer()


class Remote(NamedTuple):
    """Where a prompt was computed: its store's side channel, and the request there.

    push: its blocks are to be written to us. tokens: those whose KV it has; 0: not said.
    """

    address: str = ""
    request: str = ""
    push: bool = False
    tokens: int = 0


NO_REMOTE = Remote()


def source_of(params: Mapping[str, Any] | None, *, push: bool = False) -> Remote:
    """Return where a decode request's prompt is; NO_REMOTE if it was computed nowhere else.

    Raises ConfigError, naming all that is missing or of the wrong type.
    """
    if not params or not params.get("do_remote_prefill"):
        return NO_REMOTE
    wrong = []
    for name, (kind, expected) in _EXPECTED.items():
        found = params.get(name)
        if not isinstance(found, kind) or isinstance(found, bool) or not found:
            wrong.append(f"{name}: expected {expected}, found {found!r}")
    if wrong:
        raise ConfigError("; ".join(wrong))
    host, port = params["remote_host"], params["remote_port"]
    if not 0 < port <= PORT_MAX:
        raise ConfigError(f"remote_port: expected a port up to {PORT_MAX}, found {port}")
    tokens = params.get("remote_num_tokens") or 0
    if not isinstance(tokens, int) or tokens < 0:
        raise ConfigError(f"remote_num_tokens: expected a number of tokens, found {tokens!r}")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Remote(address, params["remote_request_id"], push, tokens)


def is_handed_over(params: Mapping[str, Any] | None) -> bool:
    """Tell whether a prefill request's blocks go to another engine."""
    return bool(params and params.get("do_remote_decode"))


def parameters(
    engine: str,
    request: str,
    side_channel: str,
    table: Sequence[Sequence[int]],
    tokens: int,
    world: int,
) -> dict[str, Any]:
    """Return what a prefill request hands back; tokens: those whose KV is handed over."""
    host, _, port = side_channel.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "remote_block_ids": [list(ids) for ids in table],
        "remote_num_tokens": tokens,
        "tp_size": world,
    }
