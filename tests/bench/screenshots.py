"""The pictures of docs/operate/status.md: `python -m tests.bench.screenshots [FOLDER]`.

A real store with engines that are scripted, and an hour behind it that is made up. A real browser
(Debian's chromium) shows the page.
"""

from __future__ import annotations

import io
import math
import random
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from kvstore.store import admin
from kvstore.store.status import HISTORY_S, SAMPLE_S, Tokens
from kvstore.store.top import frame, rates_of
from kvstore.wire import engine as p
from tests.bench.store import free_port
from tests.harness import browser
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, LiveStore, store_settings

PICTURES = Path(__file__).parent.parent.parent / "docs" / "operate"
SIZE = "1100,1210"  # of the page, in pixels
PNG_BYTES_MAX = 150_000
MODELS = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B"
STEP_TOKENS = 4000
SESSIONS = 6  # that ask for their blocks in a step
PAGE_BYTES = 1 << 16  # small: an extent for each model is all there is


def _step(live: LiveEngine, rng: random.Random, share: float) -> None:
    """Store some blocks, and look up tokens, of which about this share hits."""
    live.put(hashes(2, f"{rng.random()}"))
    for _ in range(SESSIONS):
        live.load(live.ask(hashes(8, f"session {int(rng.paretovariate(0.5)) % 1000}")), 1.0)
    hit = int(STEP_TOKENS * share)
    missed = {"never_seen": (STEP_TOKENS - hit) * 3 // 4}
    missed["evicted"] = STEP_TOKENS - hit - sum(missed.values())
    hits = {"cpu": hit * 4 // 5, "nvme": hit - hit * 4 // 5}
    told = p.Step((), lookup_tokens=STEP_TOKENS, hit_tokens=hits, missed_tokens=missed)
    live.scheduler.send(told)


def _age(store: LiveStore, rng: random.Random) -> None:
    """Give a store an hour behind it."""
    history, total, cpu, nvme = store.server.store._history, 0, 0, 0
    samples = []
    for number in range(HISTORY_S // SAMPLE_S):
        share = 0.55 - 0.3 * math.exp(-number / 30) + rng.uniform(-0.04, 0.04)
        total, cpu = total + 80_000, cpu + int(80_000 * share * 0.8)
        nvme += int(80_000 * share * 0.2)
        samples.append(Tokens(float(number * SAMPLE_S), total, {"cpu": cpu, "nvme": nvme}))
    numbers = store.server.store.numbers
    label = next(iter(store.server.store.namespaces.values())).label
    numbers.add("kvstore_lookup_tokens", label, by=total)
    numbers.add("kvstore_missed_tokens", label, "never_seen", by=total - cpu - nvme)
    for tier, count in (("cpu", cpu), ("nvme", nvme)):
        numbers.add("kvstore_hit_tokens", label, tier, by=count)
    history._start_ns -= HISTORY_S * 1_000_000_000
    history.samples = tuple(samples)


def main(folder: Path) -> None:
    """Make the pictures in a folder."""
    chromium, rng, port = browser.program(), random.Random(1), free_port()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = store_settings(
            place,
            server={"socket": f"{place}/kv.sock", "metrics": f"127.0.0.1:{port}"},
            cpu={"capacity": "32MiB", "extent": "16MiB"},
            nvme={"path": f"{place}/disk", "capacity": "1GiB", "extent": "16MiB"},
        )
        store = stack.enter_context(LiveStore(settings))
        engines = [
            stack.enter_context(
                LiveEngine(store, f"{rng.getrandbits(128):032x}", PAGE_BYTES, model)
            )
            for model in (*MODELS, MODELS[0])
        ]
        _age(store, rng)
        before = now = admin.status(store.path)
        for round_ in range(40):
            for live in engines:
                _step(live, rng, 0.5 + 0.1 * math.sin(round_))
            time.sleep(0.05)
            if round_ == 20:
                before = admin.status(store.path)
        now = admin.status(store.path)
        browser.browse(
            chromium, place, f"http://127.0.0.1:{port}/",
            f"--window-size={SIZE}", f"--screenshot={folder / 'status.png'}",
        )  # fmt: skip
    console = Console(record=True, width=80, height=24, file=io.StringIO(), highlight=False)
    console.print(frame(now, rates_of(now, before), "", 80, 23))
    svg = console.export_svg(title="kvstore top")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # of a server elsewhere
    svg = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
    (folder / "top.svg").write_text(svg, encoding="utf-8")
    size = (folder / "status.png").stat().st_size
    print(f"{folder / 'status.png'}: {size:,} bytes, expected up to {PNG_BYTES_MAX:,}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
