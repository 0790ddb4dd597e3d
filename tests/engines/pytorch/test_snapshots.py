"""A model that comes out of a snapshot goes on as if it had never been away, to the bit; what is
not whole is nothing. One suite for every engine."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.torch_cases import random_datum

from openrl.config import EngineConfig, ModelSource
from openrl.engines.base import (
    AdapterSource,
    AtomPiece,
    ControlPass,
    CreateAdapter,
    DecodePass,
    DropAdapter,
    Engine,
    FinishSnapshots,
    OptimPass,
    OptimPiece,
    PageOut,
    PinVersion,
    RestoreAdapter,
    RowStart,
    SnapshotAdapter,
    SnapshotVersion,
    TrainPass,
    Written,
)
from openrl.engines.fake import FakeEngine
from openrl.engines.process import ProcessEngine
from openrl.engines.pytorch.deferred import DeferredTorchEngine
from openrl.engines.pytorch.engine import TorchEngine
from openrl.engines.snapshots import MANIFEST, whole
from openrl.types import (
    AdamParams,
    ForwardBackwardOutput,
    LoraConfig,
    ModelId,
    OptimStepDone,
    RequestId,
    Sample,
    SamplingParams,
    VersionId,
)

LORA = LoraConfig(rank=4, seed=3)
M, R, V = ModelId("m"), RequestId("r"), VersionId("v")


class Driver:
    """An engine, and each model's operations by number, so that any can be done again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.key = engine.describe()[0].weights
        engine.load(lambda _: None)
        self.written: list[Written] = []

    def execute(self, work: Any) -> Any:
        executed = self.engine.execute(work)
        self.written += executed.written
        return executed.report

    def control(self, control: Any) -> Any:
        return self.execute(ControlPass(self.key, R, control)).error

    def do(self, control: Any) -> None:
        error = self.control(control)
        assert error is None, error

    def train(self, number: int, model: ModelId = M) -> list[Any]:
        data = (random_datum(np.random.default_rng(number), 9, "cross_entropy"),)
        request = RequestId(f"{model}:{number}")
        atom = AtomPiece(request, model, 0, data, "cross_entropy", {}, False, True)
        (outcome,) = self.execute(TrainPass(self.key, (atom,))).outcomes
        assert isinstance(outcome, ForwardBackwardOutput), outcome
        return [outcome.outputs[0]["logprobs"].tolist(), outcome.metrics["loss:sum"]]

    def step(self, model: ModelId = M) -> list[Any]:
        adam = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)
        (done,) = self.execute(OptimPass(self.key, (OptimPiece(R, model, adam),))).outcomes
        assert isinstance(done, OptimStepDone), done
        return [done.metrics["grad_norm"], done.version]

    def go_on(self) -> list[Any]:
        """From an accumulated gradient: a step, another round, one more."""
        return [self.step(), self.train(7), self.train(8), self.step(), self.train(9)]

    def sample(self, source: AdapterSource) -> Any:
        params = SamplingParams(max_tokens=6, seed=1)
        sample = Sample(np.array([5, 6, 7], np.int32), params)
        start = RowStart(RequestId("s"), sample, source, (0,), 6)
        report = self.execute(DecodePass(self.key, admit=(start,), steps=8))
        return [report.rows[0].ended.tokens.tolist(), report.rows[0].ended.logprobs.tolist()]


@pytest.fixture(params=["fake", "torch", "child"])
def driver(request, model_directory, tmp_path):
    engine: Engine
    sources = (ModelSource("Tiny/Qwen3", model_directory("qwen3")),)
    config = EngineConfig(device="cpu", threads=1, kv_cache_bytes=1 << 20)
    if request.param == "fake":
        engine = FakeEngine(["Tiny/Qwen3"], vocab_size=101)
    elif request.param == "torch":
        engine = TorchEngine(config, sources, tmp_path / "idle")
    else:
        name = f"{DeferredTorchEngine.__module__}:{DeferredTorchEngine.__name__}"
        engine = ProcessEngine(name, config, sources, tmp_path / "idle")
    yield Driver(engine)
    engine.close()


def _snapshot(driver: Driver, directory: Path) -> None:
    driver.do(CreateAdapter(M, LORA))
    driver.train(1)
    driver.step()
    driver.train(2)  # a gradient that waits for its step
    driver.do(SnapshotAdapter(M, directory))


def test_a_restored_model_goes_on_to_the_bit(driver, tmp_path):
    directory = tmp_path / "snapshots" / "m" / "1"
    _snapshot(driver, directory)
    undisturbed = driver.go_on()  # while the snapshot may still be being written
    driver.do(FinishSnapshots())
    assert [(w.directory, w.error) for w in driver.written] == [(directory, None)]
    assert driver.written[0].size_bytes > 0
    driver.do(DropAdapter(M))
    driver.do(RestoreAdapter(M, LORA, directory))
    assert driver.go_on() == undisturbed


@pytest.mark.parametrize("driver", ["torch"], indirect=True)
def test_a_model_that_is_there_is_not_restored(driver, tmp_path):
    _snapshot(driver, tmp_path / "1")
    driver.do(FinishSnapshots())
    assert "exists already" in str(driver.control(RestoreAdapter(M, LORA, tmp_path / "1")))


def test_only_its_owner_may_read_a_snapshot(driver, tmp_path):
    directory = tmp_path / "snapshots" / "1"
    _snapshot(driver, directory)
    driver.do(FinishSnapshots())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("driver", ["fake", "torch"], indirect=True)
def test_a_damaged_snapshot_makes_no_model(driver, tmp_path, damage):
    _snapshot(driver, tmp_path / "1")
    driver.do(FinishSnapshots())
    assert whole(tmp_path / "1", verify=True)
    driver.do(DropAdapter(M))
    damage(next(file for file in (tmp_path / "1").iterdir() if file.name != MANIFEST))
    assert not whole(tmp_path / "1", verify=True)
    assert "not whole" in str(driver.control(RestoreAdapter(M, LORA, tmp_path / "1")))
    driver.do(CreateAdapter(M, LORA))  # its name is free


@pytest.mark.parametrize("driver", ["fake", "torch"], indirect=True)
def test_without_its_manifest_a_snapshot_is_nothing(driver, tmp_path):
    _snapshot(driver, tmp_path / "1")
    driver.do(FinishSnapshots())
    stated = json.loads((tmp_path / "1" / MANIFEST).read_text())
    assert set(stated["files"]) == {f.name for f in (tmp_path / "1").iterdir()} - {MANIFEST}
    (tmp_path / "1" / MANIFEST).unlink()
    assert not whole(tmp_path / "1")


@pytest.mark.parametrize("driver", ["fake", "torch"], indirect=True)
def test_a_snapshot_that_cannot_be_written_is_reported_and_leaves_nothing(driver, tmp_path):
    (tmp_path / "file").write_text("in the way")
    directory = tmp_path / "file" / "1"
    _snapshot(driver, directory)
    driver.do(FinishSnapshots())
    (written,) = driver.written
    assert written.directory == directory
    assert "FileExists" in str(written.error)
    driver.go_on()


def test_a_pinned_version_is_read_from_its_snapshot(driver, tmp_path):
    _snapshot(driver, tmp_path / "1")
    driver.do(PinVersion(M, V))
    pinned = driver.sample(AdapterSource(V))
    driver.step()
    driver.do(SnapshotVersion(V, tmp_path / "v"))
    driver.do(FinishSnapshots())
    other = VersionId("another process would know it by its path")
    assert driver.sample(AdapterSource(other, tmp_path / "v")) == pinned


def test_a_model_that_was_paged_out_comes_back_by_itself(driver, tmp_path):
    _snapshot(driver, tmp_path / "1")
    undisturbed = driver.go_on()
    driver.do(FinishSnapshots())
    driver.do(DropAdapter(M))
    driver.do(RestoreAdapter(M, LORA, tmp_path / "1"))
    driver.do(PageOut(M))
    assert driver.go_on() == undisturbed
