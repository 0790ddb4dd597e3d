"""Both forms of load_weights, and who may load what."""

from typing import Any

import pytest
from support.node import MODEL

from .conftest import Http


async def saved(http: Http) -> tuple[str, str, str]:
    """A model, its checkpoint with the optimizer, and one for sampling without."""
    model_id = await http.new_model()
    full = {"model_id": model_id, "seq_id": 1, "path": "full", "user_metadata": {"k": 1}}
    sampler = {"model_id": model_id, "seq_id": 2, "path": "light"}
    return (
        model_id,
        (await http.done("save_weights", full))["path"],
        (await http.done("save_weights_for_sampler", sampler))["path"],
    )


async def test_a_model_made_from_a_checkpoint(http: Http) -> None:
    model_id, full, light = await saved(http)
    session = await http.new_session()
    for number, (path, optimizer) in enumerate([(full, True), (full, False), (light, False)]):
        body = {
            "session_id": session,
            "model_seq_id": number,
            "path": path,
            "optimizer": optimizer,
            "user_metadata": {"of": [1]},
        }
        loaded = await http.done("load_weights", body)
        assert loaded["model_id"] == f"{session}:train:{number}"
        assert (await http.good("get_info", {"model_id": loaded["model_id"]}))["lora_rank"] == 8
        _, run = await http.ask("GET", f"training_runs/{loaded['model_id']}")
        assert run["user_metadata"] == {"of": "[1]"}
        step = await http.done("optim_step", {"model_id": loaded["model_id"], "seq_id": 1})
        assert "metrics" in step
    info = await http.good("weights_info", {"tinker_path": full})
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == (MODEL, 8, True)
    _, checkpoints = await http.ask("GET", f"training_runs/{model_id}/checkpoints")
    assert {"k": "1"} in [each["user_metadata"] for each in checkpoints["checkpoints"]]


async def test_a_load_sent_behind_the_save_that_it_reads(http: Http) -> None:
    """Operations of a model run in their order: whether there is a checkpoint is told then."""
    model_id = await http.new_model()
    path = f"tinker://{model_id}/weights/w"
    await http.good("openrl/models/" + model_id + "/pause", {})
    save = {"model_id": model_id, "seq_id": 1, "path": "w"}
    load = {"model_id": model_id, "seq_id": 2, "path": path, "optimizer": True}
    other = {**load, "seq_id": 3, "path": path.replace("/w", "/never")}
    promises = [await http.good("save_weights", save)]
    promises += [await http.good("load_weights", body) for body in (load, other)]
    await http.good("openrl/models/" + model_id + "/resume", {})
    saved, loaded, missing = [await http.result(each) for each in promises]
    assert saved["path"] == loaded["path"] == path
    assert missing["category"] == "user"
    assert "/never" in missing["error"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"optimizer": True, "light": True}, "optimizer"),
        ({"base_model": "no/such"}, "no/such"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"weights_access_token": "no key"}, "weights_access_token"),
        ({"weights_access_token": "tml-somebody"}, "tinker://"),
        ({"path": "tinker://nobody:train:0/weights/x"}, "tinker://nobody"),
    ],
)
async def test_what_cannot_be_made_from(http: Http, given: dict[str, Any], named: str) -> None:
    _, full, light = await saved(http)
    path = light if given.pop("light", False) else full
    session = await http.new_session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    status, answer = await http.post("load_weights", body | given)
    assert 400 <= status < 500
    assert named in answer["detail"]
    model_id = f"{session}:train:0"
    assert (await http.post("get_info", {"model_id": model_id}))[0] == 404
    assert await http.new_model(session) == model_id  # the number is still free


@pytest.mark.parametrize(
    "address",
    [
        {},
        {"model_id": "m"},
        {"seq_id": 1},
        {"session_id": "s"},
        {"model_id": "m", "seq_id": 1, "session_id": "s", "model_seq_id": 0},
    ],
)
async def test_an_address_is_one_of_two(http: Http, address: dict[str, Any]) -> None:
    body = {"path": "tinker://m/weights/x", "optimizer": False} | address
    status, answer = await http.post("load_weights", body)
    assert status == 400
    assert "model_id and seq_id" in answer["detail"]


async def test_somebody_elses_checkpoint_fails_through_the_future(http: Http) -> None:
    _, full, _ = await saved(http)
    bob = http.as_other()
    body = {"model_id": await bob.new_model(), "seq_id": 1, "path": full, "optimizer": False}
    failed = await bob.done("load_weights", body)
    assert failed["category"] == "user"
    assert full in failed["error"]
