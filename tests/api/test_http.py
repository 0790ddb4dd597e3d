"""Raw HTTP: what is refused, how, and that the server is well afterwards."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import zstandard
from support.node import CONFIG, MODEL, serving

from openrl.api import wire_pb2
from openrl.config import Limits
from openrl.server import Node

from .conftest import Http

PROTOBUF = {"Content-Type": "application/x-protobuf"}
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


def floats(*values: float) -> dict[str, Any]:
    return {"data": list(values), "dtype": "float32", "shape": [len(values)]}


def ints(*values: int) -> dict[str, Any]:
    return {"data": list(values), "dtype": "int64", "shape": [len(values)]}


def datum(tokens: list[int] = [1, 2, 3], **inputs: Any) -> dict[str, Any]:  # noqa: B006
    inputs = {"target_tokens": ints(2, 3, 4), "weights": floats(0, 1, 1)} | inputs
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {name: value for name, value in inputs.items() if value is not None},
    }


def forward_backward(model_id: str, seq_id: int, *data: dict, **given: Any) -> dict[str, Any]:
    content = {"data": list(data or [datum()]), "loss_fn": "cross_entropy"} | given
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": content}


def sample(sampler: str, seq_id: int, **given: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 3},
        "num_samples": 1,
    } | given


async def new_sampler(http: Http) -> str:
    body = {"session_id": await http.new_session(), "sampling_session_seq_id": 0}
    answer = await http.good("create_sampling_session", body | {"base_model": MODEL})
    sampler: str = answer["sampling_session_id"]
    return sampler


# --- the door -------------------------------------------------------------------------------


async def test_health_needs_no_key(node: Node) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/healthz", "/readyz", "/api/v1/healthz"):
            async with session.get(node.address + path) as response:
                assert response.status == 200
                assert (await response.json())["status"] == "ok"


async def test_readiness_tells_each_models_state(http: Http) -> None:
    status, answer = await http.ask("GET", "readyz")
    assert status == 200
    assert answer["models"][MODEL]["state"] in ("loading", "ready")
    assert isinstance(answer["engine_seconds"], float)


@pytest.mark.parametrize("key", [None, "", "sk-abc", "tml-", "tml-a b"])
async def test_no_key_no_entry(http: Http, key: str | None) -> None:
    http.headers = {} if key is None else {"X-API-Key": key}
    status, answer = await http.ask("GET", "get_server_capabilities")
    assert status == 401
    assert "X-API-Key" in answer["detail"]


@pytest.mark.parametrize("headers", [{"X-API-Key": "eyJab.c"}, {"Authorization": "Bearer tml-x"}])
async def test_other_keys_that_are_fine(http: Http, headers: dict[str, str]) -> None:
    http.headers = headers
    status, answer = await http.ask("GET", "get_server_capabilities")
    assert status == 200
    assert answer["supported_models"][0]["model_name"] == MODEL


async def test_unknown_routes_and_methods_answer_json(http: Http) -> None:
    assert await http.post("no_such", {}) == (404, {"detail": "no route POST /api/v1/no_such"})
    status, answer = await http.ask("GET", "create_model")
    assert status == 405
    assert "detail" in answer


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.12.0", set()),
        ("0.20.0", {"proto_write_fwdbwd"}),
        (
            "0.24.1",
            {"proto_write_fwdbwd", "fwd_via_fwdbwd", "create_model_via_load_weights"},
        ),
        ("0.25.0", {"create_model_via_load_weights"}),
        ("0.32.0", {"create_model_via_load_weights", "sample_join_sampling_session"}),
        (
            "0.36.0",
            {
                "create_model_via_load_weights",
                "sample_join_sampling_session",
                "sample_use_retrieve_futures",
            },
        ),
        ("0.38.0", {"sample_join_sampling_session", "sample_use_retrieve_futures"}),
        ("nonsense", {"sample_join_sampling_session", "sample_use_retrieve_futures"}),
    ],
)
async def test_flags_by_version(http: Http, version: str, flags: set[str]) -> None:
    answer = await http.good("client/config", {"sdk_version": version})
    assert answer.pop("parallel_fwdbwd_chunks") is False
    assert {name for name, on in answer.items() if on} == flags


async def test_flags_by_header(http: Http) -> None:
    status, answer = await http.post(
        "client/config", {}, **{"X-Stainless-Package-Version": "0.24.1"}
    )
    assert status == 200
    assert answer["proto_write_fwdbwd"] is True


# --- bodies that cannot be read --------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"x": NaN}', b"null", b"\x00"])
async def test_malformed_json(http: Http, body: bytes) -> None:
    for route in ("forward_backward", "create_session", "asample", "retrieve_future"):
        headers = {"Content-Type": "application/json"}
        status, answer = await http.ask("POST", route, body, headers)
        assert status == 400, route
        assert "malformed json" in answer["detail"]


async def test_malformed_msgpack_is_told_in_msgpack(http: Http) -> None:
    status, headers, answer = await http.ask_with_headers("POST", "optim_step", b"\xc1", MSGPACK)
    assert status == 400
    assert headers["Content-Type"] == "application/msgpack"
    assert "malformed msgpack" in answer["detail"]


@pytest.mark.parametrize("body", [b"\xff", b"", b"garbage" * 9])
async def test_malformed_protobuf(http: Http, body: bytes) -> None:
    status, answer = await http.ask("POST", "forward_backward", body, PROTOBUF)
    assert status == 400
    assert "malformed protobuf" in answer["detail"]


async def test_protobuf_where_there_is_none(http: Http) -> None:
    status, _ = await http.ask("POST", "optim_step", b"", PROTOBUF)
    assert status == 400


async def test_a_wrong_type_names_its_field(http: Http) -> None:
    status, answer = await http.post("optim_step", {"model_id": "m", "seq_id": "one"})
    assert status == 400
    assert "$.seq_id" in answer["detail"]


async def test_bodies_over_the_limit(tmp_path: Path) -> None:
    from dataclasses import replace

    config = replace(CONFIG, limits=Limits(body_bytes=10_000))
    async with serving(tmp_path, config) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        long = json.dumps({"tags": ["x" * 20_000]}).encode()
        json_type = {"Content-Type": "application/json"}
        for body, headers in (
            (long, {}),
            (zstandard.compress(long), {"Content-Encoding": "zstd"}),
            (gzip.compress(long), {"Content-Encoding": "gzip"}),
        ):
            status, answer = await http.ask("POST", "create_session", body, headers | json_type)
            assert status == 413
            assert "detail" in answer
        async with session.post(  # no Content-Length to see it by
            f"{node.address}/api/v1/create_session", data=_in_pieces(long), headers=http.headers
        ) as response:
            assert response.status == 413
        await http.new_session()


async def _in_pieces(body: bytes):
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


@pytest.mark.parametrize(
    ("coding", "pack"), [("zstd", zstandard.compress), ("gzip", gzip.compress)]
)
async def test_compressed_bodies_are_read(http: Http, coding: str, pack: Any) -> None:
    model_id = await http.new_model()
    body = pack(json.dumps(forward_backward(model_id, 1)).encode())
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    status, promise = await http.ask("POST", "forward_backward", body, headers)
    assert status == 200
    assert "loss:sum" in (await http.result(promise))["metrics"]


async def test_text_that_is_no_text(http: Http) -> None:
    for body in (b'{"session_id": "\\ud800"}', b'{"session_id": "\xed\xa0\x80"}'):
        status, answer = await http.ask("POST", "session_heartbeat", body)
        assert 400 <= status < 500
        assert answer["detail"]
    status, answer = await http.ask("GET", "sessions/%ed%a0%80%ff")
    assert 400 <= status < 500
    status, answer = await http.ask("POST", "x", b"{}", {"Content-Encoding": "\x80"})
    assert 400 <= status < 500


async def test_a_client_that_leaves_half_way_is_no_defect(
    http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = http.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-a\r\n"
    writer.write(f"{head}Content-Length: 50\r\n\r\n{{".encode())
    await writer.drain()
    writer.write_eof()
    assert await reader.read() is not None
    writer.close()
    await http.new_session()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


# --- ids of nobody, and of somebody else ------------------------------------------------------


async def test_ids_of_nobody(http: Http) -> None:
    assert (await http.post("get_info", {"model_id": "x:train:0"}))[0] == 404
    assert (await http.post("forward_backward", forward_backward("x:train:0", 1)))[0] == 404
    assert (await http.post("optim_step", {"model_id": "nonsense", "seq_id": 1}))[0] == 404
    assert (await http.post("asample", sample("x:sample:0", 0)))[0] == 404
    assert (await http.post("session_heartbeat", {"session_id": "x"}))[0] == 404
    assert (await http.post("retrieve_future", {"request_id": "x:train:0:1"}))[0] == 410
    assert (await http.post("cancel_future", {"request_id": "x"}))[0] == 404
    assert (await http.post("weights_info", {"tinker_path": "tinker://x/weights/y"}))[0] == 404
    assert (await http.ask("GET", "samplers/x"))[0] == 404
    assert (await http.ask("GET", "sessions/x"))[0] == 404
    assert (await http.ask("GET", "training_runs/x"))[0] == 404
    assert (await http.ask("DELETE", "training_runs/x/checkpoints/weights/y"))[0] == 404
    assert (await http.ask("DELETE", "training_runs/x/checkpoints/odd/y"))[0] == 404


async def test_a_model_that_its_session_never_made(http: Http) -> None:
    session = await http.new_session()
    assert (await http.post("optim_step", {"model_id": f"{session}:train:7", "seq_id": 1}))[
        0
    ] == 404


async def test_ids_of_somebody_else_are_of_nobody(http: Http) -> None:
    model_id = await http.new_model()
    session_id = model_id.split(":train:")[0]
    path = (await http.done("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"}))[
        "path"
    ]
    promise = await http.good("optim_step", {"model_id": model_id, "seq_id": 2})
    sampler = await http.good(
        "create_sampling_session",
        {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL},
    )
    bob = http.as_other()
    for route, body in (
        ("get_info", {"model_id": model_id}),
        ("optim_step", {"model_id": model_id, "seq_id": 3}),
        ("forward_backward", forward_backward(model_id, 3)),
        ("session_heartbeat", {"session_id": session_id}),
        ("weights_info", {"tinker_path": path}),
        ("cancel_future", promise),
        ("asample", sample(sampler["sampling_session_id"], 0)),
        (
            "create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 1, "base_model": MODEL},
        ),
        (
            "create_sampling_session",
            {
                "session_id": await bob.new_session(),
                "sampling_session_seq_id": 1,
                "model_path": path,
            },
        ),
        (
            "load_weights",
            {
                "session_id": await bob.new_session(),
                "model_seq_id": 0,
                "path": path,
                "optimizer": False,
            },
        ),
    ):
        assert (await bob.post(route, body))[0] == 404, route
    assert (await bob.post("retrieve_future", {"request_id": promise["request_id"]}))[0] == 410
    assert (await bob.post(f"sessions/{session_id}/finish", {"reason": {"type": "x"}}))[0] == 404
    _, runs = await bob.ask("GET", "training_runs")
    assert runs["training_runs"] == []
    assert runs["cursor"]["total_count"] == 0
    await http.result(promise)


async def test_long_ids_are_refused_without_an_echo(http: Http) -> None:
    long = "x" * 100_000
    for route, body in (
        ("get_info", {"model_id": long}),
        ("optim_step", {"model_id": f"{long}:train:0", "seq_id": 1}),
        ("retrieve_future", {"request_id": long}),
        ("session_heartbeat", {"session_id": long}),
        ("asample", sample(long, 0)),
        ("weights_info", {"tinker_path": long}),
        ("create_model", {"session_id": long, "model_seq_id": 0, "base_model": "x"}),
    ):
        status, answer = await http.post(route, body)
        assert 400 <= status < 500, route
        assert len(answer["detail"]) < 5000, route


async def test_a_finished_session_takes_no_more_work(http: Http) -> None:
    model_id = await http.new_model()
    session_id = model_id.split(":train:")[0]
    sampler = await http.good(
        "create_sampling_session",
        {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL},
    )
    finish = {"reason": {"type": "success"}, "detail": None}
    await http.good(f"sessions/{session_id}/finish", finish)
    await http.good(f"sessions/{session_id}/finish", finish)
    for route, body in (
        ("session_heartbeat", {"session_id": session_id}),
        ("optim_step", {"model_id": model_id, "seq_id": 1}),
        ("asample", sample(sampler["sampling_session_id"], 0)),
        (
            "create_model",
            {
                "session_id": session_id,
                "model_seq_id": 1,
                "base_model": MODEL,
                "lora_config": {},
            },
        ),
    ):
        status, answer = await http.post(route, body)
        assert status == 410, route
        assert "finished (success)" in answer["detail"]


# --- bad training content: accepted, and failed by name --------------------------------------


BAD_TRAINING = [
    ({"loss_fn": "no_such"}, datum(), "no_such"),
    ({"loss_fn_config": {"odd": 1.0}}, datum(), "odd"),
    ({}, datum(target_tokens=None), "datum 0: target_tokens"),
    ({}, datum(weights=floats(1)), "datum 0: weights"),
    ({}, datum(target_tokens=ints(1, 2)), "datum 0: target_tokens"),
    ({}, datum([1, 2, 10**9]), "datum 0: model_input"),
    ({}, datum([-1, 2, 3]), "datum 0: model_input"),
    ({}, datum(target_tokens=ints(1, 2, 10**9)), "datum 0: target_tokens"),
    ({}, datum(weights=floats(0, 1e300, 1)), "datum 0: weights"),
    ({}, datum([]), "datum 0: model_input"),
    ({"data": []}, datum(), "datum"),
    (
        {"data": [datum(), datum(weights={"data": [1], "dtype": "odd"})]},
        datum(),
        "datum 1: weights",
    ),
    (
        {"data": [datum(), {"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}}]},
        datum(),
        "datum 1: model_input: image",
    ),
    (
        {},
        datum(
            weights=floats(1)
            | {"shape": [3, 1], "sparse_crow_indices": [0, 0, 0, 1], "sparse_col_indices": [5]}
        ),
        "datum 0: weights: a column index",
    ),
]


@pytest.mark.parametrize(("given", "bad", "named"), BAD_TRAINING)
async def test_bad_training_content(http: Http, given: Any, bad: Any, named: str) -> None:
    model_id = await http.new_model()
    before = await http.done("forward", forward_backward(model_id, 1))
    failed = await http.done("forward_backward", forward_backward(model_id, 2, bad, **given))
    assert failed["category"] == "user"
    assert named in failed["error"]
    step = await http.done("optim_step", {"model_id": model_id, "seq_id": 3})
    assert step["metrics"].get("skipped_no_gradients") == 1.0
    after = await http.done("forward", forward_backward(model_id, 4))
    assert after == before


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_numbers_that_are_none_in_protobuf(http: Http, value: float) -> None:
    model_id = await http.new_model()
    message = wire_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.array([1], "<i4").tobytes()
    one.loss_fn_inputs["target_tokens"].dense = np.array([1], "<i8").tobytes()
    one.loss_fn_inputs["target_tokens"].dtype = wire_pb2.DTYPE_INT64
    one.loss_fn_inputs["weights"].dense = np.array([value], "<f4").tobytes()
    one.loss_fn_inputs["weights"].dtype = wire_pb2.DTYPE_FLOAT32
    body = message.SerializeToString()
    status, promise = await http.ask("POST", "forward_backward", body, PROTOBUF)
    assert status == 200
    failed = await http.result(promise, Accept="application/x-protobuf")
    assert failed["category"] == "user"
    assert "datum 0: weights" in failed["error"]


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
        ("optim_step", {"adam_params": {"beta1": 1.5}}, "beta1"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "dimuon"),
        ("save_weights", {"path": "../escape"}, "escape"),
        ("save_weights", {"path": "a", "ttl_seconds": 1}, "ttl_seconds"),
        ("save_weights", {"path": "a", "user_metadata": {"k": "v" * 70_000}}, "user_metadata"),
        ("save_weights_for_sampler", {}, "name"),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, "tinker://x"),
        ("load_weights", {"path": "/etc/passwd", "optimizer": True}, "/etc/passwd"),
    ],
)
async def test_bad_operations_fail_and_the_next_one_runs(
    http: Http, route: str, body: dict[str, Any], named: str
) -> None:
    model_id = await http.new_model()
    failed = await http.done(route, {"model_id": model_id, "seq_id": 1} | body)
    assert failed["category"] == "user"
    assert named in failed["error"]
    good = await http.done("forward_backward", forward_backward(model_id, 2))
    assert "loss:sum" in good["metrics"]


@pytest.mark.parametrize("route", ["optim_step", "unload_model", "save_weights"])
async def test_seq_0_belongs_to_the_making_of_the_model(http: Http, route: str) -> None:
    body = {"model_id": await http.new_model(), "seq_id": 0, "path": "a"}
    status, answer = await http.post(route, body)
    assert status == 400
    assert "seq_id" in answer["detail"]


# --- bad models and samplers: refused at once --------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"base_model": "no/such"}, "no/such"),
        ({"lora_config": None}, "lora_config"),
        ({"lora_config": {"rank": 8, "dropout": 0.1}}, "dropout"),
        ({"lora_config": {"rank": 7}}, "power of 2"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"model_seq_id": -1}, "model_seq_id"),
    ],
)
async def test_models_that_cannot_be_made(http: Http, given: dict[str, Any], named: str) -> None:
    body = {
        "session_id": await http.new_session(),
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 8},
    } | given
    status, answer = await http.post("create_model", body)
    text = answer["detail"] if status != 200 else (await http.result(answer))["error"]
    assert named in text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": []}]}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [10**9]}]}}, "vocabulary"),
        ({"prompt": {"chunks": [{"type": "image", "data": "aaaa"}]}}, "image"),
        ({"sampling_params": {"max_tokens": 10**7}}, "context window"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"min_p": 0.5}}, "min_p"),
        ({"sampling_params": {"seed": 2**64}}, "seed"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**9}, "num_samples"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 129}, "topk_sample_logprobs must be from 0 to 128"),
        ({"prompt_alt_tokens_k": 129}, "prompt_alt_tokens_k must be from 0 to 128"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 99}, "prompt_logprobs_last_n must"),
        ({"target_prompt_logprobs": ints(1)}, "target_prompt_logprobs: the shape"),
        ({"target_prompt_logprobs": ints(1, 2) | {"shape": [2, 1]}}, "2 rows for a prompt of 2"),
        ({"beam_width": 4}, "beam_width"),
        ({"seq_id": None}, "seq_id"),
        ({"sampling_session_id": None}, "base_model"),
    ],
)
async def test_bad_samples_are_refused(http: Http, given: dict[str, Any], named: str) -> None:
    sampler = await new_sampler(http)
    status, answer = await http.post("asample", sample(sampler, 0) | given)
    assert status == 400
    assert named in answer["detail"]
    good = await http.done("asample", sample(sampler, 1))
    assert len(good["sequences"][0]["tokens"]) > 0


@pytest.mark.parametrize(
    ("given", "status"), [({}, 400), ({"base_model": "no/such"}, 404), ({"model_path": "x"}, 404)]
)
async def test_samplers_of_nothing(http: Http, given: dict[str, Any], status: int) -> None:
    body = {"session_id": await http.new_session(), "sampling_session_seq_id": 0} | given
    assert (await http.post("create_sampling_session", body))[0] == status


# --- the same request twice --------------------------------------------------------------------


async def test_a_repeat_is_the_same_request(http: Http) -> None:
    model_id = await http.new_model()
    body = forward_backward(model_id, 1)
    first, again = (
        await http.good("forward_backward", body),
        await http.good("forward_backward", body),
    )
    assert first == again
    assert await http.result(first) == await http.result(again)
    session = model_id.split(":train:")[0]
    assert await http.new_model(session) == model_id
    sampling = {"session_id": session, "sampling_session_seq_id": 3, "base_model": MODEL}
    assert await http.good("create_sampling_session", sampling) == await http.good(
        "create_sampling_session", sampling
    )


# --- polls ---------------------------------------------------------------------------------------


async def test_a_result_can_be_had_again_and_in_any_encoding(http: Http) -> None:
    model_id = await http.new_model()
    promise = await http.good("forward_backward", forward_backward(model_id, 1))
    plain = await http.result(promise)
    protobuf = await http.result(promise, Accept="application/x-protobuf")
    native = await http.result(promise, Accept="application/msgpack")
    listed = plain["loss_fn_outputs"][0]["logprobs"]["data"]
    message = wire_pb2.ForwardBackwardOutput.FromString(protobuf)
    assert np.frombuffer(
        message.loss_fn_outputs[0].fields["logprobs"].data, "<f4"
    ) == pytest.approx(listed)
    packed = native["loss_fn_outputs"][0]["logprobs"]
    assert np.frombuffer(packed["data"], packed["dtype"]) == pytest.approx(listed)
    assert (
        message.metrics["loss:sum"] == native["metrics"]["loss:sum"] == plain["metrics"]["loss:sum"]
    )


async def test_everything_in_msgpack(http: Http) -> None:
    """The native client's way: bin in, bin out, from the first request to the last."""

    async def ask(route: str, body: dict[str, Any]) -> Any:
        status, answer = await http.ask("POST", route, msgpack.packb(body), MSGPACK)
        assert status == 200, answer
        return answer

    async def done(route: str, body: dict[str, Any]) -> Any:
        return await ask("retrieve_future", await ask(route, body))

    def tensor(values: list, dtype: str) -> dict[str, Any]:
        array = np.array(values, dtype)
        return {"dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}

    session = (await ask("create_session", {"sdk_version": "openrl"}))["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    model_id = (await done("create_model", model | {"lora_config": {"rank": 8, "alpha": 16.0}}))[
        "model_id"
    ]
    one = {
        "model_input": {"chunks": [{"tokens": np.array([1, 2], "<i4").tobytes()}]},
        "loss_fn_inputs": {
            "target_tokens": tensor([2, 3], "int64"),
            "weights": tensor([1, 1], "float32"),
        },
    }
    output = await done("forward_backward", forward_backward(model_id, 1, one))
    json_output = await http.done(
        "forward",
        forward_backward(
            model_id,
            2,
            {
                "model_input": {"chunks": [{"tokens": [1, 2]}]},
                "loss_fn_inputs": {"target_tokens": ints(2, 3), "weights": floats(1, 1)},
            },
        ),
    )
    assert output["metrics"]["loss:sum"] == json_output["metrics"]["loss:sum"]
    assert (await done("optim_step", {"model_id": model_id, "seq_id": 3}))["version"] == 1
    saved = await done(
        "save_weights_for_sampler",
        {"model_id": model_id, "seq_id": 4, "sampling_session_seq_id": 0},
    )
    asked = sample(saved["sampling_session_id"], 0, prompt_logprobs=True, topk_prompt_logprobs=2)
    sampled = await done("asample", asked)
    tokens = sampled["sequences"][0]["tokens"]
    assert tokens["dtype"] == "int32"
    assert len(np.frombuffer(tokens["data"], "<i4")) == tokens["shape"][0]
    assert np.isnan(np.frombuffer(sampled["prompt_logprobs"]["data"], "<f4")[0])
    assert sampled["topk_prompt_logprobs"]["token_ids"]["shape"] == [2, 2]


async def test_a_large_result_tells_its_size_first(http: Http, monkeypatch: Any) -> None:
    monkeypatch.setattr("openrl.api.futures.METADATA_FIRST_BYTES", 10)
    model_id = await http.new_model()
    promise = await http.good("forward_backward", forward_backward(model_id, 1))
    await http.result(promise)
    request = {"request_id": promise["request_id"], "allow_metadata_only": True}
    accept = {"Accept": "application/x-protobuf"}
    status, first = await http.post("retrieve_future", request, **accept)
    assert status == 200
    assert first["status"] == "complete_metadata"
    body = await http.result(promise, **accept)
    assert len(body) == first["response_payload_size"]


# --- direct samples, lists -----------------------------------------------------------------------


async def test_a_sample_without_a_sampling_session(http: Http) -> None:
    direct = sample("", 0, sampling_session_id=None, base_model=MODEL)
    promises = [await http.good("asample", direct) for _ in range(2)]
    assert promises[0]["request_id"] != promises[1]["request_id"]
    for promise in promises:
        assert (await http.result(promise))["sequences"]
    model_id = await http.new_model()
    saved = await http.done(
        "save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "path": "s"}
    )
    direct = sample("", 0, sampling_session_id=None, model_path=saved["path"])
    assert (await http.done("asample", direct))["sequences"]
    assert (await http.as_other().post("asample", direct))[0] == 404


async def test_lists_of_what_was_made(http: Http) -> None:
    model_id = await http.new_model()
    session = model_id.split(":train:")[0]
    for seq, name in ((1, "a"), (2, "b")):
        await http.done("save_weights", {"model_id": model_id, "seq_id": seq, "path": name})
    _, runs = await http.ask("GET", "training_runs?limit=1")
    (run,) = runs["training_runs"]
    assert run["training_run_id"] == model_id
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/b"
    assert run["last_sampler_checkpoint"] is None
    _, page = await http.ask("GET", "checkpoints?limit=1&offset=1")
    assert [each["tinker_path"] for each in page["checkpoints"]] == [
        f"tinker://{model_id}/weights/a"
    ]
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    ttl = f"training_runs/{model_id}/checkpoints/weights/a/ttl"
    assert (await http.ask("PUT", ttl, {"ttl_seconds": 60}))[0] == 400
    assert (await http.ask("PUT", ttl, {"ttl_seconds": 7200}))[0] == 200
    _, found = await http.ask("GET", f"training_runs/{model_id}/checkpoints")
    assert {each["checkpoint_id"]: each["expires_at"] is None for each in found["checkpoints"]} == {
        "weights/a": False,
        "weights/b": True,
    }
    assert (await http.ask("DELETE", f"training_runs/{model_id}/checkpoints/weights/a"))[0] == 200
    assert (await http.ask("DELETE", f"training_runs/{model_id}/checkpoints/weights/a"))[0] == 404
    assert session in (await http.ask("GET", "sessions"))[1]["sessions"]
    assert (await http.ask("GET", f"sessions/{session}"))[1]["training_run_ids"] == [model_id]
    assert (await http.ask("GET", "sessions?limit=many"))[0] == 400
