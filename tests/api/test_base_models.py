"""Several base models in one node: what is wrong with one is told of that one alone."""

from pathlib import Path

import aiohttp
import pytest
from support.node import CONFIG, MODEL, serving

from openrl.engines.fake import FakeEngine
from openrl.errors import ServerError

from .conftest import Http

OTHER = "fake/other"


async def test_a_base_model_that_cannot_be_loaded_beside_one_that_serves(tmp_path: Path) -> None:
    engine = FakeEngine([MODEL, OTHER], unloadable={OTHER: "model.safetensors is cut short"})
    async with serving(tmp_path, CONFIG, engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        await node.actor.loaded()
        assert await http.new_model()
        status, ready = await http.ask("GET", "readyz")
        assert (status, ready["status"]) == (200, "degraded")
        assert ready["models"][MODEL]["state"] == "ready"
        assert ready["models"][OTHER]["state"] == "failed"
        assert ready["models"][OTHER]["error"] == "model.safetensors is cut short"
        body = {"session_id": await http.new_session(), "model_seq_id": 0, "base_model": OTHER}
        failed = await http.done("create_model", body | {"lora_config": {"rank": 8}})
        assert "could not be loaded: model.safetensors is cut short" in failed["error"]
        async with session.get(f"{node.address}/metrics") as answer:
            text = await answer.text()
        assert f'openrl_base_model_ready{{base_model="{MODEL}"}} 1.0' in text
        assert f'openrl_base_model_ready{{base_model="{OTHER}"}} 0.0' in text


async def test_a_node_with_no_base_model_left_is_lost(tmp_path: Path) -> None:
    engine = FakeEngine([MODEL], unloadable={MODEL: "model.safetensors is cut short"})
    async with serving(tmp_path, CONFIG, engine) as node, aiohttp.ClientSession() as session:
        with pytest.raises(ServerError, match="cut short"):
            await node.actor.loaded()
        status, ready = await Http(node.address, session).ask("GET", "readyz")
        assert (status, ready["status"]) == (503, "failed")
