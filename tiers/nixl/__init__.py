"""Moves blocks between this node's memory and a peer's, in a process of its own.

NIXL and UCX protect nothing: any peer of an agent can read and overwrite all memory of its process,
and end it. So the store starts a process that has an agent, and passes extents to it: read-only
those to export, read-write those to land in. It holds no keys, leases or secrets.

supervisor.py       the store's side: starts the process, again when it has ended, and talks to it
exporter_child.py   one such process, and the socket to it
messages.py         the messages on that socket
exporter.py         the process: one thread, its loop
transfers.py        the memory it has mapped; transfers: in chunks, in turn
pages.py            addresses of blocks, in slots and in an engine's pages
agent.py            NIXL
ucx.py              UCX's environment, and which hosts it reaches over TCP only
"""
