"""The floors hold: imports go down only, torch stays in its room, the client stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "openrl"

# The scheduler's core, events in and decisions out, is one room; its files are named in the page.
CORE = tuple(sorted(path.stem for path in (PACKAGE / "scheduler" / "core").glob("[!_]*.py")))
# So is what makes of an earlier process's journal what this one goes on with.
RECOVERY = tuple(
    sorted(path.stem for path in (PACKAGE / "scheduler" / "recovery").glob("[!_]*.py"))
)
# What runs it, and the part of that which is pure as well.
SHELL = (
    "admission",
    "actor",
    "completion",
    "backlog",
    "closing",
    "controls",
    "enquiries",
    "fetching",
    "leases",
    "loading",
    "metering",
    "models",
    "runner",
    "quotas",
    "entitlements",
    "inbox",
    "parts",
    "publishing",
    "securing",
    "snapshots",
)
PURE_SHELL = ("allowance", "curves", "dispatch", "outcomes", "pending", "pins", "rhythm")

# Every module is a room here or lies in a folder that is one. A new one is placed on purpose.
FLOORS: Mapping[int, tuple[str, ...]] = {
    5: (
        "server",
        "housekeeping",
        "cli",
        "commands",
        "preflight",
        "startup",
        "tracing",
    ),
    4: ("api",),
    3: (
        "scheduler.core",
        "scheduler.recovery",
        *(f"scheduler.{name}" for name in (*SHELL, *PURE_SHELL)),
        "engines.base",
        "engines.fake",
        "engines.fake_model",
        "engines.fake_rows",
        "engines.frames",
        "engines.losses",
        "engines.process",
        "engines.scores",
        "engines.snapshots",
        "engines.validation",
        "engines.worker",
        "engines.pytorch",
    ),
    2: (
        "catalogue",
        "encryption",
        "signing",
        "checkpoints",
        "storage",
        "futures",
        "journal",
        "tls",
        "key_files",
        "keys",
        "cluster",
    ),
    1: (
        "actors",
        "config",
        "data_directory",
        "demo",
        "limits",
        "model_sources",
        "planning",
        "settings",
        "telemetry",
        "threads",
        "values",
    ),
    0: ("errors", "paths", "types"),
}
IMPLEMENTATIONS = {"engines.fake", "engines.fake_model", "engines.fake_rows", "engines.pytorch"}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
# Beside the floors: users of floor 0 alone.
CLIENT = "client"
FACADE = ""  # openrl/__init__.py
ROOMS = (*FLOOR_OF, CLIENT)

# A file over 300 lines lacks a noun, unless it is a vocabulary or a table.
MOST_LINES = 300
LONGER: Mapping[str, str] = {
    "engines/base.py": "every noun between scheduler and engines, read as one page",
    "types.py": "every noun of the protocol, read as one page",
}


@dataclass(frozen=True)
class Import:
    """`target` is dotted; inside the package it starts with `openrl`."""

    module: str
    target: str
    line: int
    for_types_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def modules() -> Mapping[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for module in modules() for found in imports_of(module))


def imports_of(module: str) -> Iterator[Import]:
    tree = tree_of(module)
    for_types = set(inside_type_checking(tree))
    is_package = modules()[module].name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for target in targets(node, package):
            yield Import(module, target, node.lineno, node in for_types)


def targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        source = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
        for name in node.names:
            inner = f"{source}.{name.name}"
            yield inner if inner in modules() else source


def inside_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from ast.walk(statement)


def room_of(module: str) -> str | None:
    """The room that `openrl.…` lies in; None when it has not been placed."""
    if module == "openrl":
        return FACADE
    inner = module.removeprefix("openrl.")
    return next((room for room in ROOMS if inner == room or inner.startswith(f"{room}.")), None)


def internal() -> Iterator[tuple[Import, str, str]]:
    """Imports between rooms."""
    for found in imports():
        if found.target.split(".")[0] == "openrl":
            source, target = room_of(found.module), room_of(found.target)
            if source is not None and target is not None and source != target:
                yield found, source, target


def said(violations: Iterable[object]) -> list[str]:
    return [str(violation) for violation in violations]


# --- the rooms ------------------------------------------------------------------------------


def test_every_module_has_been_placed() -> None:
    folders = {"openrl.scheduler", "openrl.engines"}  # only hold rooms
    unplaced = {module for module in modules() if room_of(module) is None}
    assert unplaced == folders, "place new modules in FLOORS"
    assert not [found for found in imports() if found.module in folders]


def test_every_room_is_there() -> None:
    placed = {room_of(module) for module in modules()}
    assert set(ROOMS) - placed == set(), "take away from FLOORS what is no more"


def test_architecture_md_names_every_room() -> None:
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    scheduler = [
        name for name in (*CORE, *RECOVERY, *SHELL, *PURE_SHELL) if f"`{name}`" not in page
    ]
    outer = [name for floor in (0, 1, 2, 4, 5) for name in FLOORS[floor]]
    others = [name for name in outer if f"`{name}.py`" not in page and f"`{name}/`" not in page]
    assert [*scheduler, *others] == [], "say in ARCHITECTURE.md what it is for"


def test_imports_go_down_only() -> None:
    up = [
        found
        for found, source, target in internal()
        if source in FLOOR_OF and (target not in FLOOR_OF or FLOOR_OF[target] > FLOOR_OF[source])
    ]
    assert said(up) == []


def test_the_scheduler_and_the_engines_are_blind_to_each_other() -> None:
    seen = [
        found
        for found, source, target in internal()
        if (source.startswith("engines.") and target.startswith("scheduler."))
        or (source.startswith("scheduler.") and target in IMPLEMENTATIONS)
    ]
    assert said(seen) == []


def test_the_client_knows_floor_0_alone() -> None:
    known = {*FLOORS[0], FACADE}
    inside = [f for f, source, target in internal() if source == CLIENT and target not in known]
    outside = [
        found
        for found in imports()
        if room_of(found.module) == CLIENT
        and found.target.split(".")[0]
        not in {"openrl", "aiohttp", "msgpack", "numpy", "zstandard", *sys.stdlib_module_names}
    ]
    assert said([*inside, *outside]) == []


def test_the_facade_knows_the_client_and_floor_0_alone() -> None:
    assert {target for _, source, target in internal() if source == FACADE} <= {
        CLIENT,
        *FLOORS[0],
    }
    assert not [found for found, _, target in internal() if target == FACADE]


# --- what a room may use --------------------------------------------------------------------


def test_torch_stays_in_the_torch_engine() -> None:
    heavy = {"torch", "peft", "accelerate"}
    strays = [
        found
        for found in imports()
        if found.target.split(".")[0] in heavy and room_of(found.module) != "engines.pytorch"
    ]
    assert said(strays) == []


def test_the_core_is_pure() -> None:
    pure = {"scheduler.core", *(f"scheduler.{name}" for name in PURE_SHELL)}
    impure = {"asyncio", "concurrent", "datetime", "logging", "os", "random", "socket"}
    impure |= {"sqlite3", "subprocess", "threading", "time", "uvloop"}
    reached = [
        found
        for found in imports()
        if room_of(found.module) in pure and found.target.split(".")[0] in impure
    ]
    assert said(reached) == []


def test_the_core_knows_frozen_vocabulary_alone() -> None:
    known = {"engines.base", "config", *FLOORS[0]}
    strays = [
        f for f, source, target in internal() if source == "scheduler.core" and target not in known
    ]
    assert said(strays) == []


def test_no_import_cycles() -> None:
    """Imports that only a type checker follows may be mutual."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if found.target in graph and not found.for_types_only:
            graph[found.module].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_tasks_are_spawned_by_the_supervisor_alone() -> None:
    """`loop.create_task` slips past the linter. A `TaskGroup` keeps its tasks itself."""
    supervisors = {
        "openrl.actors",
        "openrl.client.client",
        "openrl.client.many",
        "openrl.server",
    }  # keep their own
    naked = [
        f"{module}:{node.lineno}"
        for module in modules().keys() - supervisors
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute)
        and node.attr in {"create_task", "ensure_future"}
        and not ast.unparse(node.value).endswith("group")
    ]
    assert naked == []


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    }
    long = {name for name, lines in lengths.items() if lines > MOST_LINES}
    assert long - set(LONGER) == set(), "a noun is missing: see what the file does besides its job"
    assert set(LONGER) - long == set(), "no longer an exception"


# --- what an import costs -------------------------------------------------------------------

SERVER_ONLY = {"torch", "transformers", "peft", "tokenizers", "safetensors", "msgspec"}
SERVER_ONLY |= {"google.protobuf", "click", "rich", "uvloop", "zstandard", "sqlite3"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import openrl", SERVER_ONLY | {"aiohttp", "numpy"}),
        ("import openrl.client; openrl.Client", SERVER_ONLY),
        ("import openrl.cli", SERVER_ONLY | {"aiohttp", "numpy"}),
        ("import openrl.commands, openrl.server", {"torch", "transformers", "peft"}),
    ],
)
def test_imports_are_light(statement: str, unwanted: set[str]) -> None:
    script = f"import sys; {statement}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert unwanted & set(loaded) == set()
