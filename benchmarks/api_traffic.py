"""Requests as clients send them, and what they cost the server; for `benchmarks/api.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import aiohttp
import msgpack
import numpy as np

from openrl.api import wire_pb2

HEADERS = {"X-API-Key": "tml-bench", "X-Stainless-Package-Version": "0.38.0"}
TICKS = 100.0  # of /proc/PID/stat per second, on every Linux in use


class Process:
    """A child that prints one line when it is up and ends when its stdin closes."""

    def __init__(self, *command: str) -> None:
        self._child = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        assert self._child.stdout is not None
        self.first_line = self._child.stdout.readline().strip()
        assert self.first_line, f"{command} did not start"

    def cpu_seconds(self) -> float:
        """User and system time of the process and its descendants."""
        return sum(_cpu(pid) for pid in _family(self._child.pid))

    def close(self) -> str:
        """Returns what it said in the end."""
        return self._child.communicate(timeout=60)[0].strip()


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


# --- bodies ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    datums: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.datums}x{self.tokens}"

    def arrays(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(0)
        return [
            (
                rng.integers(2, 700, self.tokens, dtype=np.int32),
                rng.integers(2, 700, self.tokens, dtype=np.int64),
                rng.random(self.tokens, dtype=np.float32),
            )
            for _ in range(self.datums)
        ]


ENCODINGS = {
    "json": ("application/json", "application/json"),
    "protobuf": ("application/x-protobuf", "application/x-protobuf"),
    "msgpack": ("application/msgpack", "application/msgpack"),
}
"""What a forward_backward is sent as, and what its result is asked for as."""


def forward_backward(encoding: str, shape: Shape, model_id: str, seq_id: int) -> bytes:
    match encoding:
        case "protobuf":
            return _protobuf(shape, model_id, seq_id)
        case "msgpack":
            return bytes(msgpack.packb(_plain(shape, model_id, seq_id, binary=True)))
        case _:
            return _json(_plain(shape, model_id, seq_id, binary=False))


def _plain(shape: Shape, model_id: str, seq_id: int, binary: bool) -> dict[str, Any]:
    def numbers(array: np.ndarray) -> Any:
        return array.tobytes() if binary else array.tolist()

    def tensor(array: np.ndarray) -> dict[str, Any]:
        return {"data": numbers(array), "dtype": array.dtype.name, "shape": list(array.shape)}

    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": numbers(tokens)}]},
            "loss_fn_inputs": {"target_tokens": tensor(targets), "weights": tensor(weights)},
        }
        for tokens, targets, weights in shape.arrays()
    ]
    content = {"data": data, "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": content}


def _protobuf(shape: Shape, model_id: str, seq_id: int) -> bytes:
    message = wire_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy"
    )
    for tokens, targets, weights in shape.arrays():
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, array, dtype in (
            ("target_tokens", targets, wire_pb2.DTYPE_INT64),
            ("weights", weights, wire_pb2.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), dtype
            tensor.shape.append(len(array))
    return bytes(message.SerializeToString())


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value, separators=(",", ":")).encode()


# --- clients --------------------------------------------------------------------------------


@dataclass
class Api:
    """`patch` rewrites a prepared body's seq_id; an echo takes every body as it is."""

    url: str
    http: aiohttp.ClientSession

    async def post(
        self, route: str, body: bytes, content_type: str, accept: str = "application/json"
    ) -> tuple[int, bytes]:
        headers = HEADERS | {"Content-Type": content_type, "Accept": accept}
        url = f"{self.url}/api/v1/{route}"
        async with self.http.post(url, data=body, headers=headers) as response:
            return response.status, await response.read()

    async def ask(self, route: str, value: Any) -> Any:
        import json

        while True:
            status, body = await self.post(route, _json(value), "application/json")
            if status != 408:
                assert status == 200, body
                return json.loads(body)

    async def session(self) -> str:
        return str((await self.ask("create_session", {"sdk_version": "0.38.0"}))["session_id"])

    async def model(self, session: str, number: int, base: str) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": base}
        promise = await self.ask("create_model", body | {"lora_config": {"rank": 8}})
        return str((await self.ask("retrieve_future", promise))["model_id"])


@asynccontextmanager
async def api(url: str) -> Any:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield Api(url, http)


class Trainer:
    """One loop of forward_backward and optim_step sent together, then both polls: four requests
    a turn. `echo` sends the very same bytes without understanding the answers."""

    def __init__(self, server: Api, model_id: str, encoding: str, shape: Shape) -> None:
        self._server = server
        self._model_id = model_id
        self._encoding = encoding
        self._content, self._accept = ENCODINGS[encoding]
        self._seqs = count(1)
        self._shape = shape

    def bodies(self, turns: int) -> list[tuple[bytes, bytes, bytes, bytes]]:
        """Encoded before the clock starts."""
        return [self._bodies() for _ in range(turns)]

    def _bodies(self) -> tuple[bytes, bytes, bytes, bytes]:
        first, second = next(self._seqs), next(self._seqs)
        gradient = forward_backward(self._encoding, self._shape, self._model_id, first)
        pack = msgpack.packb if self._encoding == "msgpack" else _json
        adam = {"learning_rate": 1e-4}
        step = pack({"model_id": self._model_id, "seq_id": second, "adam_params": adam})
        polls = [
            pack({"request_id": f"{self._model_id}:{seq}", "allow_metadata_only": False})
            for seq in (first, second)
        ]
        return gradient, step, polls[0], polls[1]

    async def run(self, bodies: list[tuple[bytes, bytes, bytes, bytes]], understood: bool) -> None:
        plain = "application/msgpack" if self._encoding == "msgpack" else "application/json"
        for gradient, step, first, second in bodies:
            post = self._server.post
            sent = (
                post("forward_backward", gradient, self._content, plain),
                post("optim_step", step, plain, plain),
            )
            answers = [*await asyncio.gather(*sent)]
            answers.append(await post("retrieve_future", first, plain, self._accept))
            answers.append(await post("retrieve_future", second, plain, plain))
            if understood:
                assert [status for status, _ in answers] == [200] * 4, answers
                assert b"error" not in answers[2][1][:100], answers[2][1][:200]


async def heartbeats(server: Api, body: bytes, seconds: float, every: float) -> list[float]:
    """Latencies in seconds of one heartbeat at each tick, whether the last was answered or not."""
    latencies: list[float] = []

    async def beat() -> None:
        began = time.perf_counter()
        status, answer = await server.post("session_heartbeat", body, "application/json")
        assert status == 200, answer
        latencies.append(time.perf_counter() - began)

    began, beats = time.perf_counter(), []
    for number in range(int(seconds / every)):
        await asyncio.sleep(max(0.0, began + number * every - time.perf_counter()))
        beats.append(asyncio.get_running_loop().create_task(beat()))
    await asyncio.gather(*beats)
    return latencies
