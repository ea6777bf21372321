"""Hints of a router: which other store has a request's blocks (`kv.fetch` 1.0).

vLLM passes them on as `kv_hints` of a request, an older bridge among the hand-over parameters as
`kv_hint`. They name blocks by 8 bytes of their hashes, too few to fetch anything by. So a hint says
which of the request's own blocks to ask for, up to the last that it names, and where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from connectors.kv_transfer_params import brief
from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.wire.framing import is_sendable

PARAMETER = "kv_hint"
PROTOCOL, ACTION, VERSION = "0.1", "kv.fetch", "1.0"
ACTIONS_MAX = 16
NAME_BYTES = 8
_SCHEME = "tcp://"


class Hint(NamedTuple):
    """A store's side channel, and the last block it is said to have: the end of its hash."""

    address: str
    last: bytes

    def covered(self, hashes: Sequence[bytes]) -> int:
        """Count a request's leading hashes up to the block that is named; 0 if none of them is."""
        packed, width = b"".join(hashes), len(hashes[0]) if hashes else 1
        at = len(packed)
        while (at := packed.rfind(self.last, 0, at)) >= 0:
            blocks, inside = divmod(at + NAME_BYTES, width)
            if not inside:
                return blocks
            at += NAME_BYTES - 1
        return 0


def hint_of(envelope: object) -> Hint | None:
    """Return what a hint says, None if it has no action for us. Raises ConfigError for a wrong one.

    envelope: vLLM's, or a table.
    """
    _expect(envelope, "protocol_version", PROTOCOL)
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple) or len(actions) > ACTIONS_MAX:
        raise _wrong("actions", f"a list of up to {ACTIONS_MAX}", actions)
    for action in actions:
        if _field(action, "action_type") == ACTION:
            _expect(action, "action_version", VERSION)
            return _fetch(_field(action, "payload"))
    return None


def _fetch(payload: object) -> Hint:
    """Read an action's payload; of the blocks the last one is looked at."""
    _expect(payload, "mode", "copy")
    place, blocks = _field(payload, "source_control_endpoint"), _field(payload, "block_hashes")
    address = place.removeprefix(_SCHEME) if isinstance(place, str) else ""
    if not address or not is_sendable(address, limits.NAME_MAX):
        raise _wrong("source_control_endpoint", "host:port", place)
    last = blocks[-1] if isinstance(blocks, list | tuple) and blocks else None
    if not isinstance(last, int) or isinstance(last, bool) or not 0 <= last < 1 << 8 * NAME_BYTES:
        raise _wrong("block_hashes", "a list of numbers of 64 bits", blocks)
    return Hint(address, last.to_bytes(NAME_BYTES, "big"))


def _field(value: object, name: str) -> Any:  # noqa: ANN401 - whatever came
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _expect(value: object, name: str, expected: str) -> None:
    if (found := _field(value, name)) != expected:
        raise _wrong(name, repr(expected), found)


def _wrong(name: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{name}: expected {expected}, found {brief(found)}")
