"""`kvstore record`: what engines look up at a running store, as a trace that can be replayed.

Names of blocks are hashed with a salt that is made for the recording and kept nowhere: the trace
says which prompts began alike, and nothing of what they said, nor does another recording's.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.replay import Request
from kvstore.store import admin
from kvstore.store.recorder import Recorded

_EVERY_S = 0.25
_ID_BYTES = 8
_ID_MAX = (1 << 63) - 1


class Written(msgspec.Struct, frozen=True):
    """How far a recording is. dropped: lookups that came too fast to be kept."""

    seconds: float
    requests: int
    blocks: int
    bytes: int
    dropped: int


def record(
    store: str,
    path: Path,
    seconds: float,
    bytes_max: int,
    user: int | None = None,
    watch: Callable[[Written], object] = lambda _: None,
) -> Written:
    """Write a trace for so long, or until the file has bytes_max; Ctrl-C ends it early, too.

    Raises StoreUnreachable, StoreRefused; ConfigError for a file that cannot be made, KVStoreError
    for one that cannot be written on.
    """
    number, salt = 1 + secrets.randbits(62), secrets.token_bytes(32)
    admin.record(store, number, user)
    began_s, requests, blocks, dropped, first_ms = time.monotonic(), 0, 0, 0, -1
    done = None
    try:
        with path.open("xb") as file:
            done = Written(0.0, 0, 0, 0, 0)
            while done.seconds < seconds and done.bytes < bytes_max:
                try:
                    time.sleep(min(_EVERY_S, seconds - done.seconds))
                    ended = False
                except KeyboardInterrupt:
                    ended = True
                found = admin.record(store, number, user)
                dropped += found.dropped
                lines = list[bytes]()
                for each in found.lookups:
                    first_ms = each.ms if first_ms < 0 else first_ms
                    request = _request(each, salt, first_ms)
                    requests, blocks = requests + 1, blocks + len(request.hash_ids)
                    lines.append(msgspec.json.encode(request) + b"\n")
                if lines or not done.bytes:  # whole in itself, whatever comes after it
                    file.write(gzip.compress(b"".join(lines)))
                    file.flush()
                took_s = time.monotonic() - began_s
                done = Written(took_s, requests, blocks, file.tell(), dropped)
                watch(done)
                if ended:
                    break
    except OSError as exc:
        text = f"{path}: cannot be written: {exc.strerror}"
        if done is None:
            raise ConfigError(text) from exc
        with contextlib.suppress(OSError):
            os.truncate(path, done.bytes)
        raise KVStoreError(f"{text}; it has what came before, requests: {done.requests}") from exc
    except admin.StoreUnreachable as exc:
        kept = f"{path} has what came before, requests: {requests}"
        raise admin.StoreUnreachable(f"{exc}; {kept}") from exc
    finally:
        with contextlib.suppress(KVStoreError):  # it has gone, and the recording with it
            admin.record(store, number, user, ends=True)
    return done


def _request(found: Recorded, salt: bytes, first_ms: int) -> Request:
    ids = []
    for at in range(0, len(found.hashes), found.width):
        name = hashlib.blake2b(found.hashes[at : at + found.width], digest_size=_ID_BYTES, key=salt)
        name.update(found.namespace.encode() + found.scope)
        ids.append(int.from_bytes(name.digest(), "little") & _ID_MAX)
    tokens = int(found.block_tokens) if found.block_tokens.isdecimal() else 0
    return Request(ids, found.ms - first_ms, len(ids) * tokens)
