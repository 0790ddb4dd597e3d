"""What other owners may read: what is published, copied, or shown with a token."""

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyrage
import pytest
from support.node import MODEL

from openrl.checkpoints import CheckpointStore
from openrl.server import Node

from .conftest import KEY, Http

DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64"},
        "weights": {"data": [1, 1, 1], "dtype": "float32"},
    },
}


class Trained:
    """A model of Alice's after a step, so that its weights are not a fresh adapter's."""

    def __init__(self, http: Http, model_id: str) -> None:
        self.http, self.model_id, self._seq = http, model_id, 0

    async def do(self, route: str, **body: Any) -> Any:
        self._seq += 1
        return await self.http.done(route, {"model_id": self.model_id, "seq_id": self._seq} | body)

    async def train(self) -> None:
        given = {"data": [DATUM], "loss_fn": "cross_entropy"}
        await self.do("forward_backward", forward_backward_input=given)
        await self.do("optim_step", adam_params={"learning_rate": 0.5})


async def trained(http: Http) -> Trained:
    model = Trained(http, await http.new_model())
    await model.train()
    return model


async def sampled(http: Http, path: str) -> list[int]:
    params = {"max_tokens": 6, "temperature": 0, "stop": []}
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": params}
    result = await http.done("asample", body | {"model_path": path})
    tokens: list[int] = result["sequences"][0]["tokens"]
    return tokens


def route_of(path: str, rest: str = "") -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}{rest}"


async def loaded(http: Http, path: str, **more: Any) -> tuple[int, Any]:
    session = await http.new_session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    return await http.post("load_weights", body | more)


async def test_a_published_checkpoint_can_be_read_and_no_more(http: Http) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="shared"))["path"]
    private = (await model.do("save_weights", path="private"))["path"]
    bob = http.as_other()
    for _ in range(2):
        assert (await http.ask("POST", route_of(path, "/publish")))[0] == 200

    assert await sampled(bob, path) == await sampled(http, path)
    status, promise = await loaded(bob, path)
    assert status == 200
    assert "error" not in await bob.result(promise)
    assert (await bob.good("weights_info", {"tinker_path": path}))["base_model"] == MODEL
    assert (await bob.ask("GET", route_of(path, "/archive")))[0] == 200
    status, listed = await bob.ask("GET", f"training_runs/{model.model_id}/checkpoints")
    assert [each["tinker_path"] for each in listed["checkpoints"]] == [path]
    run = f"training_runs/{model.model_id}"
    assert (await bob.ask("GET", run))[0] == 404
    status, answer = await bob.ask("GET", f"{run}?access_scope=accessible")
    assert answer["last_checkpoint"]["tinker_path"] == path
    _, mine = await bob.ask("GET", "training_runs?access_scope=owned")
    _, seen = await bob.ask("GET", "training_runs?access_scope=accessible")
    assert seen["cursor"]["total_count"] == mine["cursor"]["total_count"] + 1

    for method, rest in (("DELETE", ""), ("DELETE", "/publish"), ("POST", "/publish")):
        assert (await bob.ask(method, route_of(path, rest)))[0] == 404
    assert (await bob.ask("PUT", route_of(path, "/ttl"), {"ttl_seconds": None}))[0] == 404
    assert (await loaded(bob, private))[0] == 404

    for _ in range(2):
        assert (await http.ask("DELETE", route_of(path, "/publish")))[0] == 200
    assert (await loaded(bob, path))[0] == 404
    assert (await bob.ask("GET", f"{run}/checkpoints"))[0] == 404


async def test_a_token_opens_what_its_holder_may_read(http: Http) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="mine"))["path"]
    bob = http.as_other()
    assert (await loaded(bob, path))[0] == 404
    status, promise = await loaded(bob, path, weights_access_token=KEY)
    assert status == 200
    assert (await bob.result(promise))["path"] == path
    await bob.new_model()
    assert (await loaded(bob, path, weights_access_token="tml-third"))[0] == 404


async def test_a_copy_is_its_owners_and_outlives_its_source(http: Http) -> None:
    model = await trained(http)
    path = (await model.do("save_weights_for_sampler", path="source"))["path"]
    before = await sampled(http, path)
    bob = http.as_other()
    body = {"source_path": path, "destination_project_id": "theirs", "ttl_seconds": 3600}
    assert (await bob.post("copy_weights", body))[0] == 404
    headers = {"X-Tinker-Weights-Access-Token": KEY, "X-Idempotency-Key": "once"}
    status, answer = await bob.post("copy_weights", body, **headers)
    assert status == 200
    copy = answer["tinker_path"]
    assert (await bob.post("copy_weights", body, **headers))[1] == answer
    _, run = await bob.ask("GET", "training_runs?project_id=theirs")
    assert run["training_runs"][0]["last_sampler_checkpoint"]["tinker_path"] == copy
    assert run["training_runs"][0]["last_sampler_checkpoint"]["expires_at"] is not None
    assert (await http.ask("DELETE", route_of(path)))[0] == 200
    assert await sampled(bob, copy) == before
    assert (await http.post("weights_info", {"tinker_path": copy}))[0] == 404
    copied = Trained(bob, copy.removeprefix("tinker://").split("/")[0])
    assert "is a copy" in (await copied.do("optim_step"))["error"]


async def test_a_copy_into_a_place_of_a_session(http: Http) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="source"))["path"]
    session = await http.new_session()
    place = {"source_path": path, "session_id": session, "model_seq_id": 4}
    answer = await http.good("copy_weights", place)
    assert answer["tinker_path"] == f"tinker://{session}:train:4/weights/source"
    assert await http.good("copy_weights", place) == answer
    taken = {"source_path": path, "session_id": session, "model_seq_id": 5}
    await http.new_model(session, 5)
    assert (await http.post("copy_weights", taken))[0] == 400
    for incomplete in ({}, {"session_id": session}, {"model_seq_id": 1}):
        assert (await http.post("copy_weights", {"source_path": path} | incomplete))[0] == 400


# --- files ------------------------------------------------------------------------------------


async def fetched(http: Http, url: str, method: str = "GET") -> tuple[int, bytes, Any]:
    """Without a key."""
    async with http.session.request(method, url) as response:
        return response.status, await response.read(), response.headers


def on_disk(node: Node, path: str) -> dict[str, bytes]:
    store: CheckpointStore = node.services.checkpoints
    row = node.services.catalogue.find_checkpoint(path)
    assert row is not None
    return {file.name: file.read_bytes() for file in store.files(row.path, row.created_at)}


async def test_an_archive_holds_the_adapter(http: Http, node: Node) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="whole"))["path"]
    status, answer = await http.ask("GET", route_of(path, "/archive"))
    assert status == 200
    status, body, headers = await fetched(http, answer["url"])
    assert status == 200
    with tarfile.open(fileobj=BytesIO(body)) as tar:
        found = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        read = {name: file.read() for name, file in found.items() if file is not None}
    files = on_disk(node, path)
    files.pop("optimizer.safetensors")
    assert read == files | {"checkpoint_complete": b""}
    status, body, head = await fetched(http, answer["url"], "HEAD")
    assert (status, body) == (200, b"")
    assert head["Content-Length"] == headers["Content-Length"]

    url = f"{http.url}/api/v1/{route_of(path, '/archive')}"
    asked = http.headers | {"Accept": "application/gzip"}
    async with http.session.get(url, headers=asked, allow_redirects=False) as response:
        assert response.status == 302
        assert response.headers["Expires"].endswith("GMT")
        status, body, _ = await fetched(http, response.headers["Location"])
        with tarfile.open(fileobj=BytesIO(body)) as tar:
            assert "adapter_config.json" in tar.getnames()

    assert (await http.ask("DELETE", route_of(path)))[0] == 200
    assert (await fetched(http, answer["url"]))[0] == 404


async def test_a_link_never_opens_what_took_the_name_later(http: Http) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="a"))["path"]
    _, answer = await http.ask("GET", route_of(path, "/archive"))
    assert (await fetched(http, answer["url"]))[0] == 200
    await model.do("save_weights", path="a", overwrite=True)
    assert (await fetched(http, answer["url"]))[0] == 404


@pytest.mark.parametrize("change", ["", "x", "cut"])
async def test_a_link_that_is_not_ours(http: Http, change: str) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="a"))["path"]
    _, answer = await http.ask("GET", route_of(path, "/archive"))
    start, _, token = answer["url"].rpartition("/")
    token = {"": "e30.e30.e30", "x": f"{token}x", "cut": token[:-9]}[change]
    status, body, _ = await fetched(http, f"{start}/{token}")
    assert status == 403
    assert b"link" in body


async def test_weights_for_elsewhere(http: Http, node: Node, tmp_path: Path) -> None:
    model = await trained(http)
    plain = await model.do("save_weights_external", path="plain")
    identity = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public())]
    secret = await model.do(
        "save_weights_external", path="secret", age_encryption_recipients=recipients
    )
    assert plain["size_bytes"] == sum(map(len, on_disk(node, plain["path"]).values()))

    _, answer = await http.ask("GET", route_of(plain["path"], "/external_weights_urls"))
    files = {name: (await fetched(http, url))[1] for name, url in answer["urls"].items()}
    assert files == on_disk(node, plain["path"])
    assert "optimizer.safetensors" not in files

    _, answer = await http.ask("GET", route_of(secret["path"], "/external_weights_urls"))
    opened = {
        name.removesuffix(".age"): pyrage.decrypt((await fetched(http, url))[1], [identity])
        for name, url in answer["urls"].items()
    }
    assert opened == files
    assert all(name.endswith(".age") for name in answer["urls"])

    refused = await model.do(
        "save_weights_external", path="bad", age_encryption_recipients=["age1nonsense"]
    )
    assert "age_encryption_recipients[0]" in refused["error"]
    assert (await loaded(http, plain["path"]))[0] == 400
    for version, count in (("0.27.2", 0), ("0.28.0", 2)):
        header = {"X-Stainless-Package-Version": version}
        for route in (f"training_runs/{model.model_id}/checkpoints", "checkpoints"):
            _, listed = await http.ask("GET", route, headers=header)
            kinds = [each["checkpoint_type"] for each in listed["checkpoints"]]
            assert kinds.count("external") == count


async def test_a_named_checkpoint_is_there_once(http: Http) -> None:
    model = await trained(http)
    await model.do("save_weights_external", path="a")
    assert "exists already" in (await model.do("save_weights_external", path="a"))["error"]


# --- samplers that follow ----------------------------------------------------------------------


async def test_an_inflight_sampler_follows_and_a_snapshot_does_not(http: Http) -> None:
    model = await trained(http)
    ids = {}
    for number, kind in enumerate(("inflight", "snapshot")):
        saved = await model.do(
            "save_weights_for_sampler", kind=kind, sampling_session_seq_id=number
        )
        ids[kind] = saved["sampling_session_id"]

    async def first(sampler: str, seq: int) -> float:
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 1},
            "prompt_logprobs": True,
        }
        logprob: float = (await http.done("asample", body))["prompt_logprobs"][1]
        return logprob

    before = {kind: await first(sampler, 0) for kind, sampler in ids.items()}
    await model.train()
    assert {kind: await first(sampler, 1) for kind, sampler in ids.items()} == before
    newer = await model.do("save_weights_for_sampler", kind="inflight", sampling_session_seq_id=2)
    after = {kind: await first(sampler, 2) for kind, sampler in ids.items()}
    assert after["snapshot"] == before["snapshot"]
    assert after["inflight"] == await first(newer["sampling_session_id"], 0) != before["inflight"]
