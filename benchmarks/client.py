"""Our client beside the `tinker` SDK, on one server over an engine without a model.

OMP_NUM_THREADS=1 python benchmarks/client.py [--rounds 3] [--calls 6] [--samples 1000]
    [--shape 64x2048] [--json FILE]

make     the client's datums from a batch of numpy arrays, as each training step has to.
train    that, and forward_backward, its result awaited before the next: bytes on the wire, CPU of
         client and server for each call.
sample   that many samples of one sequence each, all in flight at once.
zstd     what compressing that forward_backward would take and save, at 100 Mbit/s and on loopback.

Each client is a process of its own; the two take turns, so that a busy machine harms
both alike. Bytes are counted by a relay between clients and server, headers and all; its own CPU
counts for nobody. The client's CPU is that of all threads of its process, without its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from api_node import MODEL
from api_traffic import Process, Shape
from facts import RESULTS, facts

HERE = Path(__file__).parent
KEY = "tml-bench"
NEW_TOKENS = 32
PROMPT = list(range(2, 130))
CLIENTS = ("openrl", "tinker")
SLOW_LINK = 100e6 / 8  # bytes per second

Row = dict[str, Any]
Arrays = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


# --- clients, each in a process of its own ---------------------------------------------------


class Ours:
    def __init__(self, url: str) -> None:
        import openrl

        self._openrl = openrl
        self._loop = asyncio.new_event_loop()  # a Runner would print every result for itself
        self._client = openrl.connect(url, KEY)
        self._run(self._client.__aenter__())
        self._model = self._run(self._client.create_model(MODEL, rank=8))
        self._sampler = self._run(self._model.sampler())

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def data(self, arrays: Arrays) -> Any:
        return [
            self._openrl.Datum(tokens, {"target_tokens": targets, "weights": weights})
            for tokens, targets, weights in arrays
        ]

    def train(self, data: Any) -> int:
        async def one() -> Any:
            return await (await self._model.forward_backward(data))

        return len(self._run(one()).outputs)

    def sample(self, count: int) -> int:
        async def all_of_them() -> int:
            prompts = [PROMPT] * count
            return len(
                [i async for i, _ in self._sampler.sample_many(prompts, max_tokens=NEW_TOKENS)]
            )

        return int(self._run(all_of_them()))

    def close(self) -> None:
        self._run(self._client.close())


class Sdk:
    def __init__(self, url: str) -> None:
        import tinker

        self._types = tinker.types
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self._model = service.create_lora_training_client(MODEL, rank=8).result()
        self._sampler = self._model.save_weights_and_get_sampling_client().result()

    def data(self, arrays: Arrays) -> Any:
        types = self._types
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens.tolist()),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(targets),
                    "weights": types.TensorData.from_numpy(weights),
                },
            )
            for tokens, targets, weights in arrays
        ]

    def train(self, data: Any) -> int:
        return len(self._model.forward_backward(data, "cross_entropy").result().loss_fn_outputs)

    def sample(self, count: int) -> int:
        prompt = self._types.ModelInput.from_ints(PROMPT)
        params = self._types.SamplingParams(max_tokens=NEW_TOKENS)
        futures = [self._sampler.sample(prompt, 1, params) for _ in range(count)]
        return sum(len(future.result().sequences) for future in futures)

    def close(self) -> None:
        pass


def work(kind: str, url: str) -> None:
    """Does what each line on stdin says, and answers with a line."""
    client = Ours(url) if kind == "openrl" else Sdk(url)
    arrays: dict[str, Arrays] = {}
    print("up", flush=True)
    for line in sys.stdin:
        what, count, shape = line.split()
        if shape not in arrays:
            arrays[shape] = Shape(*map(int, shape.split("x"))).arrays()
        cpu, began = time.process_time(), time.perf_counter()
        if what == "make":
            done = sum(len(client.data(arrays[shape])) for _ in range(int(count)))
        elif what == "train":
            done = sum(client.train(client.data(arrays[shape])) for _ in range(int(count)))
        else:
            done = client.sample(int(count))
        spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - began}
        print(json.dumps(spent | {"done": done}), flush=True)
    client.close()
    os._exit(0)  # the SDK's threads would be waited for


class Client:
    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--worker", kind, "--at", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "up"

    def does(self, what: str, count: int, shape: Shape) -> Row:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{what} {count} {shape}\n")
        self._child.stdin.flush()
        return dict(json.loads(self._line()))

    def _line(self) -> str:
        """The SDK prints lines of its own."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(("{", "up")):
                return line.strip()
        raise RuntimeError(f"{self.kind} has ended")

    def close(self) -> None:
        self._child.communicate(timeout=60)


class Relay:
    """Passes bytes on and counts them, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._to = url.rpartition("/")[2].split(":")
        self.up = self.down = 0
        self.port = 0
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 22)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, sink = await asyncio.open_connection(self._to[0], int(self._to[1]), limit=1 << 22)
        await asyncio.gather(
            self._pump(reader, sink, self._sent), self._pump(source, writer, self._came)
        )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], None],
    ) -> None:
        try:
            while data := await reader.read(1 << 20):
                count(len(data))
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def _sent(self, count: int) -> None:
        self.up += count

    def _came(self, count: int) -> None:
        self.down += count


# --- the comparison -------------------------------------------------------------------------


def compare(given: argparse.Namespace) -> list[Row]:
    shape = Shape(*map(int, given.shape.split("x")))
    server = Process(sys.executable, str(HERE / "api_node.py"), "idle")
    relay = Relay(server.first_line)
    clients = [Client(kind, relay.url) for kind in CLIENTS]
    rows = []
    try:
        parts = [("make", given.calls), ("train", given.calls), ("sample", 1)]
        for what, per in parts:
            count = given.samples if what == "sample" else given.calls
            sums: dict[str, dict[str, float]] = {kind: {} for kind in CLIENTS}
            for client in clients:
                client.does(what, 1, shape)
            for _ in range(given.rounds):
                for client in clients:
                    _add(sums[client.kind], measured(client, what, count, shape, server, relay))
            for kind in CLIENTS:
                each = {name: value / (given.rounds * per) for name, value in sums[kind].items()}
                rows.append(_row(what, kind, str(count) if what == "sample" else str(shape), each))
                print(rows[-1], flush=True)
    finally:
        for client in clients:
            client.close()
        server.close()
    return rows


def measured(
    client: Client, what: str, count: int, shape: Shape, server: Process, relay: Relay
) -> dict[str, float]:
    cpu, up, down = server.cpu_seconds(), relay.up, relay.down
    spent = client.does(what, count, shape)
    expected = count if what == "sample" else count * shape.datums
    assert spent["done"] == expected, f"{client.kind}: {spent}"
    return {
        "client_cpu": spent["cpu"],
        "wall": spent["wall"],
        "server_cpu": server.cpu_seconds() - cpu,
        "up": relay.up - up,
        "down": relay.down - down,
    }


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _row(what: str, kind: str, size: str, each: dict[str, float]) -> Row:
    return {
        "what": what,
        "client": kind,
        "size": size,
        "client_cpu_ms": round(1e3 * each["client_cpu"], 1),
        "server_cpu_ms": round(1e3 * each["server_cpu"], 1),
        "wall_ms": round(1e3 * each["wall"], 1),
        "sent_kb": round(each["up"] / 1e3, 1),
        "received_kb": round(each["down"] / 1e3, 1),
    }


# --- zstd -----------------------------------------------------------------------------------


def zstd(shape: Shape) -> list[Row]:
    """CPU of both sides, and the time that the bytes saved would have taken. Tokens are drawn as
    words are, by Zipf's law, from 152,000; weights are a mask, advantages repeat."""
    import zstandard

    from openrl.client import codec

    rows = []
    for name, datums in (("tokens and mask", _supervised(shape)), ("rollouts", _rollouts(shape))):
        body = codec.pack({"data": datums})
        for level in (1, 3):
            packed, compress = _timed(zstandard.ZstdCompressor(level=level).compress, body)
            _, decompress = _timed(zstandard.ZstdDecompressor().decompress, packed)
            saved = (len(body) - len(packed)) / SLOW_LINK
            rows.append(
                {
                    "what": "zstd",
                    "body": name,
                    "level": level,
                    "bytes": len(body),
                    "packed": len(packed),
                    "client_ms": round(1e3 * compress, 2),
                    "server_ms": round(1e3 * decompress, 2),
                    "saved_ms_at_100_mbit": round(1e3 * saved, 1),
                }
            )
            print(rows[-1], flush=True)
    return rows


def _supervised(shape: Shape) -> list[Any]:
    mask = (np.arange(shape.tokens) > shape.tokens // 4).astype(np.float32)
    return [_datum(tokens, {"weights": mask}) for tokens in _words(shape)]


def _rollouts(shape: Shape) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        _datum(
            tokens,
            {
                "logprobs": -rng.exponential(0.5, shape.tokens).astype(np.float32),
                "advantages": np.full(shape.tokens, rng.normal(), np.float32),
            },
        )
        for tokens in _words(shape)
    ]


def _words(shape: Shape) -> np.ndarray:
    drawn = np.random.default_rng(0).zipf(1.2, (shape.datums, shape.tokens + 1))
    return drawn % 152_000


def _datum(tokens: np.ndarray, inputs: dict[str, np.ndarray]) -> Any:
    from openrl.client import codec
    from openrl.types import Datum

    given = {"target_tokens": tokens[1:], **inputs}
    return codec.datum_to_wire(Datum(tokens[:-1].astype(np.int32), given))


def _timed(call: Callable[[bytes], bytes], data: bytes) -> tuple[bytes, float]:
    """The quickest of five, in CPU seconds."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        result = call(data)
        best = min(best, time.process_time() - began)
    return result, best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=6, help="forward_backwards of a round")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--shape", default="64x2048", help="datums x tokens")
    parser.add_argument("--json", type=Path, default=RESULTS / "client.json")
    parser.add_argument("--worker", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.at)
        return
    head = facts()
    rows = compare(given)
    rows += zstd(Shape(*map(int, given.shape.split("x"))))
    given.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
