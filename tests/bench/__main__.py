"""Measure on this machine: `tests.bench NAME [--json]`.

Exit status: 0 done, 1 it did not work, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from kvstore.core.errors import ConfigError, KVStoreError
from tests.bench import report
from tests.bench.steal import Watch
from tests.bench.store import end_as_interrupted

# By name: each loads only what it needs.
BENCHES = {
    "attach": ("tests.bench.attach", "store round trips, scheduler half, bytes; no engine"),
    "export": ("tests.bench.export", "hand-over between two stores, against raw NIXL and disk"),
    "gpu": ("tests.bench.gpu", "blocks between a GPU and pinned memory; needs a GPU and cupy"),
    "handover": (
        "tests.bench.handover",
        "time to first token of a prompt computed by another real vLLM engine; needs vllm",
    ),
    "index": ("tests.bench.index", "the manager up to millions of blocks, against vLLM's"),
    "load": (
        "tests.bench.load",
        "many sessions on a real vLLM engine with little memory: what users wait; needs vllm",
    ),
    "nvme": ("tests.bench.nvme", "blocks to disk and back, against plain direct I/O"),
    "nvme-index": ("tests.bench.nvme_index", "how fast a disk's blocks are known after a start"),
    "object": ("tests.bench.object", "blocks to an S3 server and back, against its client alone"),
    "service": ("tests.bench.service", "many engines on one store, against a bare echo server"),
    "slow": (
        "tests.bench.slow",
        "a real vLLM engine whose blocks are on a slow disk, or a slow peer's; needs vllm",
    ),
    "waiting": (
        "tests.bench.waiting",
        "a real vLLM engine's long queue of prompts on a disk, and on a slow one; needs vllm",
    ),
    "vllm": ("tests.bench.ttft", "time to first token in real vLLM engines; needs vllm"),
}
COUNTING = ("index", "nvme-index")  # measure so many blocks

_EXAMPLES = """\
examples:
  python -m tests.bench attach --json
  python -m tests.bench index --blocks 10000,100000,1000000,10000000
  python -m tests.bench nvme-index --blocks 10000,1000000 --path /nvme
  python -m tests.bench export --pairs 3
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark and return the exit status."""
    chosen = parser().parse_args(arguments)
    try:
        _run(chosen)
    except KeyboardInterrupt:
        return 130
    except KVStoreError as exc:
        print(f"tests.bench: error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measure on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = "; ".join(f"{name}: {text}" for name, (_, text) in BENCHES.items())
    made.add_argument("name", choices=BENCHES, help=names)
    made.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    made.add_argument("--pairs", type=pairs, help="rounds to measure (default: each bench's own)")
    made.add_argument(
        "--blocks",
        type=_counts,
        help="of index and nvme-index: counts to measure, such as 10000,1000000",
    )
    made.add_argument("--path", type=Path, help="of nvme-index: where to make it (default: here)")
    return made


def _run(chosen: argparse.Namespace) -> None:
    end_as_interrupted()
    watch = Watch()
    module, _ = BENCHES[chosen.name]
    if chosen.path is not None and chosen.name != "nvme-index":
        raise ConfigError(f"--path: expected with nvme-index, found {chosen.name}")
    if chosen.name in COUNTING:
        if chosen.pairs is not None:
            raise ConfigError(f"--pairs: expected without {chosen.name}, which measures once")
        place = [chosen.path] if chosen.name == "nvme-index" else []
        results = import_module(module).run(chosen.blocks, *place)
    elif chosen.blocks is not None:
        expected = " or ".join(COUNTING)
        raise ConfigError(f"--blocks: expected with {expected}, found {chosen.name}")
    else:
        results = import_module(module).run(chosen.pairs)
    report.show(chosen.name, results, stolen=watch.share(), json=chosen.json)


def pairs(text: str) -> int:
    """Read a number of rounds."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers from 1 with commas between, found {text!r}"
        )
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
