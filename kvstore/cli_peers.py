"""The commands about other stores: their key, what they have, fetching it, and a router."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, KVStoreError
from kvstore.users import read_user

if TYPE_CHECKING:
    from kvstore.pull import Pulled, Puller

SHOWN_KEYS = 20
SHOWN_DIGITS = 16  # of a block's hash
_SOCKET = "unix:///run/kvstore/kvstore.sock"

_PULL = """\
Fetch blocks from a store's side channel, as a store does for its engines, and say of each where
that store had it, whether its checksum is right and how long it took. For debugging.

Which blocks: --key, or --request for those held for a request that was handed over. Names of
namespaces and keys are listed by kvstore keys, on the node of that store: its side channel tells
nobody what there is, and who has no cluster key learns nothing at all. What is pulled stays held.

Exit status 1 if one of the blocks did not come.
"""
_PULL_EXAMPLES = """\
examples:
  kvstore pull --from 10.0.0.5:9500 --namespace 5f0c... --key 9a41... --cluster-key cluster.key
  kvstore pull --from 10.0.0.5:9500 --namespace 5f0c... --request cmpl-7 --json
  kvstore pull --from 127.0.0.1:9500 --namespace 5f0c... --request cmpl-7 --out /tmp/blocks
"""
_ROUTER = """\
A small HTTP proxy before prefill and decode engines, for demonstrations and tests. For production
take a router that knows the load of its engines: vLLM's own, llm-d, or the one you have. All of
them pass along the parameters that a hand-over needs.

It serves /v1/completions and /v1/chat/completions. Each request goes to a prefill engine first,
for one token, and then to a decode engine with the parameters that came back; its answer is passed
on as it comes. When a prefill engine fails, the decode engine computes the prompt. Engines take
turns. /metrics counts the legs.
"""

Add = Callable[[str, str, str], argparse.ArgumentParser]


def add_commands(add: Add) -> None:
    """Add these commands to the parser."""
    keygen = add(
        "keygen",
        "make a cluster key, which stores that hand over blocks to each other share",
        "kvstore keygen /etc/kvstore/cluster.key",
    )
    keygen.set_defaults(run=_keygen)
    keygen.add_argument("path", type=Path, help="file to make; one that is there is kept")

    keys = add(
        "keys",
        "list a running store's namespaces, and keys of blocks in its memory",
        f"kvstore keys --store {_SOCKET}",
    )
    keys.set_defaults(run=_keys)
    add_store(keys)
    keys.add_argument(
        "--limit",
        type=int,
        default=SHOWN_KEYS,
        help=f"keys of each namespace, 1,000 at most (default: {SHOWN_KEYS})",
    )
    keys.add_argument("--json", action="store_true", help="a JSON list instead of tables")
    _add_pull(add)
    _add_router(add)


def add_store(command: argparse.ArgumentParser) -> None:
    """Let a command be told which running store is meant, and who may be running it."""
    command.add_argument(
        "--store",
        required=True,
        help=f"the store's socket, as {_SOCKET}, or engine:ID for that engine's private one",
    )
    command.add_argument(
        "--user",
        type=_user,
        help="name or number of who runs the store, if that is neither you nor root",
    )


def _user(text: str) -> int:
    try:
        return read_user(int(text) if text.isdecimal() else text, {})
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _add_pull(add: Add) -> None:
    pull = add("pull", "fetch blocks from another store, to look at a hand-over", "")
    pull.description, pull.epilog = _PULL, _PULL_EXAMPLES
    pull.set_defaults(run=_pull)
    pull.add_argument(
        "--from",
        dest="peer",
        required=True,
        metavar="HOST:PORT",
        help="the store's side channel, its [peer] listen",
    )
    pull.add_argument("--namespace", required=True, help="digest of the model's blocks, 64 digits")
    pull.add_argument(
        "--key",
        nargs="+",
        action="extend",
        default=[],
        help="blocks: 64 hexadecimal digits of a block hash, or a whole key",
    )
    pull.add_argument("--request", help="those held for a request, by its remote_request_id")
    pull.add_argument("--cluster-key", type=Path, help="key file, where that store has one")
    pull.add_argument("--devices", default="lo", help="as in [peer] (default: lo)")
    pull.add_argument("--out", type=Path, metavar="DIR", help="write each block there, as KEY.kv")
    pull.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _add_router(add: Add) -> None:
    router = add(
        "router",
        "pass requests to prefill and decode engines, for demonstrations and tests",
        "kvstore router --prefill http://10.0.0.5:8000 --decode http://10.0.0.6:8000",
    )
    router.description = _ROUTER
    router.set_defaults(run=_router)
    for side in ("prefill", "decode"):
        router.add_argument(
            f"--{side}",
            action="append",
            required=True,
            metavar="URL",
            help=f"a {side} engine's API server; may be given several times",
        )
    router.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        metavar="HOST:PORT",
        help="where to serve, port 0 for a free one (default: 127.0.0.1:8000)",
    )


def _keygen(chosen: argparse.Namespace) -> int:
    from kvstore.service.channel import ClusterKey

    ClusterKey.make(chosen.path)
    print(f"{chosen.path}: a new cluster key; copy it to every store as [peer] key")
    return 0


def _keys(chosen: argparse.Namespace) -> int:
    import msgspec
    from rich.table import Table

    from kvstore import admin
    from kvstore.printing import output

    if chosen.limit < 1:
        raise ConfigError(f"--limit: expected at least 1, found {chosen.limit}")
    found = [
        msgspec.structs.replace(one, keys=dict(list(one.keys.items())[: chosen.limit]))
        for one in admin.blocks(chosen.store, user=chosen.user)
    ]
    if chosen.json:
        print(msgspec.json.encode(found).decode())
        return 0
    if not found:
        print("no engine has attached to this store yet")
    for one in found:
        print(f"namespace {one.namespace}")
        print(f"  {one.blocks:,} blocks of {one.block_bytes:,} bytes, {one.groups} KV groups")
        table = Table(box=None, header_style="bold")
        table.add_column("key", no_wrap=True)
        table.add_column("tiers", no_wrap=True)
        for key, tiers in one.keys.items():
            table.add_row(key, " ".join(tiers))
        output().print(table)
        if len(one.keys) < one.blocks:
            print(f"  {one.blocks - len(one.keys):,} more are not shown")
    return 0


def _pull(chosen: argparse.Namespace) -> int:
    from kvstore.pull import Puller
    from kvstore.service.channel import ClusterKey

    if not chosen.key and chosen.request is None:
        raise ConfigError("expected --key or --request, found neither; kvstore keys lists keys")
    peer = _address(chosen.peer, "--from", port_min=1)
    wanted = [_block(text) for text in chosen.key]
    key = None if chosen.cluster_key is None else ClusterKey.read(chosen.cluster_key)
    if chosen.out is not None:
        _make_folder(chosen.out)
    began_s = time.monotonic()
    with Puller(peer, chosen.namespace, key, devices=chosen.devices) as puller:
        if chosen.request is not None:
            wanted += puller.held(chosen.request)
        ready_s = time.monotonic()
        asked = {key: n for n, block in enumerate(wanted) for key in puller.keys_of(block)}
        found = list(_watched(puller, list(asked), chosen.out))
        seconds = time.monotonic() - ready_s
    found.sort(key=lambda block: asked[block.key])
    if chosen.json:
        print(json.dumps(_as_json(puller, found, seconds)))
    else:
        _show(puller, found, seconds)
        print(f"meeting the peer and starting an exporter took {ready_s - began_s:.1f} s")
    return 1 if any(block.problem for block in found) else 0


def _address(text: str, option: str, port_min: int = 0) -> str:
    """Check host:port."""
    from kvstore.config import PEER

    try:
        found: dict[str, Any] = PEER["listen"].read(text, {})
    except ConfigError as exc:
        raise ConfigError(f"{option}: {exc}") from None
    if found["port"] < port_min:
        raise ConfigError(f"{option}: expected a port from {port_min}, found {found['port']}")
    return text


def _block(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"--key: expected hexadecimal digits, found {text!r}") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {folder}: {exc.strerror}") from exc


def _watched(puller: Puller, keys: Sequence[bytes], folder: Path | None) -> Iterator[Pulled]:
    """Pull, with a bar; what is written to files is not kept."""
    import msgspec

    from kvstore.printing import share

    with share() as watch:
        for count, block in enumerate(puller.pull(keys), start=1):
            watch(count / len(keys), f"{count:,} of {len(keys):,} blocks")
            if folder is not None and block.data is not None:
                path = folder / f"{block.key.hex()}.kv"
                try:
                    path.write_bytes(block.data)
                except OSError as exc:
                    raise KVStoreError(f"{path}: {exc.strerror}") from exc
            yield msgspec.structs.replace(block, data=None)


def _as_json(puller: Puller, found: list[Pulled], seconds: float) -> dict[str, Any]:
    size = puller.block_bytes
    came = size * sum(not block.problem for block in found)
    return {
        "peer": puller.peer,
        "namespace": puller.namespace,
        "block_bytes": size,
        "groups": puller.groups,
        "bytes": came,
        "seconds": seconds,
        "bytes_per_s": came / seconds if seconds else 0.0,
        "blocks": [
            {
                "key": block.key.hex(),
                "tier": block.tier,
                "ok": not block.problem,
                "problem": block.problem or None,
                "seconds": block.seconds,
                "bytes_per_s": size / block.seconds if not block.problem else 0.0,
            }
            for block in found
        ],
    }


def _show(puller: Puller, found: list[Pulled], seconds: float) -> None:
    from rich.table import Table

    from kvstore.printing import output
    from kvstore.quantities import sized

    table = Table(box=None, header_style="bold")
    table.add_column("block", no_wrap=True)
    table.add_column("group", justify="right", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for heading in ("bytes", "time", "rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("checksum")
    size = puller.block_bytes
    for block in found:
        name, group = block.key.hex()[:SHOWN_DIGITS], int.from_bytes(block.key[32:34], "big")
        if block.problem:
            table.add_row(name, str(group), block.tier or "-", "-", "-", "-", block.problem)
        else:
            took, rate = f"{block.seconds * 1e3:.1f} ms", f"{size / block.seconds / 1e6:,.0f} MB/s"
            table.add_row(name, str(group), block.tier, f"{size:,}", took, rate, "right")
    output().print(table)
    came = sum(not block.problem for block in found)
    per_second = came * size / max(seconds, 1e-9) / 1e9
    print(
        f"{came:,} of {len(found):,} blocks, {sized(came * size)}"
        f" in {seconds:.2f} s, {per_second:.2f} GB/s"
    )


def _router(chosen: argparse.Namespace) -> int:
    try:
        from kvstore import router
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"kvstore router needs {exc.name}: pip install 'kvstore[router]'; vLLM brings it along"
        ) from exc
    address = _address(chosen.listen, "--listen")
    return router.main(chosen.prefill, chosen.decode, address)
