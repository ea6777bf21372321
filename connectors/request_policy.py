"""What a request, or its engine, wants of the store: how much is loaded and stored, and where.

The names are those that vLLM's offloading connector reads; `kv_store_tiers` is `kv_load_tiers` for
the other direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.core.types import tag_of
from kvstore.settings import Reader, flag, read_tenant, whole_number
from kvstore.units import shown, wrong

TOKENS_MAX = 10**9  # more than a request can have
_MEDIA = ("CPU", "STORAGE")
_PLACES = ("LOCAL", "REMOTE")
_ENTRIES_MAX = 16


class Tiers(NamedTuple):
    """Which tiers may be used. peers: other stores."""

    memory: bool = True
    disk: bool = True
    peers: bool = True


def read_tiers(value: object, _found: Mapping[str, Any]) -> Tiers:
    """Read a list of tables with medium, locality or both; a tier that one of them fits is used."""
    expected = 'a list such as [{"medium": "CPU", "locality": "LOCAL"}]'
    if not isinstance(value, list) or len(value) > _ENTRIES_MAX:
        raise wrong(expected, value)
    allowed: set[tuple[str, str]] = set()
    for entry in value:
        if not isinstance(entry, dict) or not entry.keys() <= {"medium", "locality"}:
            raise wrong(expected, entry)
        media = _named("medium", entry.get("medium"), _MEDIA)
        places = _named("locality", entry.get("locality"), _PLACES)
        allowed |= {(medium, place) for medium in media for place in places}
    memory = ("CPU", "LOCAL") in allowed
    return Tiers(memory, ("STORAGE", "LOCAL") in allowed, ("STORAGE", "REMOTE") in allowed)


def _named(what: str, value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the one that is named, in capitals or not; all if none is."""
    if value is None:
        return known
    if not isinstance(value, str) or value.upper() not in known:
        raise ConfigError(f"{what}: expected {' or '.join(known)}, found {shown(value)}")
    return (value.upper(),)


READERS: dict[str, Reader] = {
    "max_load_tokens": whole_number(0, TOKENS_MAX),
    "max_offload_tokens": whole_number(0, TOKENS_MAX),
    "kv_load_tiers": read_tiers,
    "kv_store_tiers": read_tiers,
    "offload_prompt_only": flag,
    "tenant": read_tenant,
}
_READERS = {**READERS, "kv_pin": read_tenant, "kv_unpin": read_tenant}  # of a request alone, too


class RequestPolicy(NamedTuple):
    """Limits of a request.

    max_load_tokens: beyond those that the engine has itself. max_offload_tokens: how many of its
    first ones are stored. tenant: whose blocks it finds and stores; none: those of engines and
    requests that name no tenant. kv_pin: the name under which its prompt stays in memory; kv_unpin:
    what stays no longer.
    """

    max_load_tokens: int = TOKENS_MAX
    max_offload_tokens: int = TOKENS_MAX
    kv_load_tiers: Tiers = Tiers()
    kv_store_tiers: Tiers = Tiers()
    offload_prompt_only: bool = False
    tenant: str = ""
    kv_pin: str = ""
    kv_unpin: str = ""

    def within(self, other: RequestPolicy) -> RequestPolicy:
        """Return the tighter of both, limit by limit; other's tenant if this one names none."""
        return RequestPolicy(
            min(self.max_load_tokens, other.max_load_tokens),
            min(self.max_offload_tokens, other.max_offload_tokens),
            Tiers(*map(min, self.kv_load_tiers, other.kv_load_tiers)),
            Tiers(*map(min, self.kv_store_tiers, other.kv_store_tiers)),
            self.offload_prompt_only or other.offload_prompt_only,
            self.tenant or other.tenant,
            self.kv_pin,
            self.kv_unpin,
        )

    @property
    def tag(self) -> bytes:
        """What the scopes of its blocks end with."""
        return tag_of(self.tenant) if self.tenant else b""

    @property
    def loads(self) -> bool:
        """Tell whether anything may be loaded: all that is passes through memory."""
        return self.max_load_tokens > 0 and self.kv_load_tiers.memory

    def stored_tokens(self, prompt_tokens: int) -> int:
        """Return how many of a request's first tokens may be stored."""
        if not self.kv_store_tiers.memory:
            return 0
        most = self.max_offload_tokens
        return min(most, prompt_tokens) if self.offload_prompt_only else most


NO_LIMITS = RequestPolicy()
NOTHING = RequestPolicy(max_load_tokens=0, max_offload_tokens=0)


def policy_of(params: Mapping[str, Any] | None, engine: RequestPolicy = NO_LIMITS) -> RequestPolicy:
    """Return the limits that a request's `kv_transfer_params` and its engine set, the tighter ones.

    Raises ConfigError, naming all that is wrong.
    """
    if not isinstance(params, Mapping) or params.keys().isdisjoint(_READERS):
        return engine
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, read in _READERS.items():
        try:
            if params.get(name) is not None:
                found[name] = read(params[name], {})
        except ConfigError as exc:
            problems.append(f"{name}: {exc}")
    if problems:
        raise ConfigError("; ".join(problems))
    return NO_LIMITS._replace(**found).within(engine)
