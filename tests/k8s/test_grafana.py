"""Grafana's dashboard asks for metrics that a node exports, with labels that they have."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.node import MODEL, serving

from openrl.client import connect
from openrl.types import Datum

FILE = Path(__file__).parents[2] / "k8s" / "grafana.json"
NAME = re.compile(r"\b((?:openrl|process)_[a-z0-9_]+)")
WORDS = {"instance"}  # which Prometheus adds itself


def expressions() -> list[str]:
    board = json.loads(FILE.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.fixture
async def exported(tmp_path: Path) -> dict[str, set[str]]:
    """Names of samples and the labels that they have, after some work."""
    async with serving(tmp_path) as node:
        async with connect(node.address, "tml-alice") as client:
            model = await client.create_model(MODEL, rank=8)
            inputs = {"target_tokens": np.array([1]), "weights": np.array([1.0])}
            await (await model.forward_backward([Datum(np.array([1], np.int32), inputs)]))
        async with aiohttp.ClientSession() as session:
            text = await (await session.get(f"{node.address}/metrics")).text()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_in_it_is_exported(exported: dict[str, set[str]]) -> None:
    asked = {name for text in expressions() for name in NAME.findall(text)}
    assert len(asked) > 25
    assert asked - exported.keys() == set()


async def test_every_label_in_it_is_there(exported: dict[str, set[str]]) -> None:
    for text in expressions():
        known = set().union(*(exported[name] for name in NAME.findall(text))) | WORDS
        matchers = {m for inner in re.findall(r"{([^}]*)}", text) for m in _labels(inner)}
        grouped = {word for inner in re.findall(r"by \(([^)]*)\)", text) for word in _words(inner)}
        assert matchers | grouped <= known, text


def _labels(inner: str) -> list[str]:
    return re.findall(r"(\w+)\s*(?:=~|!~|=|!=)\"", inner)


def _words(inner: str) -> list[str]:
    return [word.strip() for word in inner.split(",")]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_the_expressions_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"openrl:panel{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
