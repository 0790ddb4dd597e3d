"""The dashboard in a browser: it renders, follows what runs, and shows nobody what is another's."""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from support.browser import Look, looking
from support.node import CONFIG, MODEL, serving

from openrl.api.dashboard import assets
from openrl.config import AuthConfig
from openrl.engines.base import TrainPass
from openrl.engines.fake import FakeEngine
from openrl.server import Node

from .conftest import Http
from .test_polls import Gate, forward_backward

ALICE, BOB = "tml-alice-has-a-long-key", "tml-bob-has-a-long-key-too"
ADMIN = "tml-administrator-of-this"


async def job(http: Http, name: str) -> str:
    """A model in a session of that name, after one forward_backward."""
    session = await http.good("create_session", {"sdk_version": "0", "tags": [name]})
    model_id = await http.new_model(session["session_id"])
    await http.done("forward_backward", forward_backward(model_id, 1))
    return model_id


@pytest.fixture
async def look(node: Node) -> AsyncIterator[Look]:
    async with looking(node.address) as look:
        yield look
        assert look.complaints == []
        assert look.strangers == []


async def test_it_renders_and_follows_what_runs(http: Http, look: Look) -> None:
    model_id = await job(http, "poetry")
    await job(http.as_other(), "arithmetic")
    await look.open()
    await look.until_jobs("poetry", "arithmetic")  # of two owners: this machine sees all
    await look.sees("#viewer", "this machine")
    await look.until("document.querySelector('canvas').dataset.passes === '4'")
    await http.done("forward_backward", forward_backward(model_id, 2))
    await look.until("document.querySelector('canvas').dataset.passes === '5'")
    await http.good(f"openrl/models/{model_id}/metrics", {"metrics": {"reward": 0.625}})
    await look.until("document.querySelector('#jobs').textContent.includes('0.625 reward')")
    await look.page.locator("tr.job button", has_text="poetry").click()
    await look.until("document.querySelectorAll('#detail .chart').length >= 3")
    assert "loss:sum" in await look.page.locator("#detail .charts").text_content()
    assert "queued" in await look.page.locator("#detail .story").text_content()
    await look.page.keyboard.press("Escape")
    assert not await look.page.locator("#detail").is_visible()


async def test_it_filters_by_job_and_by_kind_of_pass(http: Http, look: Look) -> None:
    poetry = await job(http, "poetry")
    await job(http, "arithmetic")
    await look.open()
    await look.until_jobs("poetry", "arithmetic")
    await look.page.keyboard.press("/")
    await look.page.keyboard.type("poe")
    await look.until_jobs("poetry")
    tracks = "document.querySelector('canvas').dataset.tracks"
    await look.until(f"{tracks} === '{poetry.split(':')[0]}'")
    await look.page.keyboard.press("Escape")
    await look.until_jobs("poetry", "arithmetic")
    assert await look.passes() == 4  # two models made, two trained
    await look.page.locator("#kinds button", has_text="train").click()
    await look.until("document.querySelector('canvas').dataset.passes === '2'")


async def test_keys_do_what_they_say(http: Http, look: Look) -> None:
    await job(http, "poetry")
    await look.open()
    await look.until_jobs("poetry")
    background = "getComputedStyle(document.body).backgroundColor"
    light = await look.page.evaluate(background)
    await look.page.keyboard.press("t")
    assert await look.page.evaluate(background) != light
    await look.page.keyboard.press("?")
    await look.sees("#keys h2", "Keys")
    await look.page.keyboard.press("Escape")
    await look.page.keyboard.press("j")
    await look.page.keyboard.press("Enter")
    await look.sees("#detail h2", "poetry")
    await look.page.keyboard.press("Escape")
    await look.page.keyboard.press("ArrowLeft")
    await look.until("document.querySelector('canvas').dataset.follow === 'false'")
    await look.page.keyboard.press("l")
    await look.until("document.querySelector('canvas').dataset.follow === 'true'")


async def test_it_says_why_a_job_waits_and_can_hold_it(tmp_path: Path) -> None:
    gate = Gate(TrainPass)
    engine = FakeEngine([MODEL], before=gate)
    async with (
        serving(tmp_path, CONFIG, engine) as node,
        aiohttp.ClientSession() as session,
        looking(node.address) as look,
    ):
        http = Http(node.address, session)
        try:
            session_id = (await http.good("create_session", {"tags": ["held"]}))["session_id"]
            model_id = await http.new_model(session_id)
            await look.open()
            await look.page.locator("tr.job button", has_text="held").click()
            await look.page.locator("#detail button", has_text="Pause").click()
            await look.sees(".toast", "Paused")
            promise = await http.good("forward_backward", forward_backward(model_id, 1))
            await look.until("document.querySelector('td.why').textContent.endsWith('paused')")
            await look.page.locator("#detail button", has_text="Resume").click()
            await look.until("document.querySelector('td.why').textContent === 'running'")
            behind = await http.good("optim_step", {"model_id": model_id, "seq_id": 2})
            await look.until("document.querySelector('#detail').textContent.includes('2 × ')")
        finally:
            gate.open()
        await http.result(promise)
        await http.result(behind)
        assert look.complaints == []


async def test_it_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    """The numbers of passes begin anew with a server's life, and so does the page; jobs that the
    server goes on with are there again."""
    boot = "document.getElementById('main').dataset.boot"
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with serving(tmp_path) as node:
            look = await stack.enter_async_context(looking(node.address))
            await job(Http(node.address, session), "before")
            await look.open()
            await look.until_jobs("before")
            earlier = await look.page.evaluate(boot)
        await look.sees("#status", "reconnecting")
        port = int(node.address.rpartition(":")[2])
        async with serving(tmp_path, replace(CONFIG, port=port)) as node:
            await look.sees("#status", "live")
            assert await look.page.evaluate(boot) != earlier
            await job(Http(node.address, session), "after")
            await look.until("document.querySelector('#jobs').textContent.includes('after')")
            ran = sum(node.actor.enquiries.statistics().passes.values())
            await look.until(f"document.querySelector('canvas').dataset.passes === '{ran}'")
        refused = "ERR_CONNECTION_REFUSED"  # the browser's own line, for each try in between
        assert [each for each in look.complaints if refused not in each] == []


async def test_an_owner_sees_its_own_by_name_and_others_as_shares(tmp_path: Path) -> None:
    keys = AuthConfig(mode="keys", keys={"alice": ALICE, "bob": BOB})
    config = replace(CONFIG, admin_key=ADMIN, auth=keys)
    async with (
        serving(tmp_path, config) as node,
        aiohttp.ClientSession() as session,
        looking(node.address) as look,
    ):
        http = Http(node.address, session, {"X-API-Key": ALICE})
        mine = await job(http, "poetry")
        theirs = await job(http.as_other(BOB), "secrets")
        await look.page.goto(f"{node.address}/dashboard")
        await look.sees("#login h2", "Your key")
        await enter(look, "tml-nobody-has-this-key-at-all")
        await look.sees("#login-error", "not known here")
        await enter(look, ALICE)
        await look.sees("#viewer", "owner alice")
        await look.until("document.querySelectorAll('tr.job').length === 2")
        text = await look.page.locator("body").text_content()
        assert "poetry" in text
        assert re.search(r"other-[0-9a-f]{6}", text)
        heard = await live(session, node.address, ALICE)
        assert mine in heard
        assert not {word for word in ("secrets", "bob", theirs.split(":")[0]) if word in heard}
        await look.page.reload()  # the key is this tab's
        await look.sees("#viewer", "owner alice")
        assert await look.page.evaluate("Object.values(localStorage).join()") == ""
        await look.page.locator("#leave").click()
        await enter(look, ADMIN)
        await look.sees("#viewer", "administrator")
        await look.until_jobs("poetry", "secrets")
        assert [each for each in look.complaints if "401" not in each] == []


async def enter(look: Look, key: str) -> None:
    await look.page.locator("#key").fill(key)
    await look.page.locator("#login button").click()


async def live(session: aiohttp.ClientSession, url: str, key: str) -> str:
    """The first turn of the stream."""
    async with session.get(f"{url}/api/v1/openrl/live", headers={"X-API-Key": key}) as response:
        return (await response.content.readuntil(b"event: clock")).decode()


async def test_checkpoints_are_published_kept_for_a_time_and_deleted(
    http: Http, node: Node, look: Look
) -> None:
    model_id = await job(http, "poetry")
    path = (await http.done("save_weights", {"model_id": model_id, "path": "one", "seq_id": 2}))[
        "path"
    ]
    catalogue = node.services.catalogue
    await look.open()
    row = look.page.locator(f'tr[data-path="{path}"]')
    await row.locator("button", has_text="Publish").click()
    await row.locator(".pill", has_text="public").wait_for()
    assert catalogue.find_checkpoint(path).public
    await row.locator("select").select_option(label="7 days")
    await look.until(
        f"!document.querySelector('tr[data-path=\"{path}\"]').innerText.includes('never')"
    )
    assert catalogue.find_checkpoint(path).expires_at is not None
    async with look.page.expect_download() as download:
        await row.locator("button", has_text="Download").click()
    assert (await download.value).suggested_filename == "one.tar"
    await row.locator("button", has_text="Delete").click()
    await look.page.locator("#ask button", has_text="Keep it").click()
    assert catalogue.find_checkpoint(path) is not None
    await row.locator("button", has_text="Delete").click()
    await look.page.locator("#ask button.danger").click()
    await row.wait_for(state="detached")
    assert catalogue.find_checkpoint(path) is None


async def test_it_fits_a_phone_in_the_dark(http: Http, node: Node) -> None:
    await job(http, "poetry")
    size = {"width": 360, "height": 740}
    async with looking(node.address, viewport=size, color_scheme="dark") as look:
        await look.open()
        await look.until_jobs("poetry")
        assert await look.page.evaluate("document.documentElement.scrollWidth") == 360
        colour = await look.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert max(int(part) for part in re.findall(r"\d+", colour)) < 64
        assert look.complaints == []


# --- what needs no browser --------------------------------------------------------------------


async def test_the_page_may_load_nothing_from_elsewhere(node: Node) -> None:
    async with aiohttp.ClientSession() as session:
        for name in ("", *assets()):
            async with session.get(f"{node.address}/dashboard/{name}") as response:
                assert response.status == 200
                policy = response.headers["Content-Security-Policy"]
                etag = response.headers["ETag"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            again = {"If-None-Match": etag}
            async with session.get(f"{node.address}/dashboard/{name}", headers=again) as response:
                assert response.status == 304
        async with session.get(f"{node.address}/dashboard/nothing.js") as response:
            assert response.status == 404


def test_no_file_names_another_place_or_holds_a_script_in_the_page() -> None:
    for name, body in assets().items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn", text), name
    page = assets()["index.html"].decode()
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert not re.search(r"\son\w+=|style=", page)
