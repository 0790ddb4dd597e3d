"""A model that trains all parameters, through our client, across kills of the server: its
numbers and files are those of a quiet day, and so are those of the adapter beside it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from support.crash_server import DEMO
from support.crash_stage import Kill, Stage, end, equal
from transformers import AutoModelForCausalLM

import openrl
import openrl.client

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux's signals"),
]
STEPS = 4
ADAM = openrl.AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)


def _datum(step: int) -> openrl.Datum:
    tokens = np.arange(2, 22) + step
    return openrl.Datum(tokens, {"target_tokens": tokens + 1, "weights": np.ones(20)})


async def _waited(pending: openrl.client.Pending[Any]) -> Any:
    return await pending


async def _step(model: openrl.client.Model, step: int) -> list[float]:
    done = await model.forward_backward([_datum(step)])
    stepped = await model.optim_step(ADAM)
    result, optim = await asyncio.gather(_waited(done), _waited(stepped))
    return [result.metrics["loss:sum"], *sorted(optim.metrics.values())]


async def _loop(stage: Stage, between: Callable[[int], Awaitable[None]]) -> dict[str, Any]:
    numbers: list[Any] = []
    async with openrl.connect(stage.url, "tml-full", patience=60.0) as client:
        full = await client.create_model(DEMO, full=True)
        lora = await client.create_model(DEMO, rank=8, seed=5)
        for step in range(STEPS):
            ours, theirs, _ = await asyncio.gather(
                _step(full, step), _step(lora, step), between(step)
            )
            numbers += [ours, theirs]
        paths = [await model.save_state("end") for model in (full, lora)]
        again = await client.create_model_from_checkpoint(paths[0], optimizer=True)
        numbers.append(await _step(again, STEPS))
        with pytest.raises(openrl.UserError, match="sampling from a model that trains all"):
            await full.sampler()
    return {"numbers": numbers, "paths": paths}


def _the_sdk_goes_on(url: str, expected: dict[str, Any]) -> None:
    """It has no call that makes a full model, but loads the state of one and trains it."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-full")
    path, other = expected["paths"]
    model = service.create_training_client_from_state_with_optimizer(path).result()
    datum = _datum(STEPS)
    given = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(datum.tokens.tolist()),
        loss_fn_inputs={
            "target_tokens": datum.loss_inputs["target_tokens"],
            "weights": datum.loss_inputs["weights"].astype(np.float32),
        },
    )
    result = model.forward_backward([given], "cross_entropy").result()
    assert result.metrics["loss:sum"] == expected["numbers"][-1][0]
    model.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    runs = service.create_rest_client()
    full, lora = (runs.get_weights_info_by_tinker_path(p).result() for p in (path, other))
    assert (full.is_lora, full.lora_rank, lora.is_lora, lora.lora_rank) == (False, None, True, 8)


async def test_a_full_model_goes_on_across_kills(tmp_path: Path) -> None:
    async def nothing(step: int) -> None:
        pass

    calm, storm = Stage(tmp_path / "calm", "torch"), Stage(tmp_path / "storm", "torch")
    server = calm.start(Kill())
    try:
        expected = await _loop(calm, nothing)
        await asyncio.to_thread(_the_sdk_goes_on, calm.url, expected)
    finally:
        end(server)

    servers = [storm.start(Kill())]

    async def kill(step: int) -> None:
        if step in (1, 3):
            end(servers[-1])
            servers.append(await asyncio.to_thread(storm.start, Kill()))

    try:
        found = await _loop(storm, kill)
    finally:
        end(servers[-1])
    assert len(servers) == 3
    assert found["numbers"] == expected["numbers"]
    assert equal(storm.weights(found), calm.weights(expected))
    _loads_in_transformers(storm, found["paths"][0])


def _loads_in_transformers(stage: Stage, path: str) -> None:
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    (directory,) = (stage.data / "checkpoints" / model_id / kind / name).iterdir()
    (tensors,) = stage.weights({"paths": [path]})
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    for name, value in loaded.named_parameters():
        assert np.array_equal(tensors[f"model.safetensors:{name}"], value.detach().numpy()), name
