"""Moves blocks between this node's memory and a peer's, in a process of its own.

NIXL and UCX protect nothing: whoever speaks to an agent can read and overwrite all memory of its
process, and end it. So the store starts a process that has an agent, and hands it extents: those
to export read-only, those to land in read-write. It holds no keys, leases or secrets.

client.py     the store's side: starts the process, again when it has ended, and talks to it
child.py      one such process, and the socket to it
messages.py   what is said on that
process.py    the process: one thread, its loop
extents.py    the memory it has mapped
mover.py      transfers: in chunks, in turn
agent.py      NIXL
"""
