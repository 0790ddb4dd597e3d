"""Checkpoints that are kept elsewhere, through the whole server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.node import CONFIG, MODEL, serving

import openrl
from openrl.config import CheckpointsConfig, Config
from openrl.errors import Gone, NotFound, UserError
from openrl.server import Node
from openrl.types import Datum

KEY = "tml-ann"


def kept_at(bucket: Path, **limits: int) -> Config:
    return replace(CONFIG, checkpoints=CheckpointsConfig(url=f"file://{bucket}", **limits))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path / "data", kept_at(tmp_path / "bucket")) as node:
        yield node


def datum() -> Datum:
    tokens = np.arange(1, 5, dtype=np.int32)
    return Datum(tokens, {"target_tokens": tokens + 1, "weights": np.ones(4)})


async def trained(client: openrl.Client) -> openrl.Model:
    model = await client.create_model(MODEL, rank=8)
    await model.forward_backward([datum()])
    await (await model.optim_step())
    return model


def lose_copies(tmp_path: Path) -> None:
    for copy in (tmp_path / "data" / "checkpoints").iterdir():
        shutil.rmtree(copy)


async def test_what_this_disk_has_lost_comes_back_for_training_and_sampling(
    node: Node, tmp_path: Path
) -> None:
    async with openrl.connect(node.address, KEY) as client:
        model = await trained(client)
        state, weights = await model.save_state("s"), await model.save_sampler("w")
        before = (await (await model.forward([datum()]))).metrics["loss:sum"]
        sampler = await client.sampler(path=weights)
        sampled = await sampler.sample([5, 6], max_tokens=5, seed=1)
        lose_copies(tmp_path)
        fresh = await client.create_model(MODEL, rank=8)
        await fresh.load_state(state, optimizer=True)
        assert (await (await fresh.forward([datum()]))).metrics["loss:sum"] == before
        other = await client.create_model_from_checkpoint(state)
        assert (await (await other.forward([datum()]))).metrics["loss:sum"] == before
        again = await (await client.sampler(path=weights)).sample([5, 6], max_tokens=5, seed=1)
        assert (again.sequences[0].tokens == sampled.sequences[0].tokens).all()


async def test_what_is_nowhere_fails_the_one_who_asks(node: Node, tmp_path: Path) -> None:
    async with openrl.connect(node.address, KEY) as client:
        model = await trained(client)
        state = await model.save_state("s")
        sampler = await client.sampler(path=await model.save_sampler("w"))
        lose_copies(tmp_path)
        shutil.rmtree(tmp_path / "bucket")
        with pytest.raises(openrl.OpenRLError, match="missing"):
            await model.load_state(state)
        with pytest.raises(Gone, match=r"the files of checkpoint .* are missing"):
            await sampler.sample([5], max_tokens=2)
        await (await model.forward([datum()]))


async def test_an_owner_keeps_no_more_than_is_allowed(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "data", kept_at(tmp_path / "bucket", owner_count=1)) as node,
        openrl.connect(node.address, KEY) as client,
    ):
        model = await trained(client)
        await model.save_state("one")
        await model.save_state("one", overwrite=True)
        with pytest.raises(UserError, match="allows 1: delete some"):
            await model.save_state("two")
        with pytest.raises(NotFound):
            await client.create_model_from_checkpoint(f"tinker://{model.model_id}/weights/two")
