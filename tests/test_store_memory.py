"""A store whose memory is limited: it lives, serves what it has, and grows when there is more."""

from __future__ import annotations

import select
import time
from pathlib import Path

from kvstore.wire import engine as p
from tests.bench.store import StoreProcess
from tests.harness.cgroups import PLACE, group
from tests.harness.fakes import from_u32, hashes
from tests.harness.live import LiveEngine, eventually

MIB = 1 << 20
LIMIT = 400 * MIB
WAIT_S = 120.0
HAS = 'kvstore_memory_bytes{tier="cpu"}'


class Growing(LiveEngine):
    """Maps what the store makes, as a worker does."""

    def put_one(self, block: bytes) -> None:
        end = time.monotonic() + WAIT_S
        while not self.credits and time.monotonic() < end:
            self.look()
        assert self.credits, "no empty slot for long"
        self.put([block])

    def look(self) -> None:
        both = {side.sock: side for side in (self.worker, self.scheduler)}
        for sock in select.select(list(both), [], [], 0.1)[0]:
            both[sock].read()
        while any(isinstance(message, p.Extent) for message in self.worker.messages):
            self.map_extent()
        for message in list(self.scheduler.messages):
            if isinstance(message, p.Answers):
                self.scheduler.messages.remove(message)
                self.credits.extend(from_u32(message.credits))


def test_S5_a_store_in_a_small_cgroup_lives_and_grows_when_it_may(tmp_path: Path) -> None:
    with group(LIMIT) as limited:
        store = StoreProcess(
            tmp_path,
            "2GiB",
            'extent = "32MiB"\n',
            module="tests.harness.cgroups",
            environment={PLACE: str(limited.folder)},
        )
        with store:
            engine = Growing(store)
            blocks = hashes(600, "x")
            for block in blocks:
                engine.put_one(block)
            has = store.metrics()[HAS]
            assert 4 * 32 * MIB <= has < LIMIT
            for block in blocks[-50:]:
                assert engine.read(engine.ask([block])) == [engine.content(block)]
            log = store.log_path.read_text()
            assert log.count("no memory for another extent") == 1
            assert "the memory cgroup" in log
            assert "looks again every 5 s" in log
            assert limited.kills() == 0

            limited.limit(1000 * MIB)
            more, end = iter(hashes(600, "y")), time.monotonic() + WAIT_S
            while store.metrics()[HAS] <= has and time.monotonic() < end:
                engine.put_one(next(more))
                time.sleep(0.1)
            assert store.metrics()[HAS] > has
            again = "there is memory for another extent again"
            eventually(lambda: again in store.log_path.read_text())
            engine.close()
