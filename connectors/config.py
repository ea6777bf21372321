"""What an engine is given as `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from connectors.kv_transfer_params import is_sendable
from kvstore.config import CPU, ENGINE, NVME, PEER, SERVER
from kvstore.core.errors import ConfigError
from kvstore.core.limits import LEASE_MS_MAX, NAME_MAX
from kvstore.settings import Reader, Setting, optional, read_flag, read_section, text_of
from kvstore.units import shown
from kvstore.wire.credentials import read_user

TRANSFERS = ("auto", "pull", "push")
COUNT_MAX = 10**9

DirectWay = Literal["", "pull", "push"]


class ExtraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine is given as `kv_connector_extra_config`: a store's address, or sizes.

    store: socket path of a shared store ("unix:///run/kvstore.sock"), None for a private one.
    cpu (bytes): capacity of a private store, started with the engine; None for a shared one.
    nvme: table of a private store's `[nvme]`, such as {"path": "/nvme/kv", "capacity": "200GiB"};
        None for no disk.
    promote, promote_limit (durations): of a private store's `[engine]`: how long a request waits
        for blocks of its disk or of peers while none arrives, and in all; None for the defaults.
    block_tokens: tokens in one block, a multiple of the engine's block size; None for the
        engine's own block size. Larger blocks mean fewer keys and longer copies, but what does
        not fill a block is computed again.
    transfer: how a prompt that another engine computed is fetched, "pull", "push" or "auto": pushed
        over TCP, else pulled. A child of vLLM's MultiConnector hands over only if this is set.
    lease (duration): how long what this engine computed for another one is held for it.
    listen: host:port of a private store's side channel, port 0 for a free one; on loopback, since
        it has no key. None for no hand-over: then no port is open.
    two_way: what a decode engine decoded is held for the next turn, which a prefill engine pulls.
    recompute_threshold (tokens): fewer are computed instead of pulled for such a turn; 0 is off.
    decode_ttl (duration): how long they are held.
    direct: what is pulled is read straight into the engine's memory, by an agent in each worker;
        what is pushed is written there, over networks only, also within a machine: "auto" pulls.
        Whoever reaches such an agent over the network can read and write all memory of its
        process: for a fabric that only trusted machines are on.
    store_user: number of the user who runs a shared store, if that is neither the engine's nor
        root, named or numbered in the setting. Nobody else's store is attached to.
    """

    store: str | None
    cpu_bytes: int | None = msgspec.field(name="cpu")
    nvme: dict[str, Any] | None
    promote: str | None
    promote_limit: str | None
    block_tokens: int | None
    transfer: str
    lease_ns: int = msgspec.field(name="lease")
    listen: str | None
    two_way: bool
    recompute_threshold: int
    decode_ttl_ns: int = msgspec.field(name="decode_ttl")
    direct: bool
    store_user: int | None = None

    @property
    def engine(self) -> dict[str, str]:
        """What a private store's `[engine]` says."""
        found = {"promote": self.promote, "promote_limit": self.promote_limit}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def direct_way(self) -> DirectWay:
        """How what peers have comes straight into the engine's memory."""
        if not self.direct:
            return ""
        return "push" if self.transfer == "push" else "pull"


def parse_extra(table: Mapping[str, Any]) -> ExtraConfig:
    """Check what an engine was given as `kv_connector_extra_config`."""
    source = "kv_connector_extra_config"
    found = read_section(table, _EXTRA, source)
    if (found["store"] is None) == (found["cpu"] is None):
        given = "neither" if found["store"] is None else "both"
        raise ConfigError(
            f"{source}: expected one of store and cpu, found {given}: "
            'store = "unix:///path" attaches to a running store, cpu = "8GiB" starts a private one'
        )
    for name in ("nvme", "listen", "promote", "promote_limit"):
        if found[name] is not None and found["store"] is not None:
            raise ConfigError(
                f"{source}: {name} is for a private store; a shared one has its own file"
            )
    if found["recompute_threshold"] and not found["two_way"]:
        raise ConfigError(
            f"{source}: recompute_threshold is for two_way = true, which is false here"
        )
    if found["store_user"] is not None and found["store"] is None:
        raise ConfigError(f"{source}: store_user is for a shared store; a private one is ours")
    return msgspec.convert(found, ExtraConfig)


def refuse_engine_id(engine_id: str) -> None:
    """Raise ConfigError for an id that no message to a store can hold."""
    if not is_sendable(engine_id, NAME_MAX):
        raise ConfigError(
            f"engine_id: expected up to {NAME_MAX} characters, found {len(engine_id)}:"
            f" {shown(engine_id)}"
        )


def _read_nvme(value: object, _found: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"expected a table with path and capacity, found {shown(value)}")
    read_section(value, NVME, "in it")
    return value


def _read_wait(name: str) -> Reader:
    def read(value: object, found: Mapping[str, Any]) -> str:
        ENGINE[name].read(value, found)
        return str(value)

    return read


def _read_listen_text(value: object, found: Mapping[str, Any]) -> str:
    PEER["listen"].read(value, found)
    return str(value)


def _read_held(value: object, found: Mapping[str, Any]) -> int:
    held_ns: int = ENGINE["lease"].read(value, found)
    if not 1 <= held_ns // 1_000_000 <= LEASE_MS_MAX:
        raise ConfigError(f'expected a duration from "1ms" to "24h", found {shown(value)}')
    return held_ns


def _read_threshold(value: object, found: Mapping[str, Any]) -> int:
    return 0 if value == 0 and not isinstance(value, bool | float) else _read_count(value, found)


def _read_transfer(value: object, _found: Mapping[str, Any]) -> str:
    expected = " or ".join(f'"{name}"' for name in TRANSFERS)
    transfer = text_of(value, expected)
    if transfer not in TRANSFERS:
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return transfer


def _read_count(value: object, _found: Mapping[str, Any]) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
        raise ConfigError(f"expected a whole number from 1 to {COUNT_MAX}, found {shown(value)}")
    return value


_EXTRA = {
    "store": optional(SERVER["socket"].read),
    "cpu": optional(CPU["capacity"].read),
    "nvme": optional(_read_nvme),
    "promote": optional(_read_wait("promote")),
    "promote_limit": optional(_read_wait("promote_limit")),
    "block_tokens": optional(_read_count),
    "transfer": Setting(_read_transfer, "auto"),
    "lease": Setting(_read_held, "30s"),
    "listen": optional(_read_listen_text),
    "two_way": Setting(read_flag, False),
    "recompute_threshold": Setting(_read_threshold, 0),
    "decode_ttl": Setting(_read_held, "480s"),
    "direct": Setting(read_flag, False),
    "store_user": optional(read_user),
}
