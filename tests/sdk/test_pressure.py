"""The unmodified SDK against a server that is full: it slows down, and nothing is lost."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tinker
from support.node import CONFIG, MODEL, serving_in_a_thread
from tinker import types

from openrl.config import SchedulerConfig
from openrl.engines.base import DecodePass, Executed, Pass, TrainPass
from openrl.engines.fake import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore")

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={
        name: types.TensorData.from_numpy(array)
        for name, array in (
            ("target_tokens", np.array([2, 3, 4])),
            ("weights", np.ones(3, np.float32)),
        )
    },
)
DATUM_BYTES = 3 * (4 + 8 + 4)


class Watched(FakeEngine):
    """Remembers the most sequences that it was given at once, and holds its first training."""

    def __init__(self) -> None:
        super().__init__([MODEL])
        self.most_rows = 0
        self.may_train = threading.Event()

    def execute(self, work: Pass) -> Executed:
        if isinstance(work, TrainPass):
            assert self.may_train.wait(30)
        if isinstance(work, DecodePass):
            admitted = sum(len(start.indexes) for start in work.admit)
            self.most_rows = max(self.most_rows, admitted + len(self._rows))
        return super().execute(work)


async def test_samples_over_the_bound_come_later(tmp_path: Path) -> None:
    engine = Watched()
    config = replace(CONFIG, scheduler=SchedulerConfig(max_queued_samples=2, decode_steps=1))
    with serving_in_a_thread(tmp_path, config, engine) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-pressure")
        sampler = await service.create_sampling_client_async(base_model=MODEL)
        params = types.SamplingParams(max_tokens=20, stop=[])
        prompt = types.ModelInput.from_ints([1, 2])
        sampled = await asyncio.gather(
            *(sampler.sample_async(prompt, 1, sampling_params=params) for _ in range(6))
        )
    assert [len(each.sequences[0].tokens) for each in sampled] == [20] * 6
    assert 1 <= engine.most_rows <= 2


def test_training_over_the_bound_is_held_and_stays_in_order(tmp_path: Path) -> None:
    engine = Watched()
    config = replace(CONFIG, scheduler=SchedulerConfig(max_queued_bytes=DATUM_BYTES))
    with serving_in_a_thread(tmp_path, config, engine) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-pressure")
        training = service.create_lora_training_client(base_model=MODEL, rank=4)
        adam = types.AdamParams(learning_rate=0.1)
        pending = [
            (training.forward_backward([DATUM], "cross_entropy"), training.optim_step(adam))
            for _ in range(3)
        ]
        engine.may_train.set()
        losses = []
        for gradient, step in pending:
            losses.append(gradient.result().metrics["loss:sum"])
            assert "skipped_no_gradients" not in (step.result().metrics or {})
    assert losses[0] > losses[1] > losses[2]
