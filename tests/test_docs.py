"""The documentation against the code: its examples are read, its tables are complete."""

import ast
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from connectors import config as extra
from connectors.kv_hints import hint_of
from kvstore import cli, config
from kvstore.core.tier import Tier
from kvstore.metrics import TABLE
from kvstore.settings import Section, Setting, settings_of
from kvstore.store.plugins import find_class
from kvstore.wire import engine
from tests import rooms
from tests.bench import __main__ as bench
from tests.bench import beside, fleet
from tests.bench.report import Result, as_json
from tests.harness.pages import NAMES, ROOT, shown, text, write_modules

SECTIONS: dict[str, type[Section]] = {
    "[server]": config.ServerConfig,
    "[cpu]": config.CpuConfig,
    "[engine]": config.EngineConfig,
    "[nvme]": config.NvmeConfig,
    "[peer]": config.PeerConfig,
    "[[tier]]": config.TierConfig,
    "kv_connector_extra_config": extra.ExtraConfig,
}
PARSERS = {
    "tests.bench": bench.parser,
    "tests.bench.beside": beside.parser,
    "tests.bench.fleet": fleet.parser,
}
METRICS = {f"{spec.name}_total" if spec.kind == "counter" else spec.name: spec for spec in TABLE}


def blocks(language: str) -> list[Any]:
    """Each fenced block of a language, as a parameter named by its place."""
    return [pytest.param(block, id=place) for place, block in shown(language)]


def check_transfer_config(table: dict[str, Any]) -> None:
    """Names as the connector has them, settings as it reads them."""
    assert table["kv_role"] == "kv_both"
    assert table["kv_load_failure_policy"] == "recompute"
    if table["kv_connector"] == "MultiConnector":
        children = table["kv_connector_extra_config"]["connectors"]
        (table,) = [child for child in children if "kv_connector_module_path" in child]
    assert table["kv_connector"] == "TieredConnector"
    assert table["kv_connector_module_path"] == "connectors.vllm"
    extra.parse_extra(table["kv_connector_extra_config"])


@pytest.mark.parametrize("block", blocks("json"))
def test_json_is_read(block: str) -> None:
    table = json.loads(block)
    if "bench" in table:
        (row,) = json.loads(as_json("b", [Result("n", 1, "u")]))["results"]
        assert all(row.keys() <= result.keys() for result in table["results"])
    elif "actions" in table:
        assert hint_of(table) is not None
    else:
        check_transfer_config(table)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the files that the pages show."""
    write_modules(tmp_path)
    return tmp_path


def test_a_tier_that_is_shown_keeps_the_contract(files: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_folder_tier.py"],
        cwd=files, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)


def test_one_block_is_in_bash_which_a_long_test_runs() -> None:
    """tests/engine/test_by_hand.py: what is only read, or run piece by piece, is in sh."""
    (place,) = [place for place, _ in shown("bash")]
    assert place.startswith("docs/how-to/attach-vllm.md:")


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_is_a_configuration(block: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(files))
    found = config.parse(tomllib.loads("\n".join(line.strip() for line in block.splitlines())))
    for tier in found.tiers:
        assert callable(find_class(tier.class_name, "tier", Tier))


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_exist(block: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", text("Makefile"), re.MULTILINE))
    words = shlex.split(block, comments=True)
    if words[0] == "vllm":
        check_transfer_config(json.loads(words[words.index("--kv-transfer-config") + 1]))
        return
    for line in filter(None, (shlex.split(line, comments=True) for line in block.splitlines())):
        if line[0] == "make":
            assert set(line[1:]) <= targets
        elif line[:2] == ["python", "-m"] and line[2] in PARSERS:
            PARSERS[line[2]]().parse_args(line[3:])
        elif line[:2] == ["python", "-m"]:
            assert line[2] in {
                *("tests.bench.screenshots", "tests.demo", "tests.demo.router"),
                *("tests.rooms", "tests.rows"),
            }
        else:
            assert line[0] == "kvstore"
            cli._parser().parse_args(line[1:])


def part(page: str, heading: str) -> str:
    """What is under a heading of a page."""
    return text(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The first table under a heading: first column without backquotes, to the other columns."""
    lines = [line for line in part(page, heading).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip("`"): others for first, *others in cells}


def default_of(setting: Setting) -> str:
    """A default, as the reference has it."""
    if setting.required:
        return "required"
    if setting.default_text:
        return setting.default_text
    return "none" if setting.default is None else f"`{json.dumps(setting.default)}`"


def reasons_of(kind: type[Section]) -> dict[str, str]:
    """What each field of a section is and why, in one line: the text below its declaration."""
    (declared,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for field, reason in itertools.pairwise(declared.body):
        if isinstance(field, ast.AnnAssign) and isinstance(reason, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(reason.value).split())
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_explained_with_its_default(section: str) -> None:
    kind = SECTIONS[section]
    reasons, settings = reasons_of(kind), settings_of(kind)
    found = rows("docs/reference/config.md", section)
    assert {name: cells[0] for name, cells in found.items()} == {
        name: default_of(setting) for name, setting in settings.items()
    }
    for field in msgspec.structs.fields(kind):
        meaning = found[field.encode_name][1].removesuffix(" |")
        assert len(meaning) > 20
        assert meaning == reasons.get(field.name, meaning), "as it is declared, if it says it there"


def test_every_metric_is_explained() -> None:
    page = text("docs/reference/metrics.md")
    for name, spec in METRICS.items():
        labels = ", ".join(spec.labels) or "-"
        assert f"| `{name}` | {spec.kind} | {labels} | {spec.help} |" in page
    assert len(re.findall(r"^\| `kvstore_", page, re.MULTILINE)) == len(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_that_are_named_exist(name: str) -> None:
    parts = {
        f"{spec.name}_{part}"
        for spec in TABLE
        if spec.kind == "histogram"
        for part in ("bucket", "count", "sum")
    }
    named = set(re.findall(r"\b(?<!vllm:)kvstore_[a-z_]+", text(name)))
    assert named <= METRICS.keys() | parts


def subcommands() -> Iterator[tuple[str, list[str]]]:
    """Each command and its long options."""
    choices: Any = next(
        action.choices for action in cli._parser()._actions if isinstance(action.choices, dict)
    )
    for command, parser in choices.items():
        options = [name for action in parser._actions for name in action.option_strings]
        yield command, [name for name in options if name.startswith("--") and name != "--help"]


def test_every_command_and_option_is_explained() -> None:
    page = "docs/reference/cli.md"
    for command, options in subcommands():
        body = part(page, f"kvstore {command}")
        assert body, command
        assert all(option in body for option in options), command
    assert all(f"`{name}` measures" in text(page) for name in bench.BENCHES)


def test_every_message_is_explained() -> None:
    page = "docs/reference/protocol.md"
    assert f"version {engine.VERSION}." in text(page)
    unions = {"Engine to store": engine.ToStore, "Store to engine": engine.ToEngine}
    for heading, union in unions.items():
        expected = {
            kind.__name__: ", ".join(f"`{field}`" for field in kind.__struct_fields__) or "-"
            for kind in typing.get_args(union)
        }
        assert {name: cells[0] for name, cells in rows(page, heading).items()} == expected


def anchors(name: str) -> set[str]:
    """Name the headings of a page as links do."""
    headings = re.findall(r"^#+ (.*)$", text(name), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text(name)):
        if "://" not in target:
            page = (ROOT / name).parent.joinpath(target) if target else ROOT / name
            assert page.exists(), target
            if anchor:
                assert anchor in anchors(page.resolve().relative_to(ROOT).as_posix()), anchor


def test_every_page_is_linked_from_the_readme() -> None:
    readme = text("README.md")
    for name in NAMES[1:]:
        assert name in readme or name.startswith("docs/decisions/"), name


@pytest.mark.parametrize("name", [name for name in NAMES if "decisions" in name])
def test_decisions_say_problem_choice_and_price(name: str) -> None:
    headings = re.findall(r"^## (Problem|Choice|Price)$", text(name), re.MULTILINE)
    assert headings == ["Problem", "Choice", "Price"]
    assert text(name).startswith(f"# {Path(name).name[:3]}: ")


def test_every_test_that_shows_a_fault_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    tests = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
    known = {name for source in sources for name in tests.findall(source)}
    table = [line for line in text("docs/reliability.md").splitlines() if line.startswith("| ")]
    assert len(table) > 20
    for line in table:
        if line.startswith("| fault |"):
            continue
        fault, _, shown = (cell.strip() for cell in line.strip("|").split(" | "))
        names = re.findall(r"`(test_\w+|tests/[\w/]+\.py)`", shown)
        assert names, f"no test shows: {fault}"
        for name in names:
            assert name in known or (ROOT / name).is_file(), f"{name} does not exist"


def names_in(path: str) -> set[str]:
    """List the classes, functions and methods of a file; methods as Class.method."""
    found = set()
    for node in ast.parse(text(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


def test_code_that_pages_point_to_exists() -> None:
    pointer = re.compile(r"`((?:kvstore|tiers|connectors|tests)/[\w/]+(?:\.\w+|/))(?::([\w.]+))?`")
    found = [(page, *match) for page in NAMES for match in pointer.findall(text(page))]
    assert len([name for _, _, name in found if name]) > 30
    missing = [
        f"{page}: {path}" + f":{name}" * bool(name)
        for page, path, name in found
        if not (ROOT / path).exists() or (name and name not in names_in(path))
    ]
    assert not missing, "\n".join(missing)


def test_rooms_are_all_there_with_their_sizes() -> None:
    cells = rows("docs/architecture.md", "Rooms")
    shown = {room: int(cells[room][0].replace(",", "")) for room in rooms.rooms() if room in cells}
    counted = {room: lines for room, lines in rooms.rooms().items() if lines > 100}
    assert shown.keys() == counted.keys()
    wrong = [
        f"{room} has {lines:,} lines, the page says {shown[room]:,}"
        for room, lines in counted.items()
        if abs(shown[room] - lines) > max(100, lines / 10)
    ]
    assert not wrong, "\n".join(wrong)
