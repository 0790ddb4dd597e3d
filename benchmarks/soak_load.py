"""The load of `benchmarks/soak.py`: jobs that come and go until stdin closes.

    python benchmarks/soak_load.py URL MODEL OUT

Three loops side by side, each job a session of its own: RL and SFT with the unmodified SDK, SFT
and sampling with our client. Each deletes what it saved. The first jobs of our client end as a
dying one does, without a word; not more, since their models are kept for good. Counts and the
first errors are in OUT once it ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import tinker
from tinker import types

import openrl
from openrl.errors import Gone
from openrl.types import Datum

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STEPS = 8
PAUSE_SECONDS = 0.05
LEFT = 5  # jobs that end without a word
KEY = "tml-soak"


def rl(url: str, model: str, _: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = service.create_lora_training_client(base_model=model, rank=4, seed=1)
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=7, stop=[])
    for _ in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints(PROMPT)
        sampled = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
        data = [_datum(PROMPT, list(each.tokens)) for each in sampled.sequences]
        gradient = training.forward_backward(data, "cross_entropy")
        done = training.optim_step(types.AdamParams(learning_rate=0.01))
        gradient.result()
        done.result()
        time.sleep(PAUSE_SECONDS)
    path = training.save_state("end").result().path
    _finish(url, service, path)


def sft(url: str, model: str, _: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = service.create_lora_training_client(base_model=model, rank=4, seed=2)
    data = [_datum(PROMPT, list(range(3, 60))) for _ in range(8)]
    for _ in range(STEPS):
        training.forward_backward(data, "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        time.sleep(PAUSE_SECONDS)
    path = training.save_state("end").result().path
    training.load_state_with_optimizer(path).result()
    _finish(url, service, path)


def _finish(url: str, service: tinker.ServiceClient, path: str) -> None:
    with suppress(
        tinker.NotFoundError
    ):  # the one that was killed has done it, and could not say so
        _rest(url).delete_checkpoint_from_tinker_path(path).result()
    service.close("success").result()


@cache
def _rest(url: str) -> tinker.RestClient:
    """One for all: it cannot be closed."""
    return tinker.RestClient(base_url=url, api_key=KEY)


def _datum(prompt: list[int], answer: list[int]) -> types.Datum:
    tokens = [*prompt, *answer]
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(answer), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(weights),
        },
    )


def ours(url: str, model: str, number: int) -> None:
    asyncio.run(_ours(url, model, leave=number <= LEFT))


async def _ours(url: str, model: str, leave: bool) -> None:
    client = await openrl.connect(url, KEY).__aenter__()
    trained = await client.create_model(model, rank=4, seed=3)
    sampler = await trained.sampler()
    losses = {"target_tokens": np.arange(4, 41), "weights": np.ones(37, np.float32)}
    data = [Datum(np.arange(3, 40, dtype=np.int32), losses)]
    for _ in range(STEPS):
        await _sampled(sampler)
        loss = await trained.forward_backward(data)
        done = await trained.optim_step()
        await loss
        await done
        await asyncio.sleep(PAUSE_SECONDS)
    if not leave:
        await client.close()


async def _sampled(sampler: openrl.client.Sampler) -> None:
    """Samples are not journalled: after a restart a client sends them again."""
    for _ in range(5):
        with suppress(Gone):
            await sampler.compute_logprobs(PROMPT)
            return
    raise RuntimeError("a sample is gone again and again")


JOBS = {"rl": rl, "sft": sft, "ours": ours}


class Load:
    def __init__(self, url: str, model: str) -> None:
        self.done: Counter[str] = Counter()
        self.failed = 0
        self.errors: list[str] = []
        self.over = threading.Event()
        self._url, self._model = url, model

    def loop(self, name: str) -> None:
        number = 0
        while not self.over.is_set():
            number += 1
            gc.collect()  # else the clients of earlier jobs keep their connections for a while
            try:
                JOBS[name](self._url, self._model, number)
                self.done[name] += 1
            except Exception:  # noqa: BLE001 - whatever it is, it is what a user would see
                self._note(f"{name}: {traceback.format_exc(limit=0)[-600:]}")

    def _note(self, error: str) -> None:
        """A job that fails at once fails often."""
        self.failed += 1
        if len(self.errors) < 20:
            self.errors.append(error)
        time.sleep(1.0)


def main() -> None:
    _, url, model, out = sys.argv
    logging.getLogger("tinker").setLevel(logging.ERROR)
    load = Load(url, model)
    threads = [threading.Thread(target=load.loop, args=(n,), daemon=True) for n in JOBS]
    for each in threads:
        each.start()
    sys.stdin.read()
    load.over.set()
    for each in threads:
        each.join(120)
        if each.is_alive():
            load.errors.append("a job hangs")
    Path(out).write_text(
        json.dumps({"jobs": load.done, "failed": load.failed, "errors": load.errors})
    )


if __name__ == "__main__":
    main()
