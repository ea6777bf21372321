"""`kvstore check --engine`: an engine's settings, before it loads its weights."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors import config as connectors_config
from kvstore import cli
from tests.bench.store import StoreProcess
from tests.test_model_size import LLAMA, written

RIGHT: dict[str, Any] = {
    "kv_connector": "TieredConnector",
    "kv_connector_module_path": "connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu": "64MiB"},
}
Rows = dict[str, list[tuple[str, str]]]
Check = Callable[..., tuple[int, Rows]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Run it; return its status, and its lines by what they are about."""

    def run(table: object, *options: str) -> tuple[int, Rows]:
        text = table if isinstance(table, str) else json.dumps(table)
        status = cli.main(["check", "--engine", text, "--json", *options])
        rows: Rows = {}
        for row in json.loads(capsys.readouterr().out):
            rows.setdefault(row["what"], []).append((row["level"], row["text"]))
        return status, rows

    return run


def extra(**settings: object) -> dict[str, Any]:
    return RIGHT | {"kv_connector_extra_config": settings}


def test_Q10_right_settings_are_right(check: Check) -> None:
    status, rows = check(RIGHT)
    assert status == 0
    assert not [row for found in rows.values() for row in found if row[0] == "fail"]
    assert "capacity 64 MiB" in rows["cpu"][0][1]


@pytest.mark.parametrize(
    ("table", "what", "told"),
    [
        (RIGHT | {"kv_conector": 1}, "connector", "did you mean kv_connector?"),
        (RIGHT | {"cpu": "8GiB"}, "connector", "cpu; it belongs into kv_connector_extra_config"),
        (RIGHT | {"kv_connector": "Tiered"}, "connector", '"TieredConnector", found "Tiered"'),
        (RIGHT | {"kv_connector_module_path": None}, "connector", '"connectors.vllm", found None'),
        (RIGHT | {"engine_id": "x" * 300}, "connector", "engine_id: expected up to"),
        (RIGHT | {"kv_role": "kv_producer"}, "role", 'expected "kv_both", found "kv_producer"'),
        (RIGHT | {"kv_load_failure_policy": "retry"}, "policy", '"recompute", found "retry"'),
        (extra(), "extra config", "expected one of store and cpu, found neither"),
        (extra(cpu="8GB of it"), "extra config", 'cpu: expected a size such as "8GiB"'),
        (extra(cpu="8GiB", transfr="pull"), "extra config", "did you mean transfer?"),
        (extra(store="/kv.sock", nvme={}), "extra config", "nvme: in it path: is required"),
        (extra(cpu="64MiB", block_tokens=100), "blocks", "is 100, expected a multiple of .* 16"),
        (extra(cpu="64MiB", nvme={"path": "/proc/kv", "capacity": "64MiB"}), "nvme", "/proc"),
        (extra(cpu="64MiB", listen="10.0.0.1:9500"), "peer", "loopback|key"),
    ],
)  # fmt: skip
def test_Q10_wrong_settings_fail_with_what_is_expected(
    table: dict[str, Any], what: str, told: str, check: Check
) -> None:
    status, rows = check(table)
    assert status == 2
    failed = {name: row[1] for name, found in rows.items() for row in found if row[0] == "fail"}
    assert list(failed) == [what]
    assert re.search(told, failed[what]), failed


def test_S6_the_ports_of_a_private_store_are_tried(check: Check) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        place = f"127.0.0.1:{sock.getsockname()[1]}"
        status, rows = check(extra(cpu="64MiB", metrics=place))
        assert (status, rows["metrics"][0][0]) == (2, "fail")
        assert "Address already in use" in rows["metrics"][0][1]
    status, rows = check(extra(cpu="64MiB", metrics=place, listen=place))
    assert (status, rows["metrics"][0][0]) == (2, "fail")
    assert "expected two ports" in rows["metrics"][0][1]
    status, rows = check(extra(cpu="64MiB", metrics="127.0.0.1:0", listen="127.0.0.1:0"))
    assert (status, rows["metrics"][0][0], rows["peer"][0][0]) == (0, "ok", "ok")


def test_Q10_the_settings_are_read_by_the_engines_own_code(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug there shows here: nothing is written twice."""
    from kvstore import engine_check

    for name in ("parse_extra", "block_tokens_of", "refuse_engine_id"):
        assert getattr(engine_check, name) is getattr(connectors_config, name)
    seen = []

    def parse(table: dict[str, Any]) -> connectors_config.ExtraConfig:
        seen.append(table)
        return connectors_config.parse_extra(table)

    monkeypatch.setattr(engine_check, "parse_extra", parse)
    check(extra(cpu="64MiB", promote="1s"))
    assert seen == [{"cpu": "64MiB", "promote": "1s"}]


def test_Q10_our_child_of_a_multi_connector_is_checked(check: Check) -> None:
    def many(*children: dict[str, Any]) -> dict[str, Any]:
        table = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        return table | {"kv_connector_extra_config": {"connectors": list(children)}}

    theirs = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    ours = {name: RIGHT[name] for name in RIGHT if name != "kv_load_failure_policy"}
    status, rows = check(many(theirs, ours))
    assert (status, rows["policy"][0][0]) == (0, "note")  # of the whole, which has none here
    status, rows = check(many(theirs, ours) | {"kv_load_failure_policy": "recompute"})
    assert (status, rows.get("policy")) == (0, None)
    status, rows = check(many(theirs, extra(cpu="8")))
    assert status == 2
    assert rows["extra config"][0][0] == "fail"
    assert cli.main(["check", "--engine", json.dumps(many(theirs))]) == 2


def test_Q10_a_named_store_is_asked(check: Check, tmp_path: Path) -> None:
    with StoreProcess(tmp_path, "64MiB") as store:
        status, rows = check(extra(store=store.address))
        assert (status, rows["store"][0][0]) == (0, "ok")
        assert "64 MiB of memory" in rows["store"][0][1]
    status, rows = check(extra(store=store.address))
    assert (status, rows["store"][0][0]) == (0, "note")
    assert "the engine computes until then" in rows["store"][0][1]


def test_Q10_what_answers_and_is_no_store_fails(check: Check, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen(1)
        code = (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]));"
            "c, _ = s.accept(); c.recv(100); c.sendall(b'HTTP/1.0 400 Bad Request')"
        )
        command = [sys.executable, "-c", code, str(other.fileno())]
        child = subprocess.Popen(command, pass_fds=[other.fileno()])
        status, rows = check(extra(store=f"unix://{tmp_path}/other.sock"))
        assert child.wait(600) == 0
    assert status == 2
    assert "is no kvstore" in rows["store"][0][1]


def test_Q10_a_model_says_what_a_private_store_holds(check: Check, tmp_path: Path) -> None:
    model = str(written(tmp_path, LLAMA))
    status, rows = check(extra(cpu="1GiB"), "--model", model)
    assert status == 0
    assert "128 KiB a token in blocks of 16" in rows["model"][0][1]
    assert rows["room"] == [("ok", "cpu: 1 GiB hold 8,192 tokens")]
    status, rows = check(extra(cpu="64MiB", block_tokens=256), "--model", model)
    assert (status, rows["room"][0][0]) == (2, "fail")
    assert "expected an extent of at least 32 MiB, a block of" in rows["room"][0][1]
    disk = {"path": str(tmp_path / "kv"), "capacity": "256MiB"}
    status, rows = check(extra(cpu="1GiB", nvme=disk, block_tokens=256), "--model", model)
    assert [row[0] for row in rows["room"]] == ["ok", "fail"]
    status, rows = check(extra(cpu="64MiB", block_tokens=100), "--model", model)
    assert (status, rows["blocks"][0][0]) == (2, "fail")
    status, rows = check(extra(cpu="1GiB"), "--model", str(tmp_path / "none"))
    assert (status, rows["model"][0][0]) == (2, "fail")


def test_Q10_block_tokens_are_compared_with_the_engines_blocks(check: Check) -> None:
    status, rows = check(extra(cpu="64MiB", block_tokens=64), "--block-size", "128")
    assert (status, rows["blocks"][0][0]) == (2, "fail")
    assert check(extra(cpu="64MiB", block_tokens=256), "--block-size", "128")[0] == 0
    status, rows = check(extra(cpu="64MiB", block_tokens=64))
    assert (status, rows["blocks"][0][0]) == (0, "note")
    assert "on a CPU has blocks of 128" in rows["blocks"][0][1]


def test_Q10_it_takes_no_engine_and_no_minute() -> None:
    began = time.monotonic()
    code = (
        "import sys; from kvstore import cli\n"
        f"status = cli.main(['check', '--engine', {json.dumps(RIGHT)!r}])\n"
        "print(*({'vllm', 'torch', 'transformers'} & set(sys.modules))); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert time.monotonic() - began < 30  # a second where nothing else runs


@pytest.mark.vllm
def test_Q10_the_keys_are_those_that_vllm_takes() -> None:
    import dataclasses

    from vllm.config import KVTransferConfig

    from kvstore.engine_check import KEYS

    assert set(KEYS) == {field.name for field in dataclasses.fields(KVTransferConfig)}
