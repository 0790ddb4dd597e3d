"""Any body on any route is refused, or accepted and answered: never a 5xx, never silence.

Bodies are the right ones with something wrong put in somewhere, or not even that, in each encoding.
What was found once stands in `CORPUS`.
"""

import http.client
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.node import CONFIG, serving_in_a_thread

from openrl.api import wire_pb2
from openrl.api.app import GROUPS
from openrl.config import Limits, SchedulerConfig
from openrl.demo import NAME, model_directory
from openrl.engines.fake import FakeEngine
from openrl.model_sources import ModelSource

ADMIN = "tml-administrator-of-this"
JSON, MSGPACK, PROTO = "application/json", "application/msgpack", "application/x-protobuf"
STREAMS = {"/api/v1/openrl/live"}  # ends with the server


@dataclass
class Target:
    """A server, and what Alice has there."""

    host: str
    session: str
    model: str
    sampler: str

    def ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, timeout=20)
        try:
            connection.request(method, path, body, {"X-API-Key": ADMIN} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def good(self, route: str, body: Any) -> Any:
        status, answer = self.ask("POST", f"/api/v1/{route}", json.dumps(body).encode(), {})
        assert status == 200, answer
        return json.loads(answer)

    def result(self, request_id: str) -> None:
        for _ in range(20):
            body = json.dumps({"request_id": request_id}).encode()
            status, answer = self.ask("POST", "/api/v1/retrieve_future", body, {})
            if status != 408:
                assert status in (200, 410), answer
                return
        raise AssertionError(f"{request_id} was never answered")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    config = replace(
        CONFIG,
        models=(ModelSource(NAME, model_directory()),),
        admin_key=ADMIN,
        issue_jwts=True,
        scheduler=SchedulerConfig(gap_seconds=0.01),
        limits=Limits(body_bytes=1 << 20, num_samples=8),
    )
    engine = FakeEngine([NAME], vocab_size=4096, context_length=64)
    with serving_in_a_thread(tmp_path_factory.mktemp("fuzz"), config, engine) as address:
        made = Target(address.removeprefix("http://"), "", "", "")
        made.session = made.good("create_session", {})["session_id"]
        model = {"session_id": made.session, "model_seq_id": 0, "base_model": NAME}
        promise = made.good("create_model", model | {"lora_config": {"rank": 4}})
        made.result(promise["request_id"])
        made.model = promise["model_id"]
        place = {"session_id": made.session, "sampling_session_seq_id": 0, "base_model": NAME}
        made.sampler = made.good("create_sampling_session", place)["sampling_session_id"]
        yield made


ROUTES = sorted({(r.method, r.path) for make in GROUPS for r in make(None).routes()})  # type: ignore[arg-type]
_numbers = itertools.count(1)


def right(target: Target, path: str) -> dict[str, Any]:
    """A body that the route takes, or one that is near it."""
    tensor = {"data": [1], "dtype": "int64", "shape": [1]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": tensor | {"dtype": "float32"}},
    }
    data = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}}
    text = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    model = {"model_id": target.model, "seq_id": next(_numbers)}
    session = {"session_id": target.session}
    sampled = {
        "prompt": datum["model_input"],
        "sampling_params": {"max_tokens": 2, "stop": [3], "seed": 1, "temperature": 1.0},
        "num_samples": 1,
        "sampling_session_id": target.sampler,
        "seq_id": next(_numbers),
        "prompt_logprobs": True,
        "target_prompt_logprobs": tensor,
    }
    whole = {
        "/api/v1/asample": sampled,
        "/api/v1/forward_backward": model | {"forward_backward_input": data},
        "/api/v1/forward": model | {"forward_input": data},
        "/api/v1/optim_step": model | {"adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
        "/api/v1/create_model": session
        | {"model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 2, "seed": 1}},
        "/api/v1/create_sampling_session": session
        | {"sampling_session_seq_id": 1, "base_model": NAME, "model_path": None},
        "/api/v1/retrieve_futures": {
            "target": {"sampling_session_id": target.sampler, "cloned_sampler_id": 0},
            "timeout": 0,
            "prev_cursor": 0,
            "retrieved_request_ids": [f"{target.sampler}:0"],
        },
        "/oai/api/v1/completions": {"model": NAME, "prompt": "a", "max_tokens": 2, "logprobs": 1},
        "/oai/api/v1/chat/completions": {"model": NAME, "logprobs": True} | text,
        "/anthropic/api/v1/messages": {"model": NAME} | text,
        "/anthropic/api/v1/messages/count_tokens": {"model": NAME, "messages": text["messages"]},
        "/api/v1/sessions/search": {"owner": {"type": "own"}, "limit": 1, "user_metadata": {}},
        "/api/v1/copy_weights": {
            "source_path": f"tinker://{target.model}/weights/a",
            "destination_project_id": "p",
        },
        "/api/v1/unload_model": {"model_id": f"{target.session}:train:7", "seq_id": 1},
    }
    if path in whole:
        return whole[path]
    return model | {
        "path": "a",
        "tinker_path": f"tinker://{target.model}/weights/a",
        "sampling_session_id": target.sampler,
        "request_id": f"{target.model}:0",
        "session_id": f"{target.session}x",  # or it would be finished
        "project_id": "p",
        "ttl_seconds": 3600,
        "user_metadata": {"a": "b"},
        "optimizer": False,
        "metrics": {"reward": 1.0},
        "weight": 2.0,
        "reason": {"type": "failed"},
        "age_encryption_recipients": [],
        "tags": ["a"],
    }


NASTY = [
    *(None, True, "", "\x00", "\ud800", "é" * 300, "a/../b", "tinker://a/weights/b", [], {}),
    *(
        -1,
        0,
        1,
        2**31,
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        10**30,
        -(2**63),
        1e308,
        1e400,
        float("nan"),
    ),
    *([[[[]]]], {"a": {"b": [None]}}, [1, "a", None], [2**63], "9" * 400, 0.5, "sk", b"\x00\xff"),
]
nasty = st.sampled_from(NASTY) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(value, dict):
        found += [place for key in value for place in places(value[key], (*at, key))]
    elif isinstance(value, list):
        found += [place for i, each in enumerate(value) for place in places(each, (*at, i))]
    return found


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(copy[at[0]], at[1:], new)
    return copy


def in_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda _: "b").encode("utf-8", "replace")


def in_msgpack(value: Any) -> bytes:
    try:
        return msgpack.packb(value, unicode_errors="surrogatepass")
    except (OverflowError, ValueError):
        return b"\xc1"


def in_protobuf(draw: st.DrawFn, target: Target) -> bytes:
    """A message in which something is off, or bytes that are nearly one."""
    message = wire_pb2.ForwardBackwardRequest()
    message.model_id, message.seq_id, message.loss_fn = target.model, next(_numbers), "ppo"
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = draw(st.binary(max_size=12))
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = draw(st.integers(0, 6))
    tensor.shape.extend(draw(st.lists(st.integers(-1, 2**40), max_size=3)))
    if draw(st.booleans()):
        tensor.dense = draw(st.binary(max_size=17))
    else:
        tensor.sparse_csr.values = draw(st.binary(max_size=16))
        tensor.sparse_csr.crow_indices = draw(st.binary(max_size=24))
        tensor.sparse_csr.col_indices = draw(st.binary(max_size=16))
    raw = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@st.composite
def attempts(draw: st.DrawFn, target: Target) -> tuple[str, str, bytes | None, dict[str, str]]:
    method, template = draw(st.sampled_from([r for r in ROUTES if r[1] not in STREAMS]))
    path = address(template, target, draw)
    if method == "GET":
        return method, path, None, {}
    form = draw(st.sampled_from(["json", "json", "json", "msgpack", "protobuf", "bytes"]))
    if form == "protobuf":
        return method, path, in_protobuf(draw, target), {"Content-Type": PROTO}
    if form == "bytes":
        kind = draw(st.sampled_from([JSON, MSGPACK, PROTO, "", "text/plain"]))
        coding = draw(st.sampled_from(["", "gzip", "zstd", "deflate", "br", "gzip, gzip"]))
        raw = draw(st.binary(max_size=64))
        raw = zlib.compress(raw, wbits=31) if draw(st.booleans()) else raw
        return method, path, raw, {"Content-Type": kind, "Content-Encoding": coding}
    body: Any = right(target, template)
    for _ in range(draw(st.integers(0, 2))):
        body = changed(body, draw(st.sampled_from(places(body))), draw(nasty))
    if form == "json":
        return method, path, in_json(body), {"Content-Type": JSON}
    return method, path, in_msgpack(body), {"Content-Type": MSGPACK}


def address(template: str, target: Target, draw: st.DrawFn) -> str:
    names = [target.model, target.sampler, f"{target.session}x", "a", "é", "..", "%00", "x" * 3000]
    if template.endswith("/pause"):
        names = names[3:]  # what is paused is not answered
    path = template
    while "{" in path:
        start, end = path.index("{"), path.index("}") + 1
        kind = path[start:end]
        if "(?:" in kind:
            name = "main.js"
        elif "|" in kind:
            name = kind[:-1].partition(":")[2].split("|")[0]
        else:
            name = draw(st.sampled_from(names) | st.text(min_size=1, max_size=5))
        path = path[:start] + quote(name.encode("utf-8", "replace"), safe="") + path[end:]
    if draw(st.integers(0, 3)) == 0:
        key = draw(
            st.sampled_from(["limit", "offset", "day", "starting_on", "after", "project_id"])
        )
        value = draw(st.sampled_from(["-1", "1e9", "٣", "2026-02-30", "", "9" * 30, "2026-01-01"]))
        path += f"?{key}={quote(value)}&ending_before=9999-12-31T23:59:59Z"
    return path


def check(
    target: Target, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> None:
    status, answer = target.ask(method, path, body, headers)
    assert status < 500, (status, answer)
    if status == 200 and b"request_id" in answer and "msgpack" not in str(headers):
        told = json.loads(answer)
        if isinstance(told, dict) and "request_id" in told:
            target.result(told["request_id"])


@pytest.mark.parametrize("examples", [400, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_no_body_breaks_anything(target: Target, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples < 1000,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        check(target, *data.draw(attempts(target)))

    attack()
    target.good("create_session", {})  # it is still well


CORPUS: list[tuple[str, str, Any]] = [
    ("POST", "/api/v1/asample", {"seq_id": 2**63 - 1}),
    ("POST", "/api/v1/optim_step", {"seq_id": 2**63 - 1}),
    ("POST", "/api/v1/asample", {"sampling_params": {"max_tokens": 2**70}}),
    ("POST", "/api/v1/create_session", {"user_metadata": {"a": "\ud800"}}),
    ("POST", "/api/v1/create_session", {"tags": ["\ud800"]}),
    ("POST", "/api/v1/create_session", {"user_metadata": {"a": 10**30}}),
    ("POST", "/api/v1/save_weights", {"path": "a", "ttl_seconds": 10**30}),
    ("POST", "/api/v1/create_model", {"lora_config": {"rank": 10**30}}),
    ("POST", "/api/v1/create_model", {"lora_config": {"rank": 2, "seed": 10**30}}),
    ("POST", "/api/v1/create_model", {"lora_config": {"rank": 2, "seed": -1}}),
    ("POST", "/oai/api/v1/completions", {"prompt": [2**63]}),
    ("POST", "/oai/api/v1/completions", {"prompt": [-(2**40)]}),
    ("POST", "/oai/api/v1/completions", {"prompt": "\ud800"}),
    ("POST", "/oai/api/v1/completions", {"seed": 10**30}),
    ("POST", "/anthropic/api/v1/messages", {"max_tokens": 10**30}),
]


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: f"{case[1]} {str(case[2])[:40]!r}")
@pytest.mark.parametrize("encode", [in_json, in_msgpack])
def test_what_broke_something_once(target: Target, case: tuple[str, str, Any], encode: Any) -> None:
    method, path, wrong = case
    kind = JSON if encode is in_json else MSGPACK
    check(target, method, path, encode(right(target, path) | wrong), {"Content-Type": kind})


def test_depth(target: Target) -> None:
    for path in (path for method, path in ROUTES if method == "POST" and "{" not in path):
        check(target, "POST", path, b"[" * 100_000, {"Content-Type": JSON})
        check(target, "POST", path, b'{"a":' * 100_000, {"Content-Type": JSON})
        check(target, "POST", path, b"\x91" * 100_000, {"Content-Type": MSGPACK})
        check(target, "POST", path, b"\x0b" * 100_000, {"Content-Type": PROTO})
