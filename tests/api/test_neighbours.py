"""Who is told a directory of the server's machine."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from openrl import demo
from openrl.api import neighbours
from openrl.engines.base import BaseModelInfo, WeightsKey

HERE = str(demo.model_directory())


def told(tokenizer: str, remote: str, **headers: str) -> str:
    info = BaseModelInfo("a/b", WeightsKey("w"), 64, 10, (0,), tokenizer, 8, "Qwen3ForCausalLM")
    request = make_mocked_request("POST", "/api/v1/get_info", headers)
    return neighbours.tokenizer_id(request.clone(remote=remote), info)


@pytest.mark.parametrize("remote", ["127.0.0.1", "127.8.8.8", "::1"])
def test_a_neighbour_is_told_the_directory(remote: str) -> None:
    assert told(HERE, remote) == HERE


@pytest.mark.parametrize("remote", ["192.0.2.7", "2001:db8::1", "", "unix"])
def test_others_are_told_the_name(remote: str) -> None:
    assert told(HERE, remote) == "a/b"


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
def test_who_comes_through_a_proxy_is_told_the_name(header: str) -> None:
    assert told(HERE, "127.0.0.1", **{header: "192.0.2.7"}) == "a/b"


def test_a_name_is_told_to_everybody() -> None:
    assert told("c/d", "192.0.2.7") == told("c/d", "127.0.0.1") == "c/d"
