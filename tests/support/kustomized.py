"""What `kubectl kustomize` makes of an overlay, and where it lies."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")


@functools.cache
def _text(directory: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def objects(directory: Path) -> list[Any]:
    return list(yaml.safe_load_all(_text(directory)))


def overlay(name: str) -> list[Any]:
    return objects(K8S / "overlays" / name)


def only(found: list[Any], kind: str, name: str = "openrl") -> Any:
    (one,) = [o for o in found if o["kind"] == kind and named(o).startswith(name)]
    return one


def named(one: Any) -> str:
    return str(one["metadata"]["name"])


def pod(found: list[Any]) -> Any:
    return only(found, "DaemonSet")["spec"]["template"]["spec"]
