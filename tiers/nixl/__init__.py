"""Moves blocks between this node's memory and a peer's, in a process of its own.

NIXL and UCX protect nothing: any peer of an agent can read and overwrite all memory of its process,
and end it. So the store starts a process that has an agent, and passes extents to it: read-only
those to export, read-write those to land in. It holds no keys, leases or secrets.

supervisor.py   the store's side: starts the process, again when it has ended, and talks to it
messages.py     the messages between them
exporter.py     the process: one thread; the memory it has mapped; transfers in chunks, in turn
agent.py        NIXL
pages.py        addresses of blocks, in slots and in an engine's pages
ucx.py          UCX's environment, and which hosts it reaches over TCP only
"""
