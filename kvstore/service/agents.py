"""Which peers' exporters ours knows: those of open connections, and some of before.

NIXL keeps a socket for each peer that is forgotten and met again while it lives, and nothing for
one that has ended. So peers are kept beyond their connections, and the longest unused go first.
"""

from __future__ import annotations

from typing import Protocol

KNOWN_MAX = 1024


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
        self._named: dict[int, str] = {}  # by connection
        self._users: dict[str, set[int]] = {}  # their connections; longest unused first

    def __len__(self) -> int:
        """Count the exporters that ours knows."""
        return len(self._users)

    def meet(self, connection: int, agent: str, metadata: bytes) -> None:
        """A peer has said who its exporter is; no name: it has none."""
        if agent:
            self._named[connection] = agent
            users = self._users.pop(agent, set())
            users.add(connection)
            self._users[agent] = users
            self._mover.add_peer(agent, metadata)
            self._forget_some()

    def update(self, connection: int, metadata: bytes) -> None:
        """A peer's exporter has other memory now. One that was not named is not known."""
        agent = self._named.get(connection)
        if agent is not None:
            self._mover.add_peer(agent, metadata)

    def leave(self, connection: int) -> None:
        """A connection has ended."""
        agent = self._named.pop(connection, None)
        if agent is not None:
            self._users[agent].discard(connection)
            self._users[agent] = self._users.pop(agent)
            self._forget_some()

    def _forget_some(self) -> None:
        if len(self._users) > KNOWN_MAX:
            unused = [agent for agent, users in self._users.items() if not users]
            for agent in unused[: len(self._users) - KNOWN_MAX]:
                del self._users[agent]
                self._mover.remove_peer(agent)
