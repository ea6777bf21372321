"""The house rules that ruff does not check: who imports whom, sizes, broad excepts."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import MUTANTS

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvstore", "tiers", "connectors")
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")
)
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
METHODS_MAX = 30

# Which rooms a room may import from; a module goes to the first room whose folder it is in.
ROOMS = {
    "kvstore/core/": ("core",),
    "kvstore/wire/": ("core", "wire", "low"),
    "kvstore/handover/": ("core", "wire", "low", "tiers", "handover"),
    "kvstore/store/": ("core", "wire", "low", "tiers", "handover", "store"),
    "kvstore/testing/": ("core", "testing"),
    "kvstore/cli.py": ("core", "wire", "low", "tiers", "handover", "store", "cli"),
    "kvstore/store_commands.py": ("core", "low", "store", "cli"),
    "kvstore/trace_commands.py": ("core", "low", "store", "cli"),
    "kvstore/check.py": ("core", "wire", "low", "tiers", "handover", "store"),
    "kvstore/engine_check.py": ("core", "wire", "low", "store", "cli", "connectors"),
    "kvstore/": ("core", "wire", "low"),
    "tiers/": ("core", "wire", "low", "tiers"),
    "connectors/": ("core", "wire", "low", "connectors"),
}
NAMES = {
    "kvstore/cli.py": "cli",
    "kvstore/store_commands.py": "cli",
    "kvstore/trace_commands.py": "cli",
    "kvstore/check.py": "cli",
    "kvstore/engine_check.py": "cli",
    "kvstore/": "low",
}
# What a worker needs of the tiers: threads, the extents that it maps, and NIXL for direct reads.
SHARED = {
    "connectors/worker_copies.py": ("tiers.runner",),
    "connectors/engine_agent.py": ("tiers.nixl",),
}

# Engines and device libraries, and the only files that know them.
BORDER = {
    "vllm": ("connectors/vllm*.py",),
    "sglang": ("connectors/sglang*.py",),
    "transformers": (),
    "nixl_cu12": ("tiers/nixl/agent.py",),
    "nixl_cu13": ("tiers/nixl/agent.py",),
    "cupy": ("connectors/copies/gpu/*.py",),
}

# These decide and move nothing: what they do follows from their arguments alone.
IMPURE = {
    *("asyncio", "concurrent", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "random"),
    *("selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time"),
    *("aiofiles", "lmdb", "prometheus_client", "torch"),
}

# What the store must not bring along: seconds of loading, or a wrong direction.
HEAVY = ("torch", "cupy", "nixl", "vllm", "connectors")

# What the test extra brings under another name, or by way of what it lists.
BROUGHT = ("botocore", "setuptools", "xdist", "yaml")

# Of the tests: loaded by engines only.
IN_ENGINES = (
    "tests/bench/native_worker.py",
    *("tests/engine/broken.py", "tests/engine/kernels.py", "tests/engine/neighbour.py"),
)

# A worker's bug must still free the slots of its job.
BROAD_EXCEPTS = (
    "tiers/runner.py",
    "kvstore/barrier.py",  # those of the store
    "kvstore/store/store.py",  # the barrier of connections
    "tiers/nvme/disk.py",  # of the disk
    "kvstore/cli.py",  # of what people type
    "kvstore/store/edge_thread.py",  # of calls that may hang: the error is their caller's
    "kvstore/store/plugins.py",  # of tiers of others, and of policies before the start
    "kvstore/core/policy.py",  # of policies of others
)


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """All of a file's tree, which is walked by most tests."""
    return tuple(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"), path)))


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def top(dotted: str) -> str:
    return dotted.partition(".")[0]


def imported(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each import, those inside functions and by string too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            package = ".".join(Path(path).parent.parts)
            yield node.lineno, importlib.util.resolve_name(name, package) if node.level else name
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def room_of(path: str) -> str:
    """Name the room that a file is in."""
    folder = next(folder for folder in ROOMS if path.startswith(folder))
    return NAMES.get(folder, folder.strip("/").rpartition("/")[2])


def file_of(dotted: str) -> str | None:
    """Return the file of one of our modules; None for what is none."""
    path = dotted.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in SOURCES), None)


def modules_imported(path: str) -> Iterator[tuple[int, str]]:
    """Yield line and file of each module of ours that a file imports."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found = file_of(f"{node.module}.{alias.name}") or file_of(node.module)
                if found:
                    yield node.lineno, found
    for line, name in imported(path):
        if (found := file_of(name)) is not None and name not in PACKAGES:
            yield line, found


def test_there_is_something_to_check() -> None:
    assert {"kvstore/config.py", "kvstore/core/errors.py", "tiers/cpu.py"} <= set(SOURCES)
    assert "tests/test_tidy.py" in TESTS


def test_imports_go_one_way() -> None:
    wrong = []
    for path in SOURCES:
        folder = next(folder for folder in ROOMS if path.startswith(folder))
        shared = tuple(name.replace(".", "/") for name in SHARED.get(path, ()))
        wrong += [
            f"{path}:{line} imports {found}"
            for line, found in set(modules_imported(path))
            if room_of(found) not in ROOMS[folder] and not found.startswith(shared or ("-",))
        ]
        wrong += [f"{path}:{line} {name}" for line, name in imported(path) if top(name) == "tests"]
    assert not wrong, "\n".join(sorted(wrong))


def test_engines_and_devices_stay_in_their_own_file() -> None:
    assert not [
        f"{path}:{line} imports {name}"
        for path in SOURCES
        for line, name in imported(path)
        if top(name) in BORDER and not matches(path, BORDER[top(name)])
    ]


def test_the_core_imports_nothing_that_acts() -> None:
    assert not [
        f"{path}:{line} imports {name}"
        for path in SOURCES
        if path.startswith("kvstore/core/")
        for line, name in imported(path)
        if top(name) in IMPURE
    ]


def test_no_module_reads_the_environment() -> None:
    """Handed on whole, to a child or to what speaks with systemd by it, is no reading."""
    wrong = []
    for path in SOURCES:
        handed_on = {
            value
            for node in nodes(path)
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is None
        } | {
            argument
            for node in nodes(path)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Systemd"
            for argument in node.args
        }
        wrong += [
            f"{path}:{node.lineno} uses {ast.unparse(node)}"
            for node in nodes(path)
            if isinstance(node, ast.Attribute | ast.Name)
            and ast.unparse(node) in {"os.environ", "os.getenv", "environ", "getenv"}
            and node not in handed_on
        ]
    assert not wrong


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_the_store_leaves_torch_out() -> None:
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in SOURCES
        if path.startswith("kvstore/") and path != "kvstore/engine_check.py"  # of a command
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print(*sorted({set(HEAVY)} & set(sys.modules)))"
    )
    assert run(["-W", "error", "-c", code], ROOT).split() == []


@pytest.mark.parametrize("name", PACKAGES)
def test_package_names_point_into_this_repository(name: str, tmp_path: Path) -> None:
    """The names are generic: an installed package of the same name must not win."""
    code = f"import importlib.util as u; print(u.find_spec({name!r}).origin)"
    assert Path(run(["-c", code], tmp_path).strip()) == ROOT / name / "__init__.py"


def test_files_and_functions_stay_short() -> None:
    long = [
        f"{path} has {lines} lines"
        for path in SOURCES + TESTS
        if (lines := (ROOT / path).read_text(encoding="utf-8").count("\n")) >= FILE_LINES_MAX
    ]
    long += [
        f"{path}:{node.lineno} {node.name} has {length} lines"
        for path in SOURCES + TESTS
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) >= FUNCTION_LINES_MAX
    ]
    assert not long


def methods(node: ast.ClassDef) -> list[str]:
    """List a class's methods; of one that implements vLLM's interface, without those of that."""
    names = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    called = any("KVConnectorBase" in ast.unparse(base) for base in node.bases)
    return [name for name in names if not called or name.startswith("_")]


def test_classes_have_few_methods() -> None:
    large = [
        f"{path}: {node.name} has {count} methods"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and (count := len(methods(node))) > METHODS_MAX
    ]
    assert not large


def caught(path: str) -> Iterator[tuple[int, ast.expr | None]]:
    """Yield line and type of what is caught and not raised on."""
    for node in nodes(path):
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            if not (isinstance(last, ast.Raise) and last.exc is None):
                yield node.lineno, node.type
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            yield from ((node.lineno, argument) for argument in node.args)


def test_broad_excepts_live_at_the_named_barriers_only() -> None:
    broad = {"Exception", "BaseException"}
    assert not [
        f"{path}:{line} catches {'everything' if kind is None else ast.unparse(kind)}"
        for path in SOURCES
        if not matches(path, BROAD_EXCEPTS)
        for line, kind in caught(path)
        if kind is None
        or broad & {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}
    ]


def test_there_are_fewer_than_twelve_dependencies_and_the_named_ones_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {name.split(">")[0].split("=")[0] for name in project["dependencies"]}
    assert {"torch", "nixl", "lmdb", "aiofiles", "msgspec", "prometheus-client"} <= names
    assert len(names) < 12
    assert not any("vllm" in name for name in names)
    assert project["optional-dependencies"]["cuda"][0].startswith("cupy-cuda13x")


def test_tests_load_where_there_is_no_engine() -> None:
    """`make setup EXTRAS=test` leaves vLLM out, and with it what only vLLM brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in listed}
    known = {*names, *BROUGHT, *sys.stdlib_module_names, *PACKAGES, "tests"}
    assert not [
        f"{path}:{node.lineno}"
        for path in TESTS
        if path not in IN_ENGINES
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8"), path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        if not known.issuperset(
            [top(node.module or "")]
            if isinstance(node, ast.ImportFrom)
            else [top(alias.name) for alias in node.names]
        )
    ]


def test_the_tests_that_have_to_notice_are_there() -> None:
    gone = []
    for mutant in MUTANTS:
        paths, _, words = mutant.tests.partition(" -k ")
        files = [ROOT / path for path in paths.split() if path.startswith("tests/")]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        alternatives = re.split(r" or | and | not |\s+", words.strip("'\""))
        gone += [f"{mutant}: {word}" for word in alternatives if word and word not in text]
    assert not gone, "\n".join(gone)


def test_every_line_that_is_taken_out_on_purpose_is_there_once() -> None:
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path, *_ in MUTANTS}
    gone = [f"{m}: {n} times" for m in MUTANTS if (n := texts[m.path].count(m.found)) != 1]
    assert not gone, "\n".join(gone)
    for mutant in MUTANTS:
        if mutant.path.endswith(".py"):  # without it that is a program still
            ast.parse(texts[mutant.path].replace(mutant.found, mutant.instead), str(mutant))
