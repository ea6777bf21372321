"""docs/operate/upgrade.md: its versions are the code's, and its steps work."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from kvstore import cli
from tests.bench.store import StoreProcess
from tests.harness.live import eventually
from tests.harness.pages import shown
from tests.harness.worker_rig import Rig, heard

PAGE = Path(__file__).parent.parent / "docs" / "operate" / "upgrade.md"
SOCKET = "unix:///run/kvstore/kvstore.sock"
CONFIG = "/etc/kvstore/kvstore.toml"


def test_Q27_the_page_names_the_versions_that_the_code_has() -> None:
    rows = re.findall(
        r"^\| .+? \| (.+?) \| `(\w+)` in `(.+?)\.py` \|", PAGE.read_text(), re.MULTILINE
    )
    assert len(rows) == 4
    for told, name, module in rows:
        if module == "connectors/vllm_version":  # importing it takes an engine
            source = (PAGE.parents[2] / f"{module}.py").read_text()
            (found,) = re.findall(rf"^{name} = \((.+)\)$", source, re.MULTILINE)
            expected = re.findall(r'"(.+?)"', found)
        else:
            value = getattr(importlib.import_module(module.replace("/", ".")), name)
            expected = [value.decode() if isinstance(value, bytes) else str(value)]
        assert re.findall(r"`(.+?)`", told) == expected, module


def commands() -> list[str]:
    """The page's commands, in their order."""
    return [
        line.strip()
        for place, text in shown("sh")
        if place.startswith("docs/operate/upgrade")
        for line in text.splitlines()
    ]


def test_Q27_the_steps_of_the_page_lose_nothing_that_is_on_disk(tmp_path: Path) -> None:
    """Check, drain, stop, start: an idle engine is back, and finds its blocks."""
    nvme = f'[nvme]\npath = "{tmp_path}/kv"\ncapacity = "64MiB"\nwrite_budget = "24B"\n'
    store = StoreProcess(tmp_path, "32MiB", nvme, scraped=False)
    check, drain, _serve = commands()
    chain = [b"%032d" % number for number in range(3)]

    def run(command: str) -> int:
        arguments = command.replace(SOCKET, store.address).replace(CONFIG, str(store.config_path))
        return cli.main(arguments.split()[1:])

    with store:
        rig = Rig(store.path)
        try:
            rig.attach()
            session = rig.client.session
            rig.put(chain, (1, 2, 3))
            assert run(check) == 2, "a store runs: its socket is taken"
            assert run(drain) == 0
            store.stop()
            assert "were only in memory" not in store.log_path.read_text()
            assert run(check) == 0
            with store:
                eventually(lambda: ") attached:" in store.log_path.read_text())
                eventually(lambda: heard(rig.client) and rig.client.session not in (0, session))
                granted = rig.ask(chain)
                assert len(granted.hits[0]) == 3
                assert granted.sources == {"nvme": 3}
        finally:
            rig.close()
