"""The unmodified tinker SDK on a real socket: each version in a process of its own.

A version is found in `OPENRL_SDK_DIRS` (directories made by `pip install --no-deps --target`,
separated like a PATH), or installed by pip into pytest's cache.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.node import MODEL

FLOW = Path(__file__).with_name("flow.py")
SECONDS = 120

OLDER = ["0.12.0", "0.24.1"]  # the oldest that is served, and the last that speaks JSON


def test_the_installed_sdk(url: str) -> None:
    run_flow(url, version("tinker"), None)


@pytest.mark.parametrize("number", OLDER)
def test_an_older_sdk(url: str, number: str, pytestconfig: pytest.Config) -> None:
    run_flow(url, number, find_sdk(number) or install_sdk(number, pytestconfig))


def run_flow(url: str, number: str, directory: Path | None) -> None:
    path = os.environ.get("PYTHONPATH", "")
    if directory is not None:
        path = f"{directory}{os.pathsep}{path}"
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, str(FLOW), url, MODEL, number],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "the flow is whole" in run.stdout


def find_sdk(number: str) -> Path | None:
    listed = os.environ.get("OPENRL_SDK_DIRS", "").split(os.pathsep)
    return next((Path(each) for each in listed if each and holds(Path(each), number)), None)


def install_sdk(number: str, pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    target = pytestconfig.cache.mkdir(f"tinker-{number}")
    if not holds(target, number):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        run = subprocess.run(
            [*pip, str(target), f"tinker=={number}"], capture_output=True, text=True
        )
        if run.returncode != 0:
            pytest.skip(f"tinker {number} cannot be had here: {run.stderr[-300:]}")
    return target


def holds(directory: Path, number: str) -> bool:
    return (directory / f"tinker-{number}.dist-info").is_dir()
