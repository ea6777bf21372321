"""The largest values that a local message may have: what is beyond is no message.

Each is far above what engines say, and small enough for a store that acts on it to go on serving.
They are checked while a message is decoded, before anything is made for it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

FRAME_BYTES_MAX = 32 << 20
"""Of one message to a store: the hashes of 500,000 blocks, or of 16 prompts of a million tokens.
An engine whose store does not read gives up with less of it waiting."""
HELLO_BYTES_MAX = 1 << 20  # until a connection is part of a session: 4,096 layers, with their names
UNFINISHED_BYTES_MAX = 64 << 20  # of messages that have begun, over all connections of a store
OUTBOX_BYTES_MAX = 64 << 20  # that one connection does not read
OUTBOXES_BYTES_MAX = 256 << 20  # that all of them do not read

RANKS_MAX = 1024  # of one engine
GROUPS_MAX = 64  # KV groups of one model; they have less than ten
LAYERS_MAX = 4096  # of one rank; the deepest models have 130
ENGINE_LAYERS_MAX = 1 << 16  # of all ranks together: a layout of these takes a fifth of a second
STORE_LAYERS_MAX = 1 << 18  # of all engines of a store: 200 engines of 8 ranks and 160 layers
HEADS_MAX = 4096  # KV heads of one layer; the widest models have 128
PAGE_BYTES_MAX = 1 << 40
SLOT_BYTES_MAX = 1 << 48
SLOTS_MAX = (1 << 32) - 1  # that an engine asks for at one time
CHUNK_MAX = 1 << 16  # engine blocks of one block
TOKENS_MAX = 1 << 32
TRAITS_MAX = 64

LOOKUP_BLOCKS_MAX = 1 << 18  # of one prompt: four million tokens in blocks of 16
HASH_BYTES_MAX = 64
KEY_BYTES_MAX = 256  # with its group and scope
STEP_ITEMS_MAX = 1 << 16  # requests that one step speaks of
STORED_MAX = 1 << 16  # blocks that one message reports
WORDS_BYTES_MAX = 8 << 20  # of one array of numbers
ASKS_MAX = 1 << 14  # lookups of one engine that wait; the next ones are answered at once
ASKED_BYTES_MAX = 256 << 20  # of their hashes
REQUESTS_MAX = 1 << 16  # requests that run for others, or are held for them
LEASE_MS_MAX = 86_400_000  # a day
BLOCK_NS_MAX = 10**12  # to compute a block
KINDS_MAX = 64  # names that one message counts under
NAME_MAX = 256  # characters
TENANTS_MAX = 256  # of a store; blocks of further tenants count for none
PINS_MAX = 256  # of a store
PIN_BYTES_MAX = 512 << 10  # of the hashes of one: 16,384 blocks of 32 bytes each
PINS_BYTES_MAX = 16 << 20  # of all
TEXT_MAX = 4096
PORT_MAX = 65535

# What is added to counters: none goes down, or to where it is no number any more.
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # of a lease, a lookup, an extent ...
Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]  # of an engine, a layer, a trait ...
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Hash = Annotated[
    bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)
]  # with what belongs to it: a key, a scope
Words = Annotated[bytes, msgspec.Meta(max_length=WORDS_BYTES_MAX)]
LeaseMs = Annotated[int, msgspec.Meta(ge=0, le=LEASE_MS_MAX)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=HEADS_MAX)]
Trailing = Annotated[int, msgspec.Meta(ge=1, lt=TOKENS_MAX)]
