"""Alert rules and the dashboard in deploy/, against running stores and a real Prometheus."""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from kvstore.metrics import TABLE
from kvstore.wire import engine as p
from tests.bench.store import StoreProcess, free_port, numbers
from tests.harness import bad_tiers
from tests.harness.child import Child
from tests.harness.fakes import hashes
from tests.harness.faults import Call, Faults
from tests.harness.live import LiveEngine, LiveStore, client, engine, eventually, store_settings
from tests.harness.pages import ROOT, text
from tests.harness.peers import address
from tests.harness.prometheus import WAIT_S, Prometheus, found_program, prometheus

RULES = ROOT / "deploy" / "prometheus" / "kvstore.rules.yaml"
DASHBOARD = "deploy/grafana/kvstore.json"
PAGE = "docs/operate/monitoring.md"
# Tests have no half hour: the rules that Prometheus loads here have these ranges instead of the
# ones in the file, and every `for` is 0 s. The file's own are in kvstore.rules.test.yaml.
RANGES = {"5m": "10s", "10m": "60s", "30m": "4s", "1h": "60s", "1d": "10m"}
VARIABLES = {"$__rate_interval": "60s", "$instance": ".*", "$namespace": ".*"}
BUDGET = 'write_budget = "1TiB"'
DISK = (
    'policy = "lru"\n'  # of memory: what was used leaves, too
    '[nvme]\npath = "{}"\ncapacity = "256MiB"\nextent = "4MiB"\ndurability = "10ms"\n' + BUDGET
)
LATE = ("KvstoreQueueOld", "slow")  # fires 20 s after its cause: waited for before that store ends
# Their ranges are so short here that a machine under load may not scrape twice within one.
AGAIN = {("KvstoreMemoryShort", "plain"), ("KvstoreHitRateCollapsed", "peer")}
# A busy machine, too, causes these for a moment: they count while they fire.
BUSY = "KvstoreDown|KvstoreMissing|KvstoreLoopSlow"
TWO = {"capacity": "32MiB", "extent": "16MiB"}  # room for two models
SMALL = 256 << 10  # bytes of a block


def alerts() -> dict[str, Any]:
    """Each alert rule, by its name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    found = {rule["alert"]: rule for rule in rules}
    assert len(found) == len(rules)
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text(DASHBOARD))["panels"]
    return found


def shortened(rules: str) -> str:
    rules = re.sub(r"\[(\d+[mhd])\]", lambda found: f"[{RANGES[found[1]]}]", rules)
    return re.sub(r"\bfor: \w+", "for: 0s", rules)


class Site:
    """Four stores that one Prometheus watches, their engines, and what may happen to them."""

    def __init__(self, folder: Path, library: Path, ends: ExitStack) -> None:
        self._folder, self._ends = folder, ends
        (folder / "kv").mkdir()
        self._faults = Faults(library, folder / "control", folder / "kv")
        self._disk = StoreProcess(
            folder,
            "16MiB",
            DISK.format(folder / "kv"),
            module="tests.harness.serve_hasty",
            environment=self._faults.environment,
        )
        ends.enter_context(self._disk)
        self._ports = {"disk": self._disk.metrics_port}
        self._stores = {
            "plain": self._store("plain", tier=[tier("Corrupt")]),
            "slow": self._store("slow", tier=[tier("Holds"), tier("Dawdles")]),
            "peer": self._store("peer", peer={"eager": False}, cpu=TWO),
        }
        rules = folder / "rules.yaml"
        rules.write_text(shortened(RULES.read_text()))
        self.watch: Prometheus = ends.enter_context(prometheus(folder, self._ports.values(), rules))
        self._engines = {
            name: ends.enter_context(engine(store, model="qwen"))
            for name, store in self._stores.items()
        }
        self._on_disk = ends.enter_context(engine(self._disk, page_bytes=SMALL, model="qwen"))
        self.watch.seen()
        self._began = time.monotonic()
        self._work()
        self.watch.seen()

    def _store(self, name: str, **sections: Any) -> LiveStore:  # noqa: ANN401 - of settings
        self._ports[name] = port = free_port()
        server = {"socket": f"{self._folder / name}/kv.sock", "metrics": f"127.0.0.1:{port}"}
        settings = store_settings(self._folder / name, server=server, **sections)
        return self._ends.enter_context(LiveStore(settings))

    def _work(self) -> None:
        """What a dashboard has to show: hits, misses, evictions, reads from disk."""
        live = self._on_disk
        live.put(hashes(4, "first"))
        live.read(live.ask(hashes(4, "first")))
        while not self._disk.metrics().get("kvstore_evicted_gap_seconds_count"):
            for number in range(100):  # of which a slow disk does not take all
                live.put(hashes(1, f"other{number}"))
            live.read(live.ask(hashes(2, "first")))
        tell(live, 60_000, {"evicted": 1_000, "tail": 39_000})
        tell(self._engines["peer"], 100_000, {"tail": 1_000})

    def fired(self) -> set[tuple[str, str]]:
        """Alerts that have fired, and the store that each was about, "" for none."""
        names = {f"127.0.0.1:{port}": name for name, port in self._ports.items()}
        since_s = max(1, int(time.monotonic() - self._began))
        found = self.watch.ask(
            f'ALERTS{{alertstate="firing",alertname=~"{BUSY}"}} or '
            f'max_over_time(ALERTS{{alertstate="firing",alertname!~"{BUSY}"}}[{since_s}s])'
        )
        return {
            (alert["alertname"], names.get(alert.get("instance", ""), "")) for alert, _ in found
        }

    # Faults, by the alert that each is to raise, and the store that it is about

    def faults(self) -> list[dict[tuple[str, str], Callable[[ExitStack], object]]]:
        """Those of one group happen at the same time, until the given stack is closed."""
        return [
            {
                ("KvstoreQueueOld", "slow"): self._hold,
                ("KvstoreLoopSlow", "slow"): self._dawdle,
                ("KvstoreBlocksDamaged", "plain"): self._damage,
                ("KvstoreLeaseLimit", "plain"): self._pin,
                ("KvstoreModelNotShared", "peer"): self._differ,
                ("KvstoreMemoryShort", "plain"): self._evict,
                ("KvstoreEnginesDied", "plain"): self._kill,
                ("KvstoreRefused", "plain"): self._babble,
                ("KvstoreLoadsFail", "plain"): self._give_up,
                ("KvstoreTierReadOnly", "disk"): self._refuse_writes,
            },
            {
                ("KvstoreWriteBudgetUsed", "disk"): self._overspend,
                ("KvstoreHitRateCollapsed", "peer"): self._miss,
                ("KvstoreHandOversFail", "peer"): self._call_nobody,
            },
            {("KvstoreTierOff", "disk"): self._break},
            {("KvstoreRestarts", "disk"): self._restart},
            {("KvstoreDiskStalled", "disk"): self._hang},
            {("KvstoreDown", "plain"): lambda _: self._stores["plain"].stop()},
            {("KvstoreMissing", ""): self._stop_all},
        ]

    def _hold(self, _: ExitStack) -> None:
        self._engines["slow"].put(hashes(8))

    def _dawdle(self, until: ExitStack) -> None:
        patch = until.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(bad_tiers.Dawdles, "seconds", 0.15)

    def _damage(self, _: ExitStack) -> None:
        live = self._engines["plain"]
        live.put(hashes(1, "kept"))
        for number in range(30):
            live.put(hashes(1, f"other{number}"))
        granted = live.ask(hashes(1, "kept"))
        assert granted.sources == {"corrupt": 1}
        live.load(granted, 0.5)

    def _pin(self, _: ExitStack) -> None:
        live = self._engines["plain"]
        for name in ("one", "two"):
            live.put(hashes(3, name))
        assert live.ask(hashes(3, "one")).lease
        eventually(lambda: live.ask(hashes(3, "two")).capped)

    def _differ(self, until: ExitStack) -> None:
        until.enter_context(engine(self._stores["peer"], "odd", page_bytes=SMALL, model="qwen"))

    def _evict(self, _: ExitStack) -> None:
        tell(self._engines["plain"], 0, {"evicted": 4_000})

    def _kill(self, _: ExitStack) -> None:
        store = SimpleNamespace(path=self._stores["plain"].path)
        with Child(LiveEngine, store, "victim", 1 << 20, "qwen", environment={}) as child:
            child.call("generation", 0)  # it is attached

    def _babble(self, _: ExitStack) -> None:
        with client(self._stores["plain"]) as stranger:
            stranger.sock.sendall(b"\xff" * 64)
            stranger.read_to_end()

    def _give_up(self, _: ExitStack) -> None:
        self._engines["plain"].scheduler.send(p.Step(counts={"timed_out": 50}))

    def _refuse_writes(self, until: ExitStack) -> None:
        until.enter_context(self._faults.of(Call.WRITE, error=5))
        self._on_disk.put(hashes(4, "refused"))

    def _overspend(self, _: ExitStack) -> None:
        path = self._disk.config_path
        path.write_text(path.read_text().replace(BUDGET, 'write_budget = "1MiB"'))
        psutil.Process(self._disk.pid).send_signal(signal.SIGHUP)
        budget = "kvstore_write_budget_bytes{nvme,day}"
        eventually(lambda: numbers(self._disk.address)[budget] == 1 << 20)
        self._on_disk.put(hashes(12, "more"))

    def _miss(self, _: ExitStack) -> None:
        tell(self._engines["peer"], 0, {"never_seen": 2_000})

    def _call_nobody(self, _: ExitStack) -> None:
        host, port = address(self._stores["peer"]).split(":")
        socket.create_connection((host, int(port))).close()  # and proves no key
        self._engines["peer"].ask(hashes(2, "elsewhere"), peer=f"127.0.0.1:{free_port()}")

    def _break(self, until: ExitStack) -> None:
        until.enter_context(self._faults.of(Call.ALL, error=5))

    def _restart(self, _: ExitStack) -> None:
        where = f'instance="127.0.0.1:{self._ports["disk"]}"'
        for turn in range(2):
            psutil.Process(self._disk.pid).kill()
            self._disk.stop()
            self._ends.enter_context(self._disk)
            starts = f"changes(process_start_time_seconds{{{where}}}[10m]) > {turn}"
            self.watch.wait_for(starts, "a start that Prometheus sees")

    def _hang(self, until: ExitStack) -> None:
        until.enter_context(self._faults.of(Call.ALL, hang=True))

    def _stop_all(self, _: ExitStack) -> None:
        eventually(lambda: LATE in self.fired())
        bad_tiers.Holds.go.set()
        self._disk.stop()
        for store in self._stores.values():
            store.stop()


def tier(name: str) -> dict[str, str]:
    return {"class": f"tests.harness.bad_tiers:{name}", "name": name.lower()}


def tell(live: LiveEngine, hits: int, missed: Mapping[str, int]) -> None:
    """Have an engine count tokens of admitted requests."""
    found = {"cpu": hits} if hits else {}
    total = hits + sum(missed.values())
    step = p.Step(lookup_tokens=total, hit_tokens=found, missed_tokens=dict(missed))
    live.scheduler.send(step)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, fault_library: Path) -> Iterator[Site]:
    bad_tiers.Holds.go.clear()
    with ExitStack() as ends:
        yield Site(tmp_path_factory.mktemp("site"), fault_library, ends)
        bad_tiers.Holds.go.set()


# The dashboard


@pytest.mark.slow
def test_Q8_every_panel_shows_data_of_a_store_with_traffic(site: Site) -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            site.watch.wait_for(query, panel["title"], lambda value: not math.isnan(value), any)


def test_Q8_the_dashboard_is_one_that_grafana_can_show() -> None:
    board = json.loads(text(DASHBOARD))
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables.keys() == {"datasource", "instance", "namespace"}
    source = {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    metrics = {spec.name for spec in TABLE}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        across, down = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = set(itertools.product(across, down))
        assert max(across) < 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert re.fullmatch(r"[A-Z].+\.", panel["description"]), panel["title"]
        for thing in (panel, *panel["targets"]):
            assert thing["datasource"] == source
        for target in panel["targets"]:
            for name in re.findall(r"\bkvstore_\w+", target["expr"]):
                assert re.sub(r"_(total|bucket|sum|count)$", "", name) in metrics, name
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables.keys() | {"__rate_interval"}
    for name in ("instance", "namespace"):
        assert variables[name]["datasource"] == source


# The rules


@pytest.mark.slow
def test_Q7_every_alert_fires_when_its_fault_happens_and_not_before(site: Site) -> None:
    eventually(lambda: site.fired() == set())
    seen = set[str]()
    for group in site.faults():
        eventually(lambda: not site.fired() & group.keys())  # noqa: B023 - at once
        with ExitStack() as until:
            for cause in group.values():
                cause(until)
            end = time.monotonic() + WAIT_S
            while silent := group.keys() - {LATE} - site.fired():
                assert time.monotonic() < end, f"did not fire: {silent}"
                time.sleep(0.5)
                for alert in silent & AGAIN:
                    group[alert](until)
            seen |= {alert for alert, _ in site.fired()}
    assert seen == alerts().keys()


@pytest.mark.parametrize("what", [("check", "rules"), ("test", "rules")])
def test_Q7_promtool_finds_the_rules_right(what: tuple[str, str]) -> None:
    name = RULES.name if what[0] == "check" else RULES.name.replace(".yaml", ".test.yaml")
    command = [found_program("promtool"), *what, name]
    done = subprocess.run(
        command, cwd=RULES.parent, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_Q7_every_alert_says_what_it_means_and_where_to_read_on() -> None:
    metrics = {spec.name for spec in TABLE}
    for alert, rule in alerts().items():
        assert re.fullmatch(r"Kvstore([A-Z][a-z]+)+", alert)
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        titles = re.findall(r"^##+ (.*)$", text(page), re.MULTILINE)
        assert anchor in {re.sub(r"[^a-z -]", "", t.lower()).replace(" ", "-") for t in titles}
        for name in re.findall(r"\bkvstore_\w+", rule["expr"].replace(":kvstore_hit_ratio:", "")):
            assert re.sub(r"_(total|bucket|sum|count)$", "", name) in metrics, name


# The page


def test_Q9_the_page_on_monitoring_has_every_alert_as_the_rules_have_it() -> None:
    rows = re.findall(r"^\| `(Kvstore\w+)` \| (\w+) \| (.+) \| (.+) \|$", text(PAGE), re.MULTILINE)
    expected = []
    for alert, rule in alerts().items():
        notes = rule["annotations"]
        summary = notes["summary"].removeprefix("{{ $labels.instance }}: ")
        means = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", summary)
        expected.append((alert, rule["labels"]["severity"], means, notes["description"]))
    assert rows == expected
