"""The `kvstore` command: run a store, check a configuration, and administer a running store.

Exit status: 0 done, 1 failed, 2 wrong arguments or configuration, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvstore import __version__
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.wire.credentials import read_user
from tiers.nvme.fsck_report import MEANINGS, Amount, FsckReport

_SOCKET = "unix:///run/kvstore/kvstore.sock"
log = logging.getLogger(__name__)

SECONDS = 20.0  # of `check --disk`
SECONDS_MIN = 5
SECONDS_MAX = 600

_EXAMPLES = f"""\
examples:
  kvstore check --config kvstore.toml     check a configuration without starting a store
  kvstore serve --config kvstore.toml     run the store of this node
  kvstore stats --store {_SOCKET}
"""

_FSCK = """\
Verify the directory of an NVMe tier that no store uses: read its index and every block.

It is never needed for correctness: a store checks each block that it reads, and a damaged block
is a miss. Run fsck to find damage before a store does, for example after a disk error.

Without --repair, fsck changes nothing, and exit status 1 means that it found damage. With --repair,
it removes damaged blocks and the blocks that continue them from the index, and deletes files that
the index does not have. If it cannot read the index, it renames it and drops all blocks.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kvstore stats | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the end of Python would say it again
        return 1
    except Exception as exc:  # any failure is one line
        if chosen.debug:
            raise
        return _failed(exc, serves=chosen.run is _serve)
    return status


def _failed(exc: Exception, *, serves: bool) -> int:
    """Print one line that says what failed; return the exit status."""
    if isinstance(exc, KVStoreError):
        text = str(exc)
    elif isinstance(exc, OSError):
        text = f"{exc.filename or 'the system'}: {exc.strerror or exc}"
    else:
        text = f"internal error, please report it: {type(exc).__name__}: {exc}"
        if serves:  # another run may not fail in the same way
            log.critical("internal error", exc_info=exc)
        else:
            text += "; `kvstore --debug ...` shows where"
    print("kvstore: error: " + " ".join(text.split()), file=sys.stderr)
    return 2 if isinstance(exc, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="kvstore", description="A tiered KV cache service for LLM engines.",
        epilog=_EXAMPLES, formatter_class=raw,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")

    def add(name: str, text: str, *examples: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", formatter_class=raw,
            epilog="\n  ".join([f"example{'s' * (len(examples) > 1)}:", *examples]),
        )  # fmt: skip
        made.set_defaults(run=_COMMANDS[name], parser=made)
        return made

    serve = add("serve", "run the store of this node", "kvstore serve --config kvstore.toml")
    serve.add_argument("--config", required=True, type=Path, help="the settings, a TOML file")
    check = add(
        "check", "check a configuration on this machine, or measure a drive",
        "kvstore check --config kvstore.toml", "kvstore check --disk --path /nvme",
    )  # fmt: skip
    check.add_argument("--config", type=Path, help="the settings, a TOML file")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument("--disk", action="store_true", help="measure the drive instead")
    path = "a directory on the drive (default: path of [nvme] in --config, else the current one)"
    check.add_argument("--path", type=Path, help=f"with --disk: {path}")
    check.add_argument("--seconds", type=_seconds, help="with --disk: how long (default: 20)")
    stats = add("stats", "show the metrics of a running store", f"kvstore stats --store {_SOCKET}")
    stats.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    clear = add("clear", "drop all blocks of a running store", f"kvstore clear --store {_SOCKET}")
    running = stats, clear, *_life_cycle(add)
    user = "name or number of the user that runs the store (default: yourself or root)"
    for command in running:
        place = f"the store's socket, such as {_SOCKET}, or engine:ID for an engine's private one"
        command.add_argument("--store", required=True, help=place)
        command.add_argument("--user", type=_user, help=user)
    text = "verify the directory of an NVMe tier that no store uses"
    fsck = add("fsck", text, "kvstore fsck /nvme/kv --repair")
    commands.choices["fsck"].description = _FSCK
    fsck.add_argument("directory", type=Path, help="the directory, the path of [nvme]")
    fsck.add_argument("--repair", action="store_true", help="remove damaged blocks from the index")
    fsck.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    text = "make a cluster key for stores that hand over blocks to each other"
    keygen = add("keygen", text, "kvstore keygen /etc/kvstore/cluster.key")
    keygen.add_argument("path", type=Path, help="the file to make; an existing file is an error")
    return parser


def _life_cycle(
    add: Callable[..., argparse.ArgumentParser],
) -> tuple[argparse.ArgumentParser, ...]:
    """Add the commands that change how a running store goes on."""
    example = f"kvstore resize nvme 500GiB --store {_SOCKET}"
    text = "change the memory or disk capacity of a running store"
    resize = add("resize", text, example, f"kvstore resize cpu 64GiB --store {_SOCKET}")
    resize.add_argument("tier", choices=["cpu", "nvme"], help="the tier to resize")
    resize.add_argument("capacity", help='the new capacity, such as "500GiB"')
    text = "also write the capacity to the file that the store was started with"
    resize.add_argument("--persist", action="store_true", help=text)
    example = f"kvstore drain --store {_SOCKET}"
    text = "take no new engines, and write to disk what only memory has"
    drain = add("drain", text, example, f"{example} --cancel")
    how = drain.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="end the sessions of attached engines")
    how.add_argument("--cancel", action="store_true", help="take engines again")
    drain.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (resize, drain):
        text = 'how long to wait, such as "30s" (default: until it is done)'
        command.add_argument("--wait", type=_wait, default=math.inf, help=text)
    example = f"kvstore reload --store {_SOCKET}"
    reload = add("reload", "have a running store read its configuration again", example)
    reload.add_argument("--json", action="store_true", help="print a JSON list instead of lines")
    return resize, drain, reload


def _user(text: str) -> int:
    try:
        return read_user(int(text) if text.isdecimal() else text, {})
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _seconds(text: str) -> float:
    if not text.isdecimal() or not SECONDS_MIN <= int(text) <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {SECONDS_MIN} to {SECONDS_MAX}, found {text!r}"
        )
    return float(text)


def _wait(text: str) -> float:
    from kvstore.units import parse_duration_ns

    try:
        return parse_duration_ns(text) / 1e9
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode())


def _serve(chosen: argparse.Namespace) -> int:
    from kvstore.check import require
    from kvstore.config import ConfigFile, of_text, text_of
    from kvstore.listener import listen
    from kvstore.logs import log_to_stderr
    from kvstore.memory_limits import MARGIN_BYTES, memory_left
    from kvstore.store.server import serve
    from kvstore.units import sized

    text = text_of(chosen.config)
    config = of_text(text, chosen.config)
    require(config)
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")
    listener = listen(config.server.socket, shared=bool(config.server.allow))
    capacity, available = config.cpu.capacity_bytes, memory_left()
    extent = sized(config.cpu.extent_bytes)
    log.info("cpu capacity %s in extents of %s", sized(capacity), extent)
    if capacity + MARGIN_BYTES > available.bytes:
        log.warning(
            "only %s of memory are available now (%s): the cpu tier stops growing at %s",
            sized(available.bytes), available.of, sized(MARGIN_BYTES),
        )  # fmt: skip
    serve(config, listener, source=ConfigFile.of(chosen.config, text))
    log.info("stopped")
    return 0


def _check(chosen: argparse.Namespace) -> int:
    from kvstore.check import Level, examine
    from kvstore.config import load

    if chosen.disk:
        return _check_disk(chosen)
    if chosen.config is None:
        chosen.parser.error("expected --config FILE, or --disk to measure a drive")
    if chosen.path or chosen.seconds:
        chosen.parser.error("--path and --seconds are for --disk, found no --disk")
    findings = examine(load(chosen.config))
    if chosen.json:
        _print_json(findings)
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{finding.level.value:<4}  {finding.what:<{width}}  {finding.text}")
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if failed:
        of_all = f"{len(failed)} of {len(findings)} checks"
        print(f"{of_all} failed: a store would not start", file=sys.stderr)
    return 2 if failed else 0


def _check_disk(chosen: argparse.Namespace) -> int:
    from kvstore.config import load

    if chosen.path is not None and chosen.config is not None:
        chosen.parser.error("expected one of --path and --config, found both")
    folder: Path = chosen.path or Path.cwd()
    if chosen.config is not None:
        nvme = load(chosen.config).nvme
        if nvme is None:
            raise ConfigError(f"{chosen.config}: expected [nvme] with a path, found none")
        folder = next(p for p in (Path(nvme.path), *Path(nvme.path).parents) if p.exists())
    from kvstore.printing import share
    from tiers.nvme.drive_check import measure, show

    with share() as watch:
        report = measure(folder, chosen.seconds or SECONDS, watch)
    if chosen.json:
        _print_json(report)
    else:
        show(report)
    return 0


def _stats(chosen: argparse.Namespace) -> int:
    from kvstore.store import admin

    found = admin.stats(chosen.store, user=chosen.user)
    if chosen.json:
        _print_json(found)
        return 0
    from kvstore.printing import output, table

    shown = table("metric", "labels", "value>")
    for stat in found:
        labels = " ".join(f"{name}={label}" for name, label in stat.labels.items())
        shown.add_row(stat.name, labels, f"{stat.value:,.10g}")
    output().print(shown)
    return 0


def _clear(chosen: argparse.Namespace) -> int:
    from kvstore.store import admin

    left = sum(
        int(stat.value)
        for stat in admin.clear(chosen.store, user=chosen.user)
        if stat.name == "kvstore_slots" and stat.labels.get("state") == "used"
    )
    print(f"cleared; {left} blocks are in use and stay until their requests end")
    return 0


def _fsck(chosen: argparse.Namespace) -> int:
    from kvstore.printing import share
    from tiers.nvme.fsck import examine

    start_s = time.monotonic()
    with share() as tell:

        def watch(done: Amount, whole: Amount) -> None:
            nonlocal start_s
            if not done.count:  # the index has been read
                start_s = time.monotonic()
            seconds = max(time.monotonic() - start_s, 1e-9)
            rate = f"{done.count / seconds:,.0f} blocks/s, {done.bytes / seconds / 1e9:.2f} GB/s"
            tell(done.bytes / max(1, whole.bytes), rate)

        report: FsckReport = examine(chosen.directory, repair=chosen.repair, watch=watch)
    if chosen.json:
        _print_json(report)
    else:
        _show_fsck(report)
    return 0 if report.ok or chosen.repair else 1


def _show_fsck(report: FsckReport) -> None:
    from kvstore.printing import output, table
    from kvstore.units import sized

    shown = table("what", "state", "count>", "bytes>", "meaning")
    for what, state, amount in report.rows():
        style = "red" if amount.count and state != "ok" else None
        meaning = MEANINGS[what][state]
        shown.add_row(what, state, f"{amount.count:,}", sized(amount.bytes), meaning, style=style)
    if report.index_error is not None:
        print(f"the index is damaged: {report.index_error}")
    output().print(shown)
    seconds = max(report.read_s, 1e-9)
    print(
        f"{sized(report.used_bytes)} on disk; {sized(report.read_bytes)} of blocks read in"
        f" {report.read_s:.1f} s, {report.read_bytes / seconds / 1e9:.2f} GB/s"
    )
    if not report.in_order:
        print("the last store did not shut down in order; its last writes may be missing")
    done = report.repair
    if done is None:
        print("all is in order" if report.ok else "damaged; --repair removes the damage")
        return
    if done.index_kept_as is not None:
        print(f"the damaged index is kept as {done.index_kept_as}; the directory is empty now")
    print(
        f"repaired: {done.blocks_dropped} blocks and {done.extents_dropped} extents dropped from"
        f" the index, {done.files_removed} files removed"
    )


def _resize(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from kvstore.config import CpuConfig, NvmeConfig
    from kvstore.settings import settings_of
    from kvstore.store import admin
    from kvstore.units import sized

    kind = CpuConfig if chosen.tier == "cpu" else NvmeConfig
    try:
        capacity = int(settings_of(kind)["capacity"].read(chosen.capacity, {}))
    except ConfigError as exc:
        raise ConfigError(f"capacity: {exc}") from None
    deadline_s = time.monotonic() + chosen.wait
    with Console(stderr=True).status("resizing") as status:
        for used, cap, held in admin.resize(chosen.store, chosen.tier, capacity, chosen.user):
            waits = f", waits for {held:,} slots that requests or engines hold" if held else ""
            now = f"{chosen.tier}: capacity {sized(cap)}, {sized(used)} in use"
            status.update(now + waits)
            if time.monotonic() >= deadline_s:
                break
    print(now)
    if used > cap:
        print(f"not yet within its capacity{waits}; the store goes on", file=sys.stderr)
    if chosen.persist:
        _persist(chosen)
    else:
        text = "after a restart the capacity of the configuration file holds again (--persist)"
        print(text, file=sys.stderr)
    return int(used > cap)


def _persist(chosen: argparse.Namespace) -> None:
    """Write a capacity that the store has to the file that it was started with."""
    from kvstore.config_edit import NotWritten, persist
    from kvstore.store import admin

    source = admin.source(chosen.store, user=chosen.user)
    if source is None:
        raise NotWritten("not written: this store has no file of settings; it is an engine's own")
    capacity = chosen.capacity.strip()
    value = capacity if capacity.isdecimal() else f'"{capacity}"'
    persist(source, chosen.tier, "capacity", value)
    admin.reload(chosen.store, user=chosen.user)  # so that it knows the file as it is now
    print(f"{source.path}: [{chosen.tier}] capacity = {value}")


def _reload(chosen: argparse.Namespace) -> int:
    from kvstore.store import admin

    found = admin.reload(chosen.store, user=chosen.user)
    if chosen.json:
        _print_json(found.differing)
        return 0
    for difference in found.differing:
        print(difference.text)
    if not found.differing:
        print("nothing differs from the file")
    return 0


def _drain(chosen: argparse.Namespace) -> int:
    from kvstore.printing import share
    from kvstore.store import admin
    from kvstore.store.drain import DRAIN, DRAIN_CANCEL, DRAIN_NOW

    what = DRAIN_CANCEL if chosen.cancel else DRAIN_NOW if chosen.now else DRAIN
    deadline_s = time.monotonic() + chosen.wait
    with share() as tell:
        for state in admin.drain(chosen.store, what, chosen.user):
            text = f"{state.engines} engines attached, {state.queued:,} blocks to write"
            tell(state.written / max(1, state.written + state.queued), text)
            if time.monotonic() >= deadline_s:
                break
    if chosen.json:
        _print_json(state)
    elif chosen.cancel:
        print("the store takes engines and peers again")
    elif state.done:
        print(f"drained: {state.written:,} blocks written, no engine is attached")
    else:
        print(f"not drained yet: {text}; the store goes on")
    if state.failed:
        print(f"{state.failed:,} blocks could not be written; see the log", file=sys.stderr)
    return int(not chosen.cancel and (not state.done or state.failed > 0))


def _keygen(chosen: argparse.Namespace) -> int:
    from kvstore.handover.cluster_key import ClusterKey

    ClusterKey.make(chosen.path)
    print(f"{chosen.path}: new cluster key; copy it to each store and name it in [peer] key")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve, "check": _check, "stats": _stats, "clear": _clear,
    "resize": _resize, "reload": _reload, "drain": _drain, "fsck": _fsck, "keygen": _keygen,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
