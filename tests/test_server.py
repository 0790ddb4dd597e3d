"""What a server says as it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.node import CONFIG, MODEL, serving
from support.shell import datum, training

import openrl
from openrl.config import JournalConfig, SchedulerConfig
from openrl.types import RequestId, Work


@pytest.mark.parametrize(
    ("kept", "said"), [(True, "1 requests were not finished in time, and go on"), (False, "failed")]
)
async def test_the_log_tells_what_becomes_of_work_that_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: bool, said: str
) -> None:
    config = replace(
        CONFIG,
        drain_seconds=0.0,
        journal=JournalConfig(enabled=kept),
        scheduler=SchedulerConfig(gap_seconds=1000.0),
    )
    async with (
        serving(tmp_path, config) as node,
        openrl.connect(node.address, "tml-ann") as client,
    ):
        name = (await client.create_model(MODEL, rank=8)).model_id
        model = node.actor.models.find(name)
        assert model is not None
        waits = Work(  # for what comes before it
            RequestId(f"{name}:9"),
            model.owner,
            model.session_id,
            name,
            9,
            training([datum([1, 2], [2, 3])]),
        )
        node.services.admission.submit(waits)
    (line,) = [r.getMessage() for r in caplog.records if "not finished in time" in r.getMessage()]
    assert said in line
