"""Which agents of peers our exporter knows: those of open connections, and some of before.

NIXL keeps a socket for each peer that is forgotten and met again while it lives, and nothing for
one that has ended. So peers are kept beyond their connections, and the longest unused go first.
"""

from __future__ import annotations

from typing import Protocol

KNOWN_MAX = 1024
NAMED_MAX = 256  # on one connection: an exporter, and engines' workers that are written to


class Mover(Protocol):
    """Who tells the exporter."""

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Learn how to reach a peer's exporter now."""
        ...

    def remove_peer(self, agent: str) -> None:
        """Forget a peer's exporter; what is open with it fails."""
        ...


class Agents:
    """Peers' exporters, by the connections that they were named on."""

    def __init__(self, mover: Mover) -> None:
        """mover: is told, and keeps telling each new exporter of ours."""
        self._mover = mover
        self._named: dict[int, list[str]] = {}  # by connection; the first is its exporter
        self._users: dict[str, set[int]] = {}  # their connections; longest unused first
        self._reached: dict[str, bytes] = {}  # their metadata

    def __len__(self) -> int:
        """Count the exporters that ours knows."""
        return len(self._users)

    def meet(self, connection: int, agent: str, metadata: bytes) -> None:
        """A peer has said who its exporter is, or a worker of its engine; no name: it has none."""
        if agent:
            named = self._named.setdefault(connection, [])
            if agent not in named:
                named.append(agent)
            if len(named) > NAMED_MAX:
                self._users[named.pop(1)].discard(connection)
            users = self._users.pop(agent, set())
            users.add(connection)
            self._users[agent] = users
            self._add(agent, metadata)
            self._forget_some()

    def update(self, connection: int, metadata: bytes) -> None:
        """A peer's exporter has other memory now. One that was not named is not known."""
        named = self._named.get(connection)
        if named is not None:
            self._add(named[0], metadata)

    def _add(self, agent: str, metadata: bytes) -> None:
        self._reached[agent] = metadata
        self._mover.add_peer(agent, metadata)

    def metadata(self, agent: str) -> bytes:
        """Say how one is reached; nothing of one that is not known."""
        return self._reached.get(agent, b"")

    def leave(self, connection: int) -> None:
        """A connection has ended."""
        for agent in self._named.pop(connection, ()):
            self._users[agent].discard(connection)
            self._users[agent] = self._users.pop(agent)
        self._forget_some()

    def _forget_some(self) -> None:
        if len(self._users) > KNOWN_MAX:
            unused = [agent for agent, users in self._users.items() if not users]
            for agent in unused[: len(self._users) - KNOWN_MAX]:
                del self._users[agent], self._reached[agent]
                self._mover.remove_peer(agent)
