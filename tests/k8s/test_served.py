"""A server that is started as the `cpu` overlay's pod says, with paths of this machine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from click.testing import CliRunner
from support.kustomized import K8S, needs_kubectl, only, overlay, pod
from support.node import serving

from openrl import config, demo
from openrl.client import connect
from openrl.commands import cli
from openrl.commands.serving import Source
from openrl.types import Datum

pytestmark = needs_kubectl


@pytest.fixture
def key(tmp_path: Path) -> str:
    """Made as docs/deploy says; the list of keys is what the Secret holds."""
    said = {"OPENRL_AUTH__KEYS_FILE": str(tmp_path / "keys")}
    made = CliRunner().invoke(cli, ["keys", "add", "--owner", "alice"], env=said)
    assert made.exit_code == 0, made.output
    return str(re.findall(r"tml-\S+", made.output)[0])


@pytest.fixture
def settings(tmp_path: Path) -> config.Config:
    """The ConfigMap's file, and where the Secret is mounted."""
    file, keys = tmp_path / "openrl.toml", tmp_path / "keys"
    file.write_text(only(overlay("cpu"), "ConfigMap")["data"]["openrl.toml"])
    made = config.build(Source(file, ()).resolved())
    return replace(
        made,
        host="127.0.0.1",
        port=0,
        auth=replace(made.auth, keys_file=keys),
        engine=replace(made.engine, threads=1),
    )


async def test_its_probes_are_answered_also_while_a_pass_runs(
    settings: config.Config, key: str, tmp_path: Path
) -> None:
    container = pod(overlay("cpu"))["containers"][0]
    paths = {container[f"{k}Probe"]["httpGet"]["path"] for k in ("liveness", "readiness")}
    tokens = np.ones(512, np.int32)
    datum = Datum(tokens, {"target_tokens": tokens, "weights": np.ones(512, np.float32)})
    async with (
        serving(tmp_path / "home", settings) as node,
        connect(node.address, key) as client,
        aiohttp.ClientSession() as plain,
    ):
        model = await client.create_model(demo.NAME, rank=8)
        long = asyncio.ensure_future(_done(await model.forward_backward([datum] * 2)))
        within = aiohttp.ClientTimeout(total=container["livenessProbe"]["timeoutSeconds"])
        for path in sorted(paths):
            async with plain.get(f"{node.address}{path}", timeout=within) as answer:
                assert answer.status == 200
        assert not long.done()  # they were answered beside it
        await long


async def _done(promise: Awaitable[object]) -> object:
    return await promise


def test_every_file_of_configuration_is_read_by_the_server() -> None:
    for file in K8S.rglob("openrl.toml"):
        assert config.load(env={}, file=file).host == "0.0.0.0"
