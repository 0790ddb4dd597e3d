"""The engine through its protocol alone: describe, load, execute, close."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.torch_cases import piece, random_datum

from openrl.config import EngineConfig, ModelSource
from openrl.engines.base import (
    AdapterSource,
    ControlPass,
    CreateAdapter,
    DecodePass,
    DropAdapter,
    DropVersion,
    Engine,
    LoadAdapter,
    OptimPass,
    OptimPiece,
    PinVersion,
    RowStart,
    SaveAdapter,
    TrainPass,
    WeightsKey,
)
from openrl.engines.pytorch.engine import TorchEngine
from openrl.errors import NotFound, ServerError, UserError
from openrl.types import (
    AdamParams,
    ForwardBackwardOutput,
    LoraConfig,
    ModelId,
    RequestId,
    Sample,
    SampledSequence,
    SamplingParams,
    Stop,
    VersionId,
)

CONFIG = EngineConfig(device="cpu", threads=1, kv_cache_bytes=1 << 20)
R, M = RequestId("r"), ModelId("m")


@pytest.fixture
def engine(model_directory):
    sources = [
        ModelSource("Tiny/Qwen3", model_directory("qwen3")),
        ModelSource("Tiny/Alias", model_directory("qwen3")),
        ModelSource("Tiny/Llama", model_directory("llama")),
    ]
    engine = TorchEngine(CONFIG, sources)
    engine.load(lambda progress: None)
    yield engine
    engine.close()


def _keys(engine: Engine) -> list[WeightsKey]:
    return [info.weights for info in engine.describe()]


def _control(engine, key, control):
    return engine.execute(ControlPass(key, R, control)).report.error


def _train(engine, key, request="r"):
    data = [random_datum(np.random.default_rng(0), 12, "cross_entropy")]
    executed = engine.execute(TrainPass(key, (piece("m", data, request=request),)))
    (outcome,) = executed.report.outcomes
    return outcome, executed


def _sample(engine, key, adapter=None, request="s"):
    params = SamplingParams(max_tokens=4, seed=1, temperature=1.0)
    sample = Sample(np.array([5, 6, 7], np.int32), params)
    start = RowStart(RequestId(request), sample, adapter, (0,), 4)
    report = engine.execute(DecodePass(key, admit=(start,), steps=8)).report
    (row,) = report.rows
    return row.ended


def test_loading_reports_each_set_of_weights_once_and_what_there_is_room_for(model_directory):
    sources = [ModelSource(f"Tiny/{n}", model_directory("llama")) for n in range(3)]
    engine = TorchEngine(CONFIG, sources)
    assert [info.context_length for info in engine.describe()] == [512] * 3
    seen = []
    capacity = engine.load(seen.append)
    assert [progress.fraction for progress in seen] == [0.0, 1.0]
    assert capacity.kv_blocks_free == capacity.kv_blocks_total > 0
    assert (capacity.slots_used, capacity.max_rows) == (0, 256)


def test_each_base_model_has_its_part_of_the_memory(engine):
    key, _, other = _keys(engine)
    capacity = engine.execute(DecodePass(key)).capacity
    assert capacity.kv_pools.keys() == {key, other}
    assert sum(pool.total for pool in capacity.kv_pools.values()) == capacity.kv_blocks_total
    one = Sample(
        np.arange(3, 43, dtype=np.int32), SamplingParams(max_tokens=9, stop=Stop(eos=False))
    )
    start = RowStart(R, one, None, (0,), 9)
    capacity = engine.execute(DecodePass(key, (start,), steps=2)).capacity
    assert capacity.pool(key).free < capacity.pool(key).total
    assert capacity.pool(other).free == capacity.pool(other).total


def test_a_round_of_training_sampling_and_saving(engine, tmp_path):
    key, alias, other = _keys(engine)
    assert key == alias != other
    assert _control(engine, key, CreateAdapter(M, LoraConfig(rank=2, seed=0))) is None
    plain = _sample(engine, key)
    assert isinstance(plain, SampledSequence)
    outcome, executed = _train(engine, key)
    assert isinstance(outcome, ForwardBackwardOutput)
    assert executed.seconds > 0
    assert (executed.capacity.slots_used, executed.capacity.slots_total) == (1, 1)
    adam = AdamParams(learning_rate=0.5)
    step = engine.execute(OptimPass(key, (OptimPiece(R, M, adam),))).report.outcomes[0]
    assert step.version == 1
    version = AdapterSource(VersionId("v1"))
    assert _control(engine, key, PinVersion(M, version.version_id)) is None
    assert _control(engine, key, SaveAdapter(M, tmp_path, with_optimizer=True)) is None
    pinned = _sample(engine, key, version, "s2")
    from_file = _sample(engine, key, AdapterSource(VersionId("v2"), tmp_path), "s3")
    assert np.array_equal(pinned.tokens, from_file.tokens)
    assert np.array_equal(pinned.logprobs, from_file.logprobs)
    assert not np.array_equal(pinned.logprobs, plain.logprobs)
    assert _control(engine, key, DropVersion(version.version_id)) is None
    assert _control(engine, key, LoadAdapter(M, tmp_path, with_optimizer=True)) is None
    assert _control(engine, key, DropAdapter(M)) is None
    assert isinstance(_train(engine, key)[0].error, NotFound)


def test_idle_versions_and_adapters_page_out_under_the_directory_given(model_directory, tmp_path):
    """Two base models: their pages must not lie over each other."""
    sources = [ModelSource(f"Tiny/{n}", model_directory(n)) for n in ("qwen3", "llama")]
    pages = tmp_path / "idle"
    (pages / "left").mkdir(parents=True)
    config = replace(CONFIG, idle_versions=1, adapter_bytes=200_000, adapter_host_bytes=2)
    engine = TorchEngine(config, sources, pages)
    engine.load(lambda progress: None)
    assert not (pages / "left").exists()
    before = {}
    for key in _keys(engine):
        for name in ("m", "n"):
            order = CreateAdapter(ModelId(name + key), LoraConfig(rank=2, seed=len(name + key)))
            assert _control(engine, key, order) is None
        for version in ("v1", "v2", "v3"):
            pin = PinVersion(ModelId("m" + key), VersionId(version + key))
            assert _control(engine, key, pin) is None
            if version == "v1":
                before[key] = _sample(engine, key, AdapterSource(pin.version_id), version + key)
    assert len(list(pages.glob("*/versions/*.safetensors"))) == 4
    assert len(list(pages.glob("*/adapters/*/*.safetensors"))) == 2
    for key in _keys(engine):
        again = _sample(engine, key, AdapterSource(VersionId("v1" + key)), "again" + key)
        assert np.array_equal(again.logprobs, before[key].logprobs)
    engine.close()


def test_sampled_logprobs_are_those_of_forward(engine):
    key = _keys(engine)[0]
    _control(engine, key, CreateAdapter(M, LoraConfig(rank=2, seed=0)))
    _train(engine, key)
    engine.execute(OptimPass(key, (OptimPiece(R, M, AdamParams(learning_rate=0.1)),)))
    _control(engine, key, PinVersion(M, VersionId("v")))
    ended = _sample(engine, key, AdapterSource(VersionId("v")))
    tokens = np.concatenate([np.array([5, 6, 7], np.int32), ended.tokens])
    datum = random_datum(np.random.default_rng(0), len(tokens) - 1, "cross_entropy")
    datum.tokens[:] = tokens[:-1]
    datum.loss_inputs["target_tokens"][:] = tokens[1:]
    work = TrainPass(key, (piece("m", [datum], request="f", forward_only=True),))
    (outcome,) = engine.execute(work).report.outcomes
    np.testing.assert_allclose(outcome.outputs[0]["logprobs"][2:], ended.logprobs, atol=1e-5)


def test_models_of_one_name_live_over_their_own_weights(engine):
    qwen, _, llama = _keys(engine)
    assert _control(engine, qwen, CreateAdapter(M, LoraConfig(rank=2, seed=0))) is None
    assert isinstance(_train(engine, llama)[0].error, NotFound)
    error = _control(engine, qwen, CreateAdapter(M, LoraConfig(rank=2)))
    assert isinstance(error, UserError)


def test_a_directory_that_cannot_be_written_fails_its_save_alone(engine, tmp_path):
    key = _keys(engine)[0]
    _control(engine, key, CreateAdapter(M, LoraConfig(rank=2, seed=0)))
    error = _control(engine, key, SaveAdapter(M, tmp_path / "missing", with_optimizer=False))
    assert isinstance(error, ServerError)
    assert isinstance(_train(engine, key)[0], ForwardBackwardOutput)


def _cut_short(directory, copy):
    """Of a model directory, with half of its weights' file."""
    shutil.copytree(directory, copy)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return copy


def _configured(directory, copy, **changes):
    shutil.copytree(directory, copy)
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return copy


SPOILED = {
    "cut short": _cut_short,
    "shapes of another": partial(_configured, intermediate_size=32),
    "a layer less": partial(_configured, num_hidden_layers=3),
    "what nobody has foreseen": partial(_configured, pad_token_id=5000),  # AssertionError
}


@pytest.mark.parametrize("spoiled", SPOILED.values(), ids=SPOILED)
def test_weights_that_cannot_be_loaded_leave_the_others_alone(spoiled, model_directory, tmp_path):
    bad = spoiled(model_directory("qwen3"), tmp_path / "bad")
    sources = [
        ModelSource("Tiny/Bad", bad),
        ModelSource("Tiny/Alias", bad),
        ModelSource("Tiny/Llama", model_directory("llama")),
    ]
    engine = TorchEngine(CONFIG, sources)
    told = []
    engine.load(told.append)
    bad_key, _, good_key = _keys(engine)
    (error,) = [step.error for step in told if step.weights == bad_key and step.error]
    assert "cannot be loaded" in error
    assert not [step for step in told if step.weights == good_key and step.error]
    assert _control(engine, good_key, CreateAdapter(M, LoraConfig(rank=4))) is None
    with pytest.raises(ServerError, match="not loaded"):
        _control(engine, bad_key, CreateAdapter(M, LoraConfig(rank=4)))
    engine.close()


def test_an_engine_that_can_load_nothing_says_so(model_directory, tmp_path):
    bad = _cut_short(model_directory("qwen3"), tmp_path / "bad")
    with pytest.raises(UserError, match="cannot be loaded"):
        TorchEngine(CONFIG, [ModelSource("Tiny/Bad", bad)]).load(lambda progress: None)
