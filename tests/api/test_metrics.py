"""What Prometheus reads: well-formed, true to what ran, bounded, and closed to strangers."""

import asyncio
import shutil
from asyncio.subprocess import PIPE, STDOUT
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.node import CONFIG, serving

from openrl.api.exposition import NodeCollector
from openrl.config import MetricsConfig
from openrl.journal import JournalStatistics, NullJournal
from openrl.server import Node

from .conftest import Http
from .test_polls import forward_backward, new_sampler, sample

FAR = {"X-Forwarded-For": "192.0.2.1"}  # whoever comes through a proxy is not at home


async def scrape(url: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/metrics", headers=headers) as response,
    ):
        return response.status, await response.text()


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                return one.value
    raise KeyError(f"{name} {labels}")


@pytest.fixture
async def text(http: Http, node: Node) -> str:
    model_id = await http.new_model()
    await http.done("forward_backward", forward_backward(model_id, 1))
    await http.done("optim_step", {"model_id": model_id, "seq_id": 2})
    await http.done("asample", sample(await new_sampler(http), 0))
    await http.post("forward_backward", {"model_id": "nobody:train:0"})
    status, text = await scrape(node.address)
    assert status == 200
    return text


async def test_what_ran_is_counted(text: str, node: Node) -> None:
    statistics = node.actor.enquiries.statistics()
    for kind, count in statistics.passes.items():
        assert value(text, "openrl_pass_duration_seconds_count", kind=kind) == count
        assert value(text, "openrl_pass_jobs_count", kind=kind) == count
    busy = families(text)["openrl_engine_busy_seconds"].samples
    assert sum(one.value for one in busy) == pytest.approx(statistics.engine_seconds)
    assert value(text, "openrl_tokens_total", kind="train") == 1
    assert value(text, "openrl_requests_answered_total", kind="optim_step", outcome="ok") == 1
    waits = sum(
        one.value
        for one in families(text)["openrl_queue_wait_seconds"].samples
        if one.name.endswith("_count")
    )
    assert waits == 4  # the making of the model, forward_backward, optim_step, sample
    assert value(text, "openrl_futures", state="waiting") == 0
    assert value(text, "openrl_futures", state="resolved") == 4
    assert value(text, "openrl_models") == 1
    assert value(text, "openrl_pass_fill_ratio_count", kind="train") == 1
    assert value(text, "openrl_kv_cache_tokens", state="free") > 0
    assert value(text, "openrl_build_info") == 1


async def test_http_is_counted_by_route_and_not_by_name(text: str, node: Node) -> None:
    answered = {"method": "POST", "route": "/api/v1/forward_backward", "status": "200"}
    assert value(text, "openrl_http_requests_total", **answered) == 1
    async with aiohttp.ClientSession() as session:
        for path in ("/api/v1/training_runs/x:train:0", "/nowhere/7", "/nowhere/8"):
            await session.get(node.address + path, headers={"X-API-Key": "tml-a"})
    _, text = await scrape(node.address)
    route = "/api/v1/training_runs/{run}"
    assert value(text, "openrl_http_requests_total", route=route, status="404") == 1
    assert value(text, "openrl_http_requests_total", route="unknown", status="404") == 2
    assert "nowhere" not in text


async def test_no_label_tells_whose_it_is(text: str, node: Node) -> None:
    names = {key for family in families(text).values() for s in family.samples for key in s.labels}
    assert names <= {
        *("kind", "state", "outcome", "le", "method", "route", "status", "version"),
        "base_model",  # as few as are configured, and /readyz tells everyone their names
        *("generation", "implementation", "major", "minor", "patchlevel"),  # Python's own
    }
    (owner,) = node.actor.enquiries.memory().models
    assert owner not in text


async def test_names_follow_the_conventions(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool")
    own = "".join(f"{line}\n" for line in text.splitlines() if "openrl_" in line)
    check = await asyncio.create_subprocess_exec(
        promtool, "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    said, _ = await check.communicate(own.encode())
    assert (check.returncode, said) == (0, b"")


async def test_who_may_read_it(tmp_path: Path) -> None:
    admin, key = "tml-administrator-of-this", "tml-for-prometheus-alone"
    config = replace(CONFIG, admin_key=admin, metrics=MetricsConfig(key=key))
    async with serving(tmp_path, config) as node:
        assert (await scrape(node.address))[0] == 200
        assert (await scrape(node.address, FAR))[0] == 401
        assert (await scrape(node.address, {**FAR, "X-API-Key": "tml-anybody"}))[0] == 401
        assert (await scrape(node.address, {**FAR, "Authorization": f"Bearer {key}"}))[0] == 200
        for sent in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert (await scrape(node.address, sent))[0] == 401
        async with aiohttp.ClientSession() as session:  # it opens nothing else
            statistics = f"{node.address}/api/v1/openrl/live"
            assert (await session.get(statistics, headers={**FAR})).status == 401


async def test_everyone_may_when_configured(tmp_path: Path) -> None:
    config = replace(CONFIG, metrics=MetricsConfig(access="everyone"))
    async with serving(tmp_path, config) as node:
        assert (await scrape(node.address, FAR))[0] == 200


async def test_the_journal_says_how_far_the_disk_is_behind(text: str, node: Node) -> None:
    class Behind(NullJournal):
        def statistics(self) -> JournalStatistics:
            return JournalStatistics(unflushed_bytes=512, appended=3, trouble="disk full")

    assert value(text, "openrl_journal_trouble") == 0
    services = replace(node.services, journal=Behind())
    found = {family.name: family for family in NodeCollector(services).collect()}
    assert found["openrl_journal_unflushed_bytes"].samples[0].value == 512
    assert found["openrl_journal_records"].samples[0].value == 3
    assert found["openrl_journal_trouble"].samples[0].value == 1
