"""Hand-over parameters: what vLLM's routers carry from a prefill engine to a decode engine.

The names are those of vLLM's own connectors, so that routers need not know ours. Which blocks are
handed over follows from the prompt's hashes; block ids are passed along and never used.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.core.limits import PORT_MAX
from kvstore.units import one_line, written
from kvstore.wire.framing import is_sendable

HOST_MAX = limits.NAME_MAX - len(f"[]:{PORT_MAX}")
_EXPECTED = {
    "remote_engine_id": (str, "a text"),
    "remote_request_id": (str, f"a text of up to {limits.TEXT_MAX} characters"),
    "remote_host": (str, f"a host of up to {HOST_MAX} characters"),
    "remote_port": (int, f"a port up to {PORT_MAX}"),
}
_SENT = {"remote_request_id": limits.TEXT_MAX, "remote_host": HOST_MAX}  # to our store
_SHOWN_MAX = 80  # characters of a wrong value
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


class Transfer(msgspec.Struct, frozen=True):
    """How an engine hands over: its id, by push or pull, and how long blocks are held for it.

    push: blocks are written to it; None: whichever is faster, as far as its store can tell.
    two_way: what this engine decoded is held for decode_ttl_ms, for the prefill engine's next
    turn; what a decode engine has so is pulled, from recompute_threshold tokens on.
    direct: workers pull into the engine's memory themselves.
    """

    engine: str = ""
    push: bool | None = None
    lease_ms: int = 30_000
    two_way: bool = False
    recompute_threshold: int = 0
    decode_ttl_ms: int = 480_000
    direct: bool = False


NO_TRANSFER = Transfer()


class Remote(NamedTuple):
    """Where a prompt was computed: its store's side channel, and the request there.

    push: its blocks are to be written to us; None: our store chooses. tokens: those whose KV it
    has; 0: not said. turn: it decoded the turn before. hinted: how many leading blocks a router
    says that the store has, whichever request they are of; 0: it is no hint.
    """

    address: str = ""
    request: str = ""
    push: bool | None = None
    tokens: int = 0
    turn: bool = False
    hinted: int = 0


NO_REMOTE = Remote()


def remote_of(params: Mapping[str, Any] | None, how: Transfer = NO_TRANSFER) -> Remote:
    """Return where a request's prompt is; NO_REMOTE if it was computed nowhere else.

    Raises ConfigError, naming all that is missing or of the wrong type.
    """
    if params is None:
        return NO_REMOTE
    if not isinstance(params, Mapping):
        raise ConfigError(f"expected a table of parameters, found {brief(params)}")
    wrong: list[str] = []
    decodes = _flag(params, "do_remote_prefill", wrong)
    prefills = _flag(params, "do_remote_decode", wrong)
    if decodes and prefills:
        wrong.append("do_remote_prefill and do_remote_decode: expected one of them, found both")
    turn = prefills and how.two_way and bool(params.get("remote_block_ids"))
    remote = NO_REMOTE
    if (decodes or turn) and not _is_empty(params):
        remote = _remote(params, wrong, push=how.push, turn=turn)
    if wrong:
        raise ConfigError("; ".join(wrong))
    return remote


def is_handed_over(params: Mapping[str, Any] | None) -> bool:
    """Tell whether another engine goes on with what a request computes."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") is True


def _flag(params: Mapping[str, Any], name: str, wrong: list[str]) -> bool:
    found = params.get(name)
    if found is not None and not isinstance(found, bool):
        wrong.append(f"{name}: expected true or false, found {brief(found)}")
    return found is True


def _is_empty(params: Mapping[str, Any]) -> bool:
    """Tell whether a prefill has said that it left nothing: 0 tokens, in no blocks."""
    blocks = params.get("remote_block_ids")
    nothing = not blocks or (_is_table(blocks) and not any(blocks))
    return params.get("remote_num_tokens") == 0 and nothing


def _remote(
    params: Mapping[str, Any], wrong: list[str], *, push: bool | None, turn: bool
) -> Remote:
    for name, (kind, expected) in _EXPECTED.items():
        found = params.get(name)
        if not isinstance(found, kind) or isinstance(found, bool) or not found:
            wrong.append(f"{name}: expected {expected}, found {brief(found)}")
        elif isinstance(found, str) and not is_sendable(found, _SENT.get(name, len(found))):
            wrong.append(
                f"{name}: expected {expected}, found {len(found)} characters, {brief(found)}"
            )
    port = params.get("remote_port")
    if isinstance(port, int) and not 0 <= port <= PORT_MAX:
        wrong.append(f"remote_port: expected a port up to {PORT_MAX}, found {brief(port)}")
    blocks = params.get("remote_block_ids")
    # A router made for pushing leaves block ids out: where our store chooses the way, it may.
    unsaid = push is None and blocks is None and params.get("tp_size") is not None
    if not push and not unsaid and not (_is_table(blocks) and any(blocks or ())):
        wrong.append(f"remote_block_ids: expected lists of block ids, found {brief(blocks)}")
    for name, least, needed in (("tp_size", 1, bool(push)), ("remote_num_tokens", 0, False)):
        found = params.get(name)
        if (found is not None or needed) and not (_is_number(found) and found >= least):
            wrong.append(f"{name}: expected a whole number from {least} on, found {brief(found)}")
    if wrong:
        return NO_REMOTE
    host, tokens = params["remote_host"], params.get("remote_num_tokens") or 0
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Remote(address, params["remote_request_id"], push, tokens, turn)


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 - as reprlib calls it
        return written(x)


def brief(value: object) -> str:
    """Show some of a value that came with a request, in one line."""
    short = _Short()
    short.maxstring = short.maxother = _SHOWN_MAX
    return one_line(short.repr(value), 2 * _SHOWN_MAX)


def _is_table(value: object) -> bool:
    """Tell whether these are block ids, or lists of them by group."""
    return isinstance(value, list | tuple) and all(
        _is_number(one) or (isinstance(one, list | tuple) and all(map(_is_number, one)))
        for one in value
    )


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def common_id(request_id: str) -> str:
    """Return what the ids have in common that engines give a request which both were sent.

    vLLM adds "-" and 8 hexadecimal digits to the id that a request came with.
    """
    return _SUFFIX.sub("", request_id)


def as_engines_name_it(given: str, request_id: str) -> str:
    """Return the name of a request at the engine that computes its prompt.

    given: what a router calls it. If that is the X-Request-Id of both legs, vLLM's API servers have
    made one name of it, as this engine's request_id shows: "cmpl-" + X-Request-Id + "-0".
    """
    own = common_id(request_id)
    named = f"-{given}-" in f"{own}-" and is_sendable(own, limits.TEXT_MAX)
    return own if named else given


def parameters(
    transfer: Transfer,
    request: str,
    side_channel: str,
    table: Sequence[Sequence[int]],
    tokens: int,
    world: int,
    *,
    turn: bool = False,
) -> dict[str, Any]:
    """Return what a request hands back; tokens: those whose KV is handed over.

    turn: it was a decode engine's, and the next turn's prefill may go on with it.
    """
    host, _, port = side_channel.rpartition(":")
    return {
        "do_remote_prefill": not turn,
        "do_remote_decode": turn,
        "remote_engine_id": transfer.engine,
        "remote_request_id": request,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "remote_block_ids": [list(ids) for ids in table],
        "remote_num_tokens": tokens,
        "tp_size": world,
    }
