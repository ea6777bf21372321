"""The store's log: its formats and levels, and lines on engines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore import cli
from kvstore.core import limits
from kvstore.core.layout import RankGeometry
from kvstore.logs import Unread
from kvstore.store import admin
from kvstore.wire import engine as p
from tests.bench.store import StoreProcess, numbers
from tests.harness.fakes import geometry
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.script import Script
from tests.harness.worker_rig import Rig, heard

ROOMY = {"capacity": "64MiB", "extent": "16MiB"}  # for several namespaces
HOSTILE = 'a\n2026-01-01 00:00:00,000 ERROR forged\n{"level": "error"}\x1b[2J'
TIMED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) .+")


def store_of(folder: Path, *options: str) -> StoreProcess:
    return StoreProcess(folder, "64MiB", scraped=False, options=options)


def lines_of(store: StoreProcess) -> list[str]:
    return store.log_path.read_text().splitlines()


def test_Q28_json_lines_have_time_level_and_fields_whatever_an_engine_is_called(
    tmp_path: Path,
) -> None:
    with store_of(tmp_path, "--log-format", "json") as store, LiveEngine(store, HOSTILE):
        pass
    records = [json.loads(line) for line in lines_of(store)]
    for record in records:
        assert list(record)[:4] == ["time", "level", "logger", "message"]
        assert datetime.fromisoformat(record["time"]).utcoffset() == timedelta(0)
        assert record["time"].endswith("Z")
        assert record["level"] in ("debug", "info", "warning", "error", "critical")
    (attached,) = [record for record in records if " attached: " in record["message"]]
    assert "ERROR forged" in attached["engine"]
    assert "\n" not in attached["engine"]
    assert attached["pid"] == os.getpid()
    assert attached["uid"] == os.geteuid()
    assert attached["model"] == "model"
    assert re.fullmatch("[0-9a-f]{12}", attached["namespace"])


def test_Q28_no_line_is_forged_in_text(tmp_path: Path) -> None:
    with store_of(tmp_path) as store, LiveEngine(store, HOSTILE):
        pass
    lines = lines_of(store)
    assert [line for line in lines if "forged" in line and "engine" in line]
    assert not [line for line in lines if not TIMED.fullmatch(line)]
    assert not [line for line in lines if line.startswith("2026-01-01")]


def test_Q28_a_log_that_nobody_reads_holds_nothing_up() -> None:
    """A collector that hangs: the pipe is full. A store would wait, and SIGTERM not end it."""
    code = (
        "import logging; from kvstore.logs import log_to_stderr; log_to_stderr()\n"
        "for number in range(2000): logging.info('line %d %s', number, 'x' * 1900)\n"
        "print('done', flush=True); input(); logging.info('last')"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            assert select.select([child.stdout], [], [], WAIT_S)[0], "it waits for a reader"
            read = os.read(child.stderr.fileno(), 1 << 20).decode()  # it has a reader, then goes on
            _, rest = child.communicate("\n", timeout=WAIT_S)
        finally:
            child.kill()
    *lines, loss, last = (read + rest).splitlines()
    assert all(line.endswith("x") for line in lines), "what is there is whole"
    assert loss.endswith(f"standard error took no more: {2000 - len(lines):,} lines are lost")
    assert last.endswith("INFO last")


def test_Q28_what_a_full_disk_does_not_take_is_counted(tmp_path: Path) -> None:
    code = """
        import logging, os, resource
        from kvstore.logs import log_to_stderr
        log_to_stderr("%(message)s")
        logging.info("before")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(2).st_size + 3, hard))
        for number in range(5):
            logging.info("lost %d", number)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        logging.info("last")
    """
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", textwrap.dedent(code)]
        subprocess.run(command, stderr=log, check=True, timeout=WAIT_S)
    loss = "standard error took no more: 5 lines are lost"
    assert (tmp_path / "log").read_text().splitlines() == ["before", "los", loss, "last"]


def test_Q28_a_record_that_was_cut_ends_before_the_next_one() -> None:
    out, into = os.pipe()
    stream = Unread(into)
    stream.write("a" * 1_000_000 + "\n")
    assert stream.lost == 1
    cut = os.read(out, 1_000_000)
    stream.write("b\n")
    assert cut == b"a" * len(cut)
    assert os.read(out, 10) == b"\nb\n"
    for fd in (out, into):
        os.close(fd)


def test_Q28_the_journal_gets_priorities_and_no_time() -> None:
    code = """
        import logging, os, sys
        from kvstore.logs import default_format, log_to_stderr
        found = os.fstat(2)
        stream = f"{found.st_dev}:{found.st_ino + int(sys.argv[1])}"
        log_to_stderr(form=default_format({"JOURNAL_STREAM": stream}))
        log = logging.getLogger("x")
        log.warning("disk is slow")
        try:
            raise ValueError("two\\n<0>lines")
        except ValueError:
            log.exception("a job raised")
    """

    def said(off: int) -> list[str]:
        command = [sys.executable, "-P", "-c", "if True:" + code, str(off)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ, timeout=WAIT_S
        )
        return done.stderr.splitlines()

    first, second, *trace = said(0)
    assert (first, second) == ("<4>disk is slow", "<3>a job raised")
    assert trace[-1] == "<3>  <0>lines"
    assert all(line.startswith("<3>  ") for line in trace)
    assert TIMED.fullmatch(said(1)[0]), "standard error is another file than the journal's"


def test_Q29_the_level_is_an_option_and_changes_while_the_store_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with store_of(tmp_path, "--log-level", "error") as store:
        assert lines_of(store) == []
        assert cli.main(["log-level", "info", "--store", store.address]) == 0
        assert capsys.readouterr().out == "log level info, until the store ends\n"
        (line,) = lines_of(store)
        assert line.endswith("INFO log level is info, was error")
        with LiveEngine(store, "heard"):
            assert lines_of(store)[-1].endswith(" attached: 1 rank, blocks of 16 tokens, 1 MiB")
        assert cli.main(["log-level", "warning", "--store", store.address]) == 0
        assert lines_of(store)[-1].endswith("WARNING log level is warning, was info")
        count = len(lines_of(store))
        with LiveEngine(store, "unheard"):
            assert len(lines_of(store)) == count
        wrong = 'log level "loud", expected one of debug, info, warning, error'
        with pytest.raises(admin.StoreRefused, match=wrong):
            admin.log_level(store.address, "loud")


# Engines


def of_tokens(block_tokens: int, **traits: str) -> RankGeometry:
    """A model's geometry; other block sizes or hashes make other namespaces of the same model."""
    made = geometry("m", page_bytes=4096)
    identity = " ".join(["m", *traits.values()])
    told = (
        made.traits | {"weights": "w"} | {name.replace("_", " "): t for name, t in traits.items()}
    )
    return msgspec.structs.replace(made, identity=identity, block_tokens=block_tokens, traits=told)


APART = {
    "block tokens": (of_tokens(16), of_tokens(256), "block tokens 256, there 16", "block_tokens"),
    "seed": (
        of_tokens(16, hash="sha256", hash_seed="1"),
        of_tokens(16, hash="sha256", hash_seed="2"),
        "hash seed 2, there 1",
        "PYTHONHASHSEED",
    ),
    "hash": (
        of_tokens(16, hash="sha256", hash_seed="1"),
        of_tokens(16, hash="sha256_cbor", hash_seed="2"),
        "hash sha256_cbor, there sha256",
        "--prefix-caching-hash-algo",
    ),
}


@pytest.mark.parametrize("what", APART)
def test_Q32_an_engine_that_can_share_nothing_is_warned_about_on_both_sides(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, difference, way_out = APART[what]
    with (
        LiveStore(store_settings(tmp_path, cpu=ROOMY)) as store,
        engine(store, "one", geometry=first, page_bytes=4096) as one,
        engine(store, "like", geometry=first, page_bytes=4096) as like,
        engine(store, "other", geometry=geometry("n", page_bytes=4096), page_bytes=4096) as other,
        engine(store, "odd", geometry=second, page_bytes=4096) as odd,
    ):
        assert (one.active.warning, like.active.warning, other.active.warning) == ("", "", "")
        text = odd.active.warning
    assert text.startswith(f"shares no blocks with engine 'one' of the same model: {difference}")
    assert way_out in text
    (line,) = [r for r in caplog.records if "shares no blocks" in r.getMessage()]
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith("engine 'odd' (")
    assert line.getMessage().endswith(text)


def test_Q32_names_of_others_do_not_make_a_warning_that_an_engine_cannot_read(
    tmp_path: Path,
) -> None:
    first = of_tokens(16, hash_seed="\n" * 4000)
    second = of_tokens(16, hash_seed="\x00" * 4000)
    with (
        LiveStore(store_settings(tmp_path, cpu=ROOMY)) as store,
        engine(store, "\x00" * 256, geometry=first, page_bytes=4096),
        engine(store, "odd", geometry=second, page_bytes=4096) as odd,
    ):
        assert 100 < len(odd.active.warning) <= limits.TEXT_MAX
        assert odd.active.warning.isprintable()


ENGINE = """
import sys, time
from tests.harness.worker_rig import Rig
rig = Rig(sys.argv[1], sys.argv[2])
rig.attach()
print("attached", flush=True)
sys.stdin.read()
rig.close()
"""


@contextlib.contextmanager
def engine_process(store: StoreProcess, name: str) -> Iterator[subprocess.Popen[str]]:
    """Both halves of an engine, attached; it ends in order when its standard input does."""
    command = [sys.executable, "-c", ENGINE, store.path, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "attached\n"
        try:
            yield child
        finally:
            child.kill()


def test_Q30_an_engine_that_was_killed_is_a_warning_and_one_that_ended_is_not(
    tmp_path: Path,
) -> None:
    with store_of(tmp_path, "--log-format", "json") as store:
        with engine_process(store, "killed") as killed, engine_process(store, "ended") as ended:
            killed.kill()
            killed.wait(WAIT_S)
            ended.communicate(timeout=WAIT_S)
            eventually(lambda: numbers(store.address).get("kvstore_sessions{ending}") == 0)
            eventually(lambda: numbers(store.address).get("kvstore_sessions{active}") == 0)
        counts = numbers(store.address)
    assert counts["kvstore_sessions_ended{died}"] == 1
    assert counts["kvstore_sessions_ended{left}"] == 1
    records = [json.loads(line) for line in lines_of(store)]
    found = {r["engine"]: r for r in records if "detached" in r["message"]}
    assert {name: r["level"] for name, r in found.items()} == {"killed": "warning", "ended": "info"}
    assert found["killed"]["pid"] == killed.pid
    assert "killed, or crashed" in found["killed"]["message"]
    assert found["ended"]["message"].endswith("detached: the engine ends")
    assert {"uid", "namespace"} <= found["killed"].keys()


def test_Q30_a_fault_that_an_engine_names_is_in_the_stores_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveStore(store_settings(tmp_path)) as store, contextlib.closing(Rig(store.path)) as rig:
        rig.attach()
        rig.client.detach("no answer in 5 s")
        wanted = "closes the session: no answer in 5 s"
        eventually(lambda: [r for r in caplog.records if wanted in r.getMessage()])
    (line,) = [r for r in caplog.records if r.getMessage().endswith(wanted)]
    assert (line.levelname, line.name) == ("WARNING", "kvstore.store.sessions")


def test_Q30_a_fault_named_while_the_store_answers_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, gone = threading.Event(), threading.Event()
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as one:
        work = store.server.store.on_message

        def slow(number: int, message: Any, now_ns: int) -> None:  # noqa: ANN401
            work(number, message, now_ns)
            if isinstance(message, p.Step) and message.lookups:
                asked.set()
                gone.wait(WAIT_S)

        monkeypatch.setattr(store.server.store, "on_message", slow)
        monkeypatch.setattr(store.server, "_read_s", 0.0)  # each message has a turn of its own
        one.scheduler.send(p.Step((p.Lookup(1, b"x" * 32, 32),)))
        assert asked.wait(WAIT_S)
        one.scheduler.send(p.Detach("no answer in 5 s"))
        one.scheduler.close()
        gone.set()
        eventually(lambda: [r for r in caplog.records if " detached: " in r.getMessage()])
    (line,) = [r.getMessage() for r in caplog.records if " detached: " in r.getMessage()]
    assert line.endswith("its scheduler closes the session: no answer in 5 s")


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_Q31_an_engine_logs_each_loss_of_its_store_once_and_each_return_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.INFO, "connectors")
    reasons = {"stopped": "the store is shutting down", "killed": "store closed the connection"}

    def said() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name.startswith("connectors")]
        caplog.clear()
        return found

    with store_of(tmp_path) as store:
        rig = Rig(store.path, world=2)
        rig.attach()
        said()
        with contextlib.closing(rig):
            if how == "killed":
                os.kill(store.pid, signal.SIGKILL)
            store.stop()
            eventually(lambda: heard(rig.client) and not rig.client.session)
            store.__enter__()
            eventually(lambda: heard(rig.client) and rig.client.session)
            lost, back = said()
    assert lost.startswith(f"kvstore: detached: {reasons[how]}; every lookup is a miss")
    assert re.fullmatch(r"kvstore: attached again, session \d+", back)


def test_Q32_the_engine_logs_what_its_store_warns_of(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.client.detach("cut")
    script.warning = "shares no blocks with engine 'one'"
    script.attach()
    (line,) = [r for r in caplog.records if "shares no blocks" in r.getMessage()]
    assert (line.levelname, line.name) == ("WARNING", "connectors.store_client")
