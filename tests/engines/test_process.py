"""An engine in a process of its own behaves as one in this process, and its death is known."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shell import SECONDS, datum, sample, shell, training

from openrl.config import EngineConfig, ModelSource
from openrl.engines import base, frames
from openrl.engines.base import (
    AtomPiece,
    ControlPass,
    ControlReport,
    CreateAdapter,
    DecodePass,
    DecodeReport,
    OptimPass,
    OptimPiece,
    RowId,
    RowReport,
    RowStart,
    SaveAdapter,
    TrainPass,
    WeightsKey,
)
from openrl.engines.fake import FakeEngine
from openrl.engines.process import ProcessEngine
from openrl.errors import (
    EngineDied,
    Gone,
    InvalidDatum,
    NotFound,
    OpenRLError,
    Overloaded,
    UserError,
)
from openrl.types import (
    AdamParams,
    Failed,
    LoraConfig,
    ModelId,
    RequestId,
    SampledSequence,
    SampleOutput,
)

BASE = WeightsKey("fake:tiny")
MODEL = ModelId("s:train:0")

CREATE = ControlPass(BASE, RequestId("c"), CreateAdapter(MODEL, LoraConfig(rank=8, seed=2**64 - 1)))
TRAIN = TrainPass(
    BASE,
    tuple(
        AtomPiece(
            RequestId(name), MODEL, 0, training([datum([1, 2], [2, target])]).data,
            "cross_entropy", {}, False, True,
        )
        for name, target in (("good", 3), ("bad", 7))
    ),
)  # fmt: skip
STEP = OptimPass(BASE, (OptimPiece(RequestId("o"), MODEL, AdamParams(learning_rate=0.1)),))
DECODE = DecodePass(
    BASE, admit=(RowStart(RequestId("d"), sample([1, 2], 9, 2, seed=3), None, (0, 1), 9),), steps=4
)
PASSES = (CREATE, TRAIN, STEP, DECODE, DecodePass(BASE, steps=16))


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    made = ProcessEngine("openrl.engines.fake:FakeEngine", ["tiny"])
    yield made
    made.close()


def plain(value: Any) -> Any:
    """Comparable all the way down; arrays with dtype and shape, NaN equal to itself."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, OpenRLError):
        return (type(value), vars(value), value.message)
    if is_dataclass(value):
        parts = [plain(getattr(value, field.name)) for field in fields(value)]
        return (type(value), parts)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return (type(value), [plain(each) for each in value])
    return value


@pytest.mark.parametrize(
    "value",
    [
        *PASSES,
        ControlPass(BASE, RequestId("s"), SaveAdapter(MODEL, Path("a") / "b", True)),
        ControlReport(InvalidDatum(3, "weights", "is odd")),
        ControlReport(Overloaded("busy", retry_after=2.5)),
        DecodeReport(
            (
                RowReport(RowId(RequestId("d"), 1), 3, 1),
                RowReport(RowId(RequestId("d"), 2), 3, 0, Failed(Gone("went"))),
                RowReport(
                    RowId(RequestId("d"), 0),
                    2,
                    0,
                    SampledSequence(
                        np.array([1, 2], np.int32), np.array([np.nan, -1], np.float32), "stop"
                    ),
                ),
            ),
            {RequestId("d"): SampleOutput((), np.array([np.nan], np.float32))},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_cross_whole(value: object) -> None:
    assert plain(frames.unpack(frames.pack(value))) == plain(value)


def test_rows_keep_their_names_and_a_mapping_of_one_stays_a_mapping() -> None:
    row = frames.unpack(frames.pack(RowId(RequestId("d"), 1)))
    assert isinstance(row, RowId)
    assert frames.unpack(frames.pack({"a": 1})) == {"a": 1}


def test_every_value_of_the_vocabulary_has_a_place() -> None:
    named = [v for v in vars(base).values() if isinstance(v, type) and is_dataclass(v)]
    assert len(named) > 20
    assert set(named) <= set(frames._CODES)


def test_what_has_no_place_does_not_cross() -> None:
    with pytest.raises(TypeError, match="type cannot cross"):
        frames.pack(subprocess.Popen)


def test_it_answers_as_the_engine_itself(engine: ProcessEngine) -> None:
    itself = FakeEngine(["tiny"])
    heard: tuple[list, list] = ([], [])
    assert plain(tuple(engine.describe())) == plain(tuple(itself.describe()))
    assert engine.load(heard[0].append) == itself.load(heard[1].append)
    assert heard[0] == heard[1]
    assert heard[0]
    for work in PASSES:
        assert plain(engine.execute(work)) == plain(itself.execute(work))


def test_what_the_engine_raises_is_raised_here() -> None:
    missing = (ModelSource("no-such", Path("/no/such")),)
    engine = ProcessEngine(
        "openrl.engines.pytorch.deferred:DeferredTorchEngine", EngineConfig(), missing
    )
    with pytest.raises((UserError, NotFound), match="no-such"):
        engine.describe()
    engine.close()


def test_the_signals_that_end_a_server_are_the_parents(engine: ProcessEngine) -> None:
    engine.describe()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child_of(engine), number)
    assert engine.execute(CREATE).report == ControlReport()


def test_a_killed_engine_is_dead_and_closes(engine: ProcessEngine) -> None:
    engine.describe()
    os.kill(child_of(engine), signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL"):
        engine.execute(CREATE)
    engine.close()


async def test_work_over_a_killed_engine_fails_with_the_cause(
    tmp_path: Path, engine: ProcessEngine
) -> None:
    async with shell(tmp_path, ProcessEngine("openrl.engines.fake:FakeEngine", ["tiny"])) as whole:
        lane = await whole.model()
        await whole.does(lane, training([datum([1], [2])]))
        os.kill(child_of(whole.actor._engine), signal.SIGKILL)
        failed = await whole.fails(lane, training([datum([1], [2])]))
        assert isinstance(failed.error, EngineDied)
        assert not whole.actor.ready


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux only")
def test_an_order_that_cannot_be_read_ends_it(engine: ProcessEngine) -> None:
    """Lest the parent waits for ever."""
    engine.describe()
    no_msgpack = b"\xc1"
    engine._orders.write(len(no_msgpack).to_bytes(8, "little") + no_msgpack)
    engine._orders.flush()
    assert engine._child is not None
    assert engine._child.wait(SECONDS) == 1
    with pytest.raises(EngineDied):
        engine.describe()


def test_it_ends_with_its_parent() -> None:
    program = (
        "from openrl.engines.process import ProcessEngine\n"
        "engine = ProcessEngine('openrl.engines.fake:FakeEngine', ['tiny'])\n"
        "engine.describe()\n"
        "print(engine.pid, flush=True)\n"
        "input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    ended, _, _ = select.select([child], [], [], SECONDS)
    os.close(child)
    assert ended, "the engine outlived its parent"


def child_of(engine: object) -> int:
    assert isinstance(engine, ProcessEngine)
    assert engine.pid is not None
    return engine.pid
