"""What an engine is given as `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from connectors.request_policy import NO_LIMITS, READERS, RequestPolicy, Tiers
from kvstore.core.errors import ConfigError
from kvstore.core.limits import LEASE_MS_MAX, NAME_MAX
from kvstore.settings import (
    Reader,
    Section,
    Setting,
    choice,
    flag,
    read_section,
    read_socket,
    settings_of,
    whole_number,
)
from kvstore.units import parse_duration_ns, shown, wrong
from kvstore.wire.credentials import read_user
from kvstore.wire.framing import is_sendable

SOURCE = "kv_connector_extra_config"
COUNT_MAX = 10**9
OF_PRIVATE_STORES = ("nvme", "listen", "metrics", "promote", "promote_limit", "event_tokens")

DirectWay = Literal["", "pull", "push"]


def _read_held(value: object, _found: Mapping[str, Any]) -> int:
    held_ns = parse_duration_ns(value)
    if not 1 <= held_ns // 1_000_000 <= LEASE_MS_MAX:
        raise wrong('a duration from "1ms" to "24h"', value)
    return held_ns


# Settings of a private store are checked as its sections are. An engine with a shared store has
# none, and does not load kvstore.config.


def _as_given(section: str, name: str) -> Reader:
    """Check a value as a section of a store's file does, and keep its text for that section."""

    def read(value: object, found: Mapping[str, Any]) -> str:
        from kvstore import config  # noqa: PLC0415 - see above

        kinds: dict[str, type[Section]] = {
            "cpu": config.CpuConfig,
            "engine": config.EngineConfig,
            "peer": config.PeerConfig,
            "server": config.ServerConfig,
        }
        settings_of(kinds[section])[name].read(value, found)
        return str(value)

    return read


def _read_nvme(value: object, _found: Mapping[str, Any]) -> dict[str, Any]:
    from kvstore.config import NvmeConfig  # noqa: PLC0415 - see above

    if not isinstance(value, dict):
        raise wrong("a table with path and capacity", value)
    read_section(NvmeConfig, value, "in it")
    return value


class ExtraConfig(Section, frozen=True):
    """What an engine is given as `kv_connector_extra_config`: a store's address, or sizes."""

    store: Annotated[str | None, Setting(read_socket)]
    """Socket of a shared store, `"unix:///run/kvstore/kvstore.sock"`."""

    cpu: Annotated[str | None, Setting(_as_given("cpu", "capacity"))]
    """Capacity of a private store, such as `"8GiB"`. The store starts and ends with the engine."""

    nvme: Annotated[dict[str, Any] | None, Setting(_read_nvme)]
    """`[nvme]` of a private store, such as `{"path": "/nvme/kv", "capacity": "200GiB"}`."""

    promote: Annotated[
        str | None,
        Setting(_as_given("engine", "promote"), default_text='`"2s"` of a private store'),
    ]
    """`[engine] promote` of a private store."""

    promote_limit: Annotated[
        str | None,
        Setting(_as_given("engine", "promote_limit"), default_text='`"60s"` of a private store'),
    ]
    """`[engine] promote_limit` of a private store."""

    event_tokens: Annotated[
        str | None, Setting(_as_given("engine", "event_tokens"), default_text="none is kept")
    ]
    """`[engine] event_tokens` of a private store, such as `"64MiB"`: token ids of its blocks, for
    KV events after a restart. Prompts can be read from them, on disk, too."""

    block_tokens: Annotated[
        int | None, Setting(whole_number(1, COUNT_MAX), default_text="the engine's block size")
    ]
    """Tokens in one block, a multiple of the engine's block size. Larger blocks mean fewer keys and
    longer copies, but more tokens that do not fill a block and are computed again. With recurrent
    states, only the engine's own."""

    transfer: Annotated[str, Setting(choice("auto", "pull", "push"), "auto")]
    """How a prompt that another engine computed is fetched: `"pull"`, `"push"` or `"auto"`, which
    pushes over TCP, and pulls within a machine and over RDMA (`[peer] devices` names such a
    device). A child of vLLM's `MultiConnector` hands over only with this setting."""

    lease_ns: Annotated[int, Setting(_read_held, "30s")]
    """How long the blocks that this engine computed for another one are held for it, up to
    `"24h"`."""

    listen: Annotated[str | None, Setting(_as_given("peer", "listen"))]
    """host:port of a private store's side channel, on loopback, since a private store has no
    cluster key; `"127.0.0.1:0"` picks a free port. Without it the store opens no port for that
    and hands nothing over. All else starts with the first hand-over."""

    metrics: Annotated[str | None, Setting(_as_given("server", "metrics"))]
    """host:port of a private store's metrics endpoint, such as `"127.0.0.1:0"`, which picks a free
    port; the store's log has the address. Without it the store has no such endpoint."""

    two_way: Annotated[bool, Setting(flag, default=False)]
    """Hold the blocks that this engine decodes for another one until the conversation's next turn,
    and fetch such blocks from decode engines."""

    recompute_threshold: Annotated[int, Setting(whole_number(0, COUNT_MAX), 0)]
    """With `two_way`: fewer tokens than this are computed again instead of fetched from a decode
    engine, which then releases their blocks. 0 is off."""

    decode_ttl_ns: Annotated[int, Setting(_read_held, "480s")]
    """With `two_way`: how long decoded blocks are held for the next turn, up to `"24h"`. No
    heartbeat extends it."""

    direct: Annotated[bool, Setting(flag, default=False)]
    """Pull blocks straight into the engine's memory, with an agent in each worker, and have pushed
    blocks written there. With `"push"` these travel over networks, even within a machine. An engine
    on a GPU needs an RDMA device for it. A machine that reaches the agent over the network can read
    and write all memory of its process: use it on a network of trusted machines only."""

    store_user: Annotated[int | None, Setting(read_user)]
    """Name or number of the user who runs the shared store, if neither the engine's own nor root.
    The engine attaches to no store of another user."""

    always_load: Annotated[bool, Setting(flag, default=False)]
    """Load blocks from a disk or another store also where the engine would compute them sooner.
    That is what its steps and such loads took lately; computing takes the engine's time, and
    loading does not."""

    storing: Annotated[str, Setting(choice("eager", "late"), "eager")]
    """When blocks are stored: `"eager"` when they are complete, `"late"` when the engine is about
    to reuse its own copy, so that memory holds what the engine does not. What only the engine holds
    is lost when it ends, sleeps or resets its prefix cache. What another engine continues, and
    pinned prompts, are stored at once; so is all with several KV groups or without prefix
    caching."""

    max_load_tokens: Annotated[int | None, Setting(READERS["max_load_tokens"])]
    """Most tokens that are loaded for a request, beyond those in the engine's own cache."""

    max_offload_tokens: Annotated[int | None, Setting(READERS["max_offload_tokens"])]
    """How many of a request's first tokens are stored at most; 0: none."""

    kv_load_tiers: Annotated[Tiers | None, Setting(READERS["kv_load_tiers"], default_text="all")]
    """Tiers that blocks may be loaded from, such as `[{"medium": "CPU"}]`: `medium` is `"CPU"` or
    `"STORAGE"`, `locality` is `"LOCAL"` or `"REMOTE"` (other stores, as `"STORAGE"`). All that is
    loaded passes through CPU memory: without it nothing is."""

    kv_store_tiers: Annotated[Tiers | None, Setting(READERS["kv_store_tiers"], default_text="all")]
    """Tiers that blocks may be stored in: `[{"medium": "CPU"}]` keeps them off the disk, `[]`
    stores nothing."""

    offload_prompt_only: Annotated[bool, Setting(READERS["offload_prompt_only"], default=False)]
    """Store prompts only, and not what the engine generates."""

    tenant: Annotated[str | None, Setting(READERS["tenant"])]
    """Tenant of the requests that name none: they find and store its blocks only. Up to 63
    letters, digits, `.`, `-` and `_`."""

    @property
    def policy(self) -> RequestPolicy:
        """Limits of all requests of the engine."""
        given = {name: getattr(self, name) for name in READERS}
        return NO_LIMITS._replace(**{name: v for name, v in given.items() if v is not None})

    def private_settings(self, engine_id: str) -> dict[str, Any]:
        """Return the settings of an engine's private store, as a store's file has them."""
        from kvstore.launch import address_of  # noqa: PLC0415 - as below

        server = {"socket": address_of(engine_id), "metrics": self.metrics or ""}
        settings: dict[str, Any] = {"cpu": {"capacity": self.cpu}, "server": server}
        given = {name: getattr(self, name) for name in ("promote", "promote_limit", "event_tokens")}
        settings["engine"] = {name: text for name, text in given.items() if text is not None}
        if self.nvme is not None:
            settings["nvme"] = self.nvme
        if self.listen is not None:
            settings["peer"] = {"listen": self.listen, "eager": False}
        return settings

    def find_store(self, engine_id: str) -> str:
        """Return the store's address; an engine's private one is started, unless it runs.

        Raises ConfigError when no process can be started.
        """
        if self.store is not None:
            return self.store
        from kvstore.launch import ensure  # noqa: PLC0415 - only a private store is started here

        return ensure(self.private_settings(engine_id))

    @property
    def direct_way(self) -> DirectWay:
        """How blocks of peers come straight into the engine's memory."""
        if not self.direct:
            return ""
        return "push" if self.transfer == "push" else "pull"


def parse_extra(table: Mapping[str, Any]) -> ExtraConfig:
    """Check what an engine was given as `kv_connector_extra_config`."""
    found = read_section(ExtraConfig, table, SOURCE)
    if (found.store is None) == (found.cpu is None):
        given = "neither" if found.store is None else "both"
        raise ConfigError(
            f"{SOURCE}: expected one of store and cpu, found {given}: "
            'store = "unix:///path" attaches to a running store, cpu = "8GiB" starts a private one'
        )
    for name in OF_PRIVATE_STORES:
        if getattr(found, name) is not None and found.store is not None:
            raise ConfigError(
                f"{SOURCE}: {name} is for a private store; a shared one has its own file"
            )
    if found.recompute_threshold and not found.two_way:
        raise ConfigError(
            f"{SOURCE}: recompute_threshold is for two_way = true, which is false here"
        )
    if found.store_user is not None and found.store is None:
        raise ConfigError(
            f"{SOURCE}: store_user is for a shared store; a private one runs as the engine's user"
        )
    return found


def block_tokens_of(wanted: int | None, engine_tokens: int) -> int:
    """Return the tokens of a block; wanted: the setting, None for the engine's block size.

    Raises ConfigError where it is no multiple of that.
    """
    block_tokens = wanted or engine_tokens
    if block_tokens % engine_tokens:
        raise ConfigError(
            f"block_tokens is {block_tokens}, expected a multiple of the engine's block size,"
            f" {engine_tokens}"
        )
    return block_tokens


def refuse_engine_id(engine_id: str) -> None:
    """Raise ConfigError for an id that no message to a store can hold."""
    if not is_sendable(engine_id, NAME_MAX):
        raise ConfigError(
            f"engine_id: expected up to {NAME_MAX} characters, found {len(engine_id)}:"
            f" {shown(engine_id)}"
        )
