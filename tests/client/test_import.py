"""The client is light: what it may import, and how long that may take."""

from __future__ import annotations

import subprocess
import sys

import openrl

ALLOWED = {"openrl", "numpy", "msgpack"}


def imported_by(statement: str) -> set[str]:
    code = f"""
import sys
before = set(sys.modules)
{statement}
print(*{{name.split('.')[0] for name in set(sys.modules) - before}})
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def third_party(names: set[str]) -> set[str]:
    own = {"cython_runtime"}  # part of compiled modules
    return {n for n in names - own if n not in sys.stdlib_module_names and n[0] != "_"}


def test_importing_openrl_imports_nothing_else() -> None:
    assert third_party(imported_by("import openrl")) == {"openrl"}


def test_the_client_brings_numpy_and_msgpack_and_leaves_aiohttp_for_the_connection() -> None:
    assert third_party(imported_by("from openrl import connect, Client, Datum")) == ALLOWED


def test_a_connection_adds_aiohttp_and_never_torch() -> None:
    modules = third_party(imported_by("import openrl.client.transport"))
    assert "aiohttp" in modules
    assert not modules & {"torch", "transformers", "msgspec", "google"}


def test_every_public_name_is_there() -> None:
    assert all(getattr(openrl, name) is not None for name in openrl.__all__)


def test_importing_the_client_takes_less_than_150_milliseconds() -> None:
    """CPU time of the import alone, the best of five: other work on the machine hardly counts."""
    code = "import time; t = time.process_time(); from openrl import connect; "
    code += "print(time.process_time() - t)"
    runs = (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        for _ in range(5)
    )
    assert min(float(run.stdout) for run in runs) < 0.15
