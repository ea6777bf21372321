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
from functools import partial
from pathlib import Path

from kvstore import __version__, trace_commands
from kvstore.arguments import Parser, count, every, prepare_streams, print_json, seconds
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.core.limits import HEADS_MAX
from kvstore.logs import FORMATS, LEVELS, default_format, log_to_stderr
from kvstore.model_size import BYTES_OF, STATE_DTYPES
from kvstore.units import one_line
from kvstore.wire.credentials import read_user
from tiers.nvme.fsck_report import MEANINGS, Amount, FsckReport

_SOCKET = "unix:///run/kvstore/kvstore.sock"
log = logging.getLogger(__name__)

SECONDS = 20.0  # of `check --disk`
SECONDS_MIN = 5
SECONDS_MAX = 600
TEXT_MAX = 2000  # characters of a finding
BLOCK_MAX = 1 << 20
COUNT_MAX = 10**9

_EXAMPLES = """\
examples:
  kvstore check --config kvstore.toml     check a configuration without starting a store
  kvstore size my/model --cpu 64GiB       what a token costs, and how many a tier holds
  kvstore serve --config kvstore.toml     run the store of this node
  kvstore status                          how it is, and what to do about what is wrong
  kvstore top                             the same live
"""

_FSCK = """\
Verify the directory of an NVMe tier that no store uses: read its index and every block.

It is never needed for correctness: a store checks each block that it reads, and a damaged block
is a miss. Run fsck to find damage before a store does, for example after a disk error.

Without --repair, fsck changes nothing, and exit status 1 means that it found damage. With --repair,
it removes damaged blocks and the blocks that continue them from the index, and deletes files that
the index does not have. If it cannot read the index, it renames it and drops all blocks.
"""


_MODEL = "directory or config.json of the engine's model"
_BLOCK_SIZE = "the engine's own --block-size (default: vLLM's on a GPU, 16)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    prepare_streams()
    chosen = _parser().parse_args(arguments)
    try:
        status: int = chosen.run(chosen) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kvstore stats | head`
        _print_no_more()
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
        text = f"{exc.filename or _at_fault()}: {exc.strerror or exc}"
    elif isinstance(exc, MemoryError) and not serves:
        text = "not enough memory for this: free some, or raise its limit (cgroup, ulimit -v)"
    elif str(exc) == "can't start new thread":  # Python has no error of its own for it
        text = f"{exc}: raise the limit of tasks (TasksMax, ulimit -u), or of memory (ulimit -v)"
    else:
        text = f"internal error, please report it: {type(exc).__name__}: {exc}"
        if serves:  # another run may not fail in the same way
            log.critical("internal error", exc_info=exc)
        else:
            text += "; `kvstore --debug ...` shows where"
    print("kvstore: error: " + " ".join(text.split()), file=sys.stderr)
    return 2 if isinstance(exc, ConfigError) else 1


def _at_fault() -> str:
    """Name what an error of the system without a name is about."""
    try:
        sys.stdout.flush()
    except OSError:  # its disk is full
        _print_no_more()
        return "standard output"
    return "the system"


def _print_no_more() -> None:
    """Drop what standard output has not taken, or the end of Python would say it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
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
        made.set_defaults(run=_COMMANDS.get(name, partial(_ask_store, name)), parser=made)
        return made

    serve = add("serve", "run the store of this node", "kvstore serve --config kvstore.toml")
    serve.add_argument("--config", required=True, type=Path, help="the settings, a TOML file")
    serve.add_argument("--log-level", choices=LEVELS, default="info", help="default: info")
    form = "default: journald where standard error goes to systemd's journal, else text"
    serve.add_argument("--log-format", choices=FORMATS, help=form)
    check = add(
        "check", "check the settings of a store or an engine on this machine, or measure a drive",
        "kvstore check --config kvstore.toml", "kvstore check --disk --path /nvme",
        'kvstore check --engine "$KV_TRANSFER_CONFIG" --model my/model',
    )  # fmt: skip
    _add_check(check)
    size = add(
        "size", "say what a token of a model costs, and how many tokens tiers hold",
        "kvstore size my/model", "kvstore size my/model --cpu 64GiB --nvme 1TiB --tokens 8000",
        "kvstore size my/model --config kvstore.toml --dtype fp8",
    )  # fmt: skip
    _add_size(size)
    text = "say how a running store is, what is wrong, and what to do"
    status = add("status", text, "kvstore status", f"kvstore status --json --store {_SOCKET}")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    top = add("top", "show a running store live; q ends it", "kvstore top", "kvstore top --once")
    text = 'how often to look, such as "2s" (default: 1s, at least 100ms)'
    top.add_argument("--every", type=every, default=1.0, help=text)
    top.add_argument("--once", action="store_true", help="show it once")
    top.add_argument("--json", action="store_true", help="print one JSON object each time")
    stats = add("stats", "show the metrics of a running store", f"kvstore stats --store {_SOCKET}")
    stats.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    clear = add("clear", "drop all blocks of a running store", f"kvstore clear --store {_SOCKET}")
    running = status, top, stats, clear, *_life_cycle(add), *trace_commands.of_stores(add)
    user = "name or number of the user that runs the store (default: yourself or root)"
    for command in running:
        place = f"the store's socket, or engine:ID for an engine's private one (default: {_SOCKET})"
        command.add_argument("--store", default=_SOCKET, help=place)
        command.add_argument("--user", type=_user, help=user)
    _without_store(add)
    trace_commands.add_replay(add)
    return parser


def _without_store(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that ask no store."""
    text = "verify the directory of an NVMe tier that no store uses"
    fsck = add("fsck", text, "kvstore fsck /nvme/kv --repair")
    fsck.description = _FSCK
    fsck.add_argument("directory", type=Path, help="the directory, the path of [nvme]")
    fsck.add_argument("--repair", action="store_true", help="remove damaged blocks from the index")
    fsck.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    text = "make a cluster key for stores that hand over blocks to each other"
    keygen = add("keygen", text, "kvstore keygen /etc/kvstore/cluster.key")
    keygen.add_argument("path", type=Path, help="the file to make; an existing file is an error")


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("--config", type=Path, help="the settings, a TOML file")
    check.add_argument("--engine", help="check the JSON of an engine's --kv-transfer-config")
    check.add_argument("--model", type=Path, help=f"with --engine: {_MODEL}")
    check.add_argument(
        "--block-size", type=count(1, BLOCK_MAX), help=f"with --engine: {_BLOCK_SIZE}"
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument("--disk", action="store_true", help="measure the drive instead")
    path = "a directory on the drive (default: path of [nvme] in --config, else the current one)"
    check.add_argument("--path", type=Path, help=f"with --disk: {path}")
    check.add_argument(
        "--seconds",
        type=count(SECONDS_MIN, SECONDS_MAX),
        help="with --disk: how long (default: 20)",
    )


def _add_size(size: argparse.ArgumentParser) -> None:
    size.add_argument("model", type=Path, help=_MODEL)
    size.add_argument("--dtype", default="auto", choices=BYTES_OF, help="data type of the KV")
    kinds = "data type of recurrent states (on a CPU: float32)"
    size.add_argument("--state-dtype", default="auto", choices=STATE_DTYPES, help=kinds)
    size.add_argument("--tp", type=count(1, HEADS_MAX), default=1, help="tensor parallel size")
    size.add_argument("--block-size", type=count(1, BLOCK_MAX), help=_BLOCK_SIZE)
    size.add_argument("--cpu", help='capacity of the memory, such as "64GiB"')
    size.add_argument("--nvme", help='capacity of the disk, such as "1TiB"')
    size.add_argument("--config", type=Path, help="a store's settings, instead of both")
    tokens = "tokens of one prompt (default: 8000)"
    size.add_argument("--tokens", type=count(1, COUNT_MAX), default=8000, help=tokens)
    size.add_argument("--json", action="store_true", help="print one JSON object instead")


def _life_cycle(add: Callable[..., argparse.ArgumentParser]) -> tuple[argparse.ArgumentParser, ...]:
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
        command.add_argument("--wait", type=seconds, default=math.inf, help=text)
    example = f"kvstore reload --store {_SOCKET}"
    reload = add("reload", "have a running store read its configuration again", example)
    reload.add_argument("--json", action="store_true", help="print a JSON list instead of lines")
    example = f"kvstore log-level debug --store {_SOCKET}"
    level = add("log-level", "change the log level of a running store", example)
    level.add_argument("level", choices=LEVELS, help="log this level and what is above")
    example = f"kvstore quota --store {_SOCKET}"
    text = "show what tenants have and may have, or change it"
    quota = add("quota", text, example, f"kvstore quota team-a cpu 8GiB --store {_SOCKET}")
    quota.add_argument("tenant", nargs="?", help="change the limits of this tenant")
    quota.add_argument("tier", nargs="?", choices=["cpu", "nvme"], help="in this tier")
    quota.add_argument("bytes", nargs="?", help='to this quota, such as "8GiB", or "none"')
    quota.add_argument("--floor", help="what the tenant keeps (default: 0B)")
    quota.add_argument("--json", action="store_true", help="print a JSON list instead")
    return resize, drain, reload, level, quota, *_add_pins(add)


def _add_pins(add: Callable[..., argparse.ArgumentParser]) -> tuple[argparse.ArgumentParser, ...]:
    text = "show the prefixes that stay in memory, or pin those of a file again"
    example = f"kvstore pin --json --store {_SOCKET} > pins.json"
    pin = add("pin", text, example, f"kvstore pin pins.json --store {_SOCKET}")
    pin.add_argument("file", nargs="?", type=Path, help="what `kvstore pin --json` has printed")
    pin.add_argument("--json", action="store_true", help="print a JSON list instead")
    text = "end the pin of a prefix"
    unpin = add("unpin", text, f"kvstore unpin system-prompt --store {_SOCKET}")
    unpin.add_argument("name", help="the pin's name, as `kvstore pin` shows it")
    text = "read prefixes from disk into memory, before they are asked for"
    warm = add("warm", text, f"kvstore warm pins.json --store {_SOCKET}")
    warm.add_argument("file", type=Path, help="what `kvstore pin --json` has printed")
    warm.add_argument("--json", action="store_true", help="print a JSON list instead")
    return pin, unpin, warm


def _user(text: str) -> int:
    try:
        return read_user(int(text) if text.isdecimal() else text, {})
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _serve(chosen: argparse.Namespace) -> None:
    from kvstore.check import notes, require
    from kvstore.config import ConfigFile, of_text, text_of
    from kvstore.listener import listen
    from kvstore.store.server import serve
    from kvstore.systemd import Systemd
    from kvstore.units import sized

    systemd = Systemd(os.environ)
    text = text_of(chosen.config)
    config = of_text(text, chosen.config)
    require(config)
    log_to_stderr(form=chosen.log_format or default_format({**os.environ}), level=chosen.log_level)
    listener = listen(config.server.socket, config.server.mode, config.server.group)
    capacity, extent = sized(config.cpu.capacity_bytes), sized(config.cpu.extent_bytes)
    log.info("cpu capacity %s in extents of %s", capacity, extent)
    for finding in notes(config):
        log.warning("%s: %s", finding.what, finding.text)
    serve(config, listener, systemd=systemd, source=ConfigFile.of(chosen.config, text))
    log.info("stopped")


def _check(chosen: argparse.Namespace) -> int:
    from kvstore.check import Level, examine
    from kvstore.config import load

    _refuse_mixed(chosen)
    if chosen.disk:
        return _check_disk(chosen)
    if chosen.engine is not None:
        from kvstore.engine_check import examine_engine

        findings = examine_engine(chosen.engine, chosen.model, chosen.block_size)
    else:
        findings = examine(load(chosen.config))
    if chosen.json:
        print_json(findings)
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            text = one_line(finding.text, TEXT_MAX)
            print(f"{finding.level.value:<4}  {finding.what:<{width}}  {text}")
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    if failed:
        of_all = f"{len(failed)} of {len(findings)} checks"
        whom = "the engine" if chosen.engine is not None else "a store"
        print(f"{of_all} failed: {whom} would not start", file=sys.stderr)
    return 2 if failed else 0


def _refuse_mixed(chosen: argparse.Namespace) -> None:
    """End the command for options that do not go together."""
    given = {"disk": chosen.disk or None, "engine": chosen.engine, "config": chosen.config}
    ways = [name for name, value in given.items() if value is not None]
    if not ways:
        chosen.parser.error("expected --config FILE, --engine JSON, or --disk, found none of them")
    if "engine" in ways and len(ways) > 1:
        chosen.parser.error(f"expected one of --{' and --'.join(ways)}, found both")
    if "engine" not in ways and (chosen.model or chosen.block_size):
        chosen.parser.error("--model and --block-size are for --engine, found no --engine")
    if "disk" not in ways and (chosen.path or chosen.seconds):
        chosen.parser.error("--path and --seconds are for --disk, found no --disk")


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
        print_json(report)
    else:
        show(report)
    return 0


def _size(chosen: argparse.Namespace) -> None:
    from kvstore.config import CpuConfig, NvmeConfig, load
    from kvstore.model_size import model_size, report, show
    from kvstore.settings import read_section

    found: dict[str, CpuConfig | NvmeConfig | None] = {}
    if chosen.config is not None:
        if chosen.cpu or chosen.nvme:
            chosen.parser.error("expected --config, or --cpu and --nvme, found both")
        config = load(chosen.config)
        found = {"cpu": config.cpu, "nvme": config.nvme}
    if chosen.cpu:
        found["cpu"] = read_section(CpuConfig, {"capacity": chosen.cpu}, "--cpu")
    if chosen.nvme:
        table = {"path": "/", "capacity": chosen.nvme}
        found["nvme"] = read_section(NvmeConfig, table, "--nvme")
    tiers = {name: (tier.capacity_bytes, tier.extent_bytes) for name, tier in found.items() if tier}
    size = model_size(chosen.model, chosen.dtype, chosen.state_dtype, chosen.tp, chosen.block_size)
    told = report(size, tiers, chosen.tokens)
    if chosen.json:
        print_json(told)
    else:
        show(told)


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
        print_json(report)
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


def _keygen(chosen: argparse.Namespace) -> None:
    from kvstore.handover.cluster_key import ClusterKey

    ClusterKey.make(chosen.path)
    print(f"{chosen.path}: new cluster key; copy it to each store and name it in [peer] key")


def _ask_store(name: str, chosen: argparse.Namespace) -> int | None:
    from kvstore.store_commands import COMMANDS

    return COMMANDS[name](chosen)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "serve": _serve, "check": _check, "size": _size, "fsck": _fsck, "keygen": _keygen,
    "replay": trace_commands.replay_trace,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
