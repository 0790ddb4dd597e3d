"""What one process leaves, the next goes on with, to the bit. Crashes are images of the disk."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.journal import FaultyFiles
from support.shell import (
    ALICE,
    BASE,
    Shell,
    datum,
    image,
    lasting,
    sample,
    training,
)

from openrl.catalogue import Session
from openrl.config import JournalConfig, SchedulerConfig
from openrl.engines.base import (
    Capacity,
    ControlPass,
    CreateAdapter,
    FinishSnapshots,
    LoadProgress,
    OptimPass,
    OptimReport,
    Pass,
    RestoreAdapter,
    TrainPass,
)
from openrl.engines.fake import FakeEngine
from openrl.errors import (
    Diverged,
    EngineDied,
    Gone,
    NotFound,
    OutOfMemory,
    ServerError,
    Unavailable,
)
from openrl.types import (
    AdamParams,
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    LoadWeights,
    LoraConfig,
    ModelId,
    Operation,
    OptimStep,
    RequestId,
    SamplerTarget,
    SamplingSessionId,
    SaveWeights,
    SaveWeightsForSampler,
    SessionId,
    UnloadModel,
    VersionId,
    WeightsSaved,
)

SELDOM = JournalConfig(replay_seconds=1e6)
ALWAYS = JournalConfig(replay_seconds=1e-9)
STEP = OptimStep(AdamParams(learning_rate=0.1))
LANE = "s:train:0"


def batch(step: int) -> Operation:
    """Several atoms of at most 8 tokens."""
    data = [datum([i + step, i + 1, i + 2], [i + 1, i + 2, i + 3]) for i in range(5)]
    return training(data)


async def steps(whole: Shell, first: int, last: int, lane: str = LANE) -> None:
    for step in range(first, last):
        await whole.does(lane, batch(step))
        await whole.does(lane, STEP)


async def quiet(whole: Shell, lane: str = LANE) -> None:
    """Snapshots that are being written have been, count, and older ones are gone."""
    parts = whole.actor._parts
    async with asyncio.timeout(20):
        while parts.snapshots._drafts or len(parts.snapshots.of(lane)) > 1:  # type: ignore[arg-type]
            await whole.does(lane, training([datum([1], [2])], forward_only=True))
    await parts.journal.flushed()


def goes_on(whole: Shell, seq: int, lane: str = LANE) -> None:
    """The client counts on from there."""
    whole.seqs[lane] = seq


async def undisturbed(data: Path, last: int) -> np.ndarray:
    async with lasting(data) as whole:
        await whole.model(LANE)
        await steps(whole, 0, last)
        return await whole.logprobs(LANE)


@pytest.mark.parametrize("securing", [SELDOM, ALWAYS], ids=["replay", "snapshots"])
async def test_a_model_goes_on_to_the_bit(tmp_path: Path, securing: JournalConfig) -> None:
    passes: list[Pass] = []
    async with lasting(tmp_path / "a", securing) as first:
        await first.model(LANE)
        await steps(first, 0, 4)
        await quiet(first)
        await first.does(LANE, batch(4))  # a gradient waits for its step
        await first.actor._parts.journal.flushed()
        copy = image(tmp_path / "a", tmp_path / "b")
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=passes.append)
    async with lasting(copy, securing, engine=engine) as second:
        goes_on(second, first.seqs[LANE])
        await second.does(LANE, STEP)
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 5)
        )
    controls = [each.control for each in passes if isinstance(each, ControlPass)]
    beginning = CreateAdapter if securing is SELDOM else RestoreAdapter
    assert isinstance(controls[0], beginning)


async def test_answers_can_be_fetched_after_a_restart_and_posts_repeated(tmp_path: Path) -> None:
    async with lasting(tmp_path / "a") as first:
        await first.model(LANE)
        promise = await first.send(LANE, batch(0))
        expected = await first.outcome(promise)
        copy = image(tmp_path / "a", tmp_path / "b")
    async with lasting(copy) as second:
        assert await second.send(LANE, batch(0), seq=1) == promise
        again = await second.outcome(promise)
        with pytest.raises(NotFound):
            second.futures.find(promise, ALICE + "-not")  # type: ignore[arg-type]
    for one, other in zip(again.outputs, expected.outputs, strict=True):  # type: ignore[union-attr]
        np.testing.assert_array_equal(one["logprobs"], other["logprobs"])
    assert again.metrics == expected.metrics  # type: ignore[union-attr]


async def test_what_was_accepted_and_not_begun_runs_after_a_restart(tmp_path: Path) -> None:
    gate = Gate(TrainPass)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=gate)
    async with lasting(tmp_path / "a", engine=engine) as first:
        await first.model(LANE)
        promises = [await first.send(LANE, each) for each in (batch(0), STEP, batch(1), STEP)]
        copy = image(tmp_path / "a", tmp_path / "b")
        gate.open()
    async with lasting(copy) as second:
        outcomes = [await second.outcome(promise) for promise in promises]
        assert not any(isinstance(each, Failed) for each in outcomes)
        goes_on(second, 4)
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 2)
        )


class Late(FakeEngine):
    """Its weights load when it is told to."""

    def __init__(self, before: Callable[[Pass], None]) -> None:
        super().__init__([BASE], vocab_size=64, context_length=64, before=before)
        self.come = threading.Event()

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        assert self.come.wait(30)
        return super().load(progress)


class Gate:
    """Keeps passes of one kind from running until it is opened."""

    def __init__(self, kind: type[Pass]) -> None:
        self._kind = kind
        self._open = threading.Event()

    def __call__(self, work: Pass) -> None:
        if isinstance(work, self._kind):
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


async def test_requests_are_cut_as_they_were_when_the_model_was_made(tmp_path: Path) -> None:
    async with lasting(tmp_path / "a") as first:
        await first.model(LANE)
        await first.does(LANE, batch(0))
        copy = image(tmp_path / "a", tmp_path / "b")
    passes: list[Pass] = []
    other = SchedulerConfig(gap_seconds=0.05, atom_tokens=1024)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=passes.append)
    async with lasting(copy, engine=engine, config=other) as second:
        goes_on(second, 1)
        await second.does(LANE, batch(0))
    pieces = [len(each.pieces) for each in passes if isinstance(each, TrainPass)]
    assert pieces == [3, 3], "replayed and new, each of three atoms"


class Failing(FakeEngine):
    """The step numbers that fail, and how."""

    def __init__(self, how: Callable[[int], Exception | None]) -> None:
        super().__init__([BASE], vocab_size=64, context_length=64)
        self._how = how
        self._seen = 0

    def execute(self, work: Pass):  # type: ignore[no-untyped-def]
        if not isinstance(work, OptimPass):
            return super().execute(work)
        self._seen += 1
        error = self._how(self._seen)
        if error is None:
            return super().execute(work)
        if isinstance(error, Diverged):
            self._adapters[work.pieces[0].model_id].grad_V = None
        nothing = super().execute(ControlPass(work.weights, RequestId("x"), FinishSnapshots()))
        return replace(nothing, report=OptimReport((Failed(error),)))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [Diverged("not finite"), OutOfMemory("no room")])
async def test_a_failed_step_does_to_gradients_what_it_did(
    tmp_path: Path, error: Exception
) -> None:
    """One that was not finite dropped them; any other left them for the next step."""

    def how(number: int) -> Exception | None:
        return error if number == 2 else None

    async with lasting(tmp_path / "a", engine=Failing(how)) as first:
        await first.model(LANE)
        await steps(first, 0, 1)
        await first.does(LANE, batch(1))
        await first.fails(LANE, STEP)
        copy = image(tmp_path / "a", tmp_path / "b")
        await first.does(LANE, batch(2))
        await first.does(LANE, STEP)
        expected = await first.logprobs(LANE)
    done_again = how if isinstance(error, Diverged) else lambda _: None
    async with lasting(copy, engine=Failing(done_again)) as second:
        goes_on(second, 4)
        await second.does(LANE, batch(2))
        await second.does(LANE, STEP)
        np.testing.assert_array_equal(await second.logprobs(LANE), expected)


async def test_loaded_weights_outlive_the_checkpoint_that_they_came_from(tmp_path: Path) -> None:
    async with lasting(tmp_path / "a", SELDOM) as first:
        await first.model(LANE)
        await steps(first, 0, 2)
        saved = await first.does(LANE, SaveWeights("kept"))
        assert isinstance(saved, WeightsSaved)
        await steps(first, 2, 4)
        await first.does(LANE, LoadWeights(saved.path, with_optimizer=True))
        made = CreateModelFromCheckpoint(BASE, LoraConfig(rank=8), saved.path, True)
        await first.does("s:train:1", made)
        expected = [await first.logprobs(lane) for lane in (LANE, "s:train:1")]
        copy = image(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(copy / "checkpoints")
    async with lasting(copy, SELDOM) as second:
        for lane, seq, logprobs in ((LANE, 12, expected[0]), ("s:train:1", 1, expected[1])):
            goes_on(second, seq, lane)
            np.testing.assert_array_equal(await second.logprobs(lane), logprobs)


@pytest.mark.parametrize(
    ("securing", "later"),
    [(SELDOM, SELDOM), (ALWAYS, ALWAYS), (SELDOM, ALWAYS)],
    ids=["replay", "snapshots", "snapshots while replaying"],
)
async def test_ephemeral_samplers_read_their_versions_still(
    tmp_path: Path,
    securing: JournalConfig,
    later: JournalConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of a model that was unloaded too; not those of a session that is over."""

    async def sampled(whole: Shell, number: int) -> list[int]:
        name = f"s:sample:{number}"
        row = whole.catalogue.sampler(name, ALICE)
        out = await whole.does(name, sample([1, 2], seed=5), target=row.target)
        return [int(token) for token in out.sequences[0].tokens]

    async with lasting(tmp_path / "a", securing) as first:
        await first.model(LANE)
        for number in range(3):
            await steps(first, number, number + 1)
            save = SaveWeightsForSampler(None, SamplingSessionId(f"s:sample:{number}"))
            await first.does(LANE, save)
        expected = [await sampled(first, number) for number in range(3)]
        await quiet(first)
        copy = image(tmp_path / "a", tmp_path / "b")
        await first.does(LANE, UnloadModel())
        unloaded = image(tmp_path / "a", tmp_path / "c")
        first.catalogue.finish_session("s", ALICE, "done")
        finished = image(tmp_path / "a", tmp_path / "d")
    for left in (copy, unloaded):
        async with lasting(left, later) as second:
            second.seqs = {f"s:sample:{number}": 7 for number in range(3)}
            assert [await sampled(second, number) for number in range(3)] == expected
    async with lasting(finished, securing) as last:
        with pytest.raises(Gone):
            await sampled(last, 0)
    assert "could not be written" not in caplog.text


async def test_versions_that_were_half_written_are_written_again(tmp_path: Path) -> None:
    async with lasting(tmp_path / "a", SELDOM) as first:
        await first.model(LANE)
        await first.does(LANE, SaveWeightsForSampler(None, SamplingSessionId("s:sample:0")))
        version = first.catalogue.sampler("s:sample:0", ALICE).target.version
        assert version is not None
        half = first.actor._parts.snapshots.version_directory(version)
        copy = image(tmp_path / "a", tmp_path / "b")
    half = copy / half.relative_to(tmp_path / "a")
    half.mkdir(parents=True)
    (half / "adapter_model.safetensors").write_bytes(b"half")
    async with lasting(copy, ALWAYS) as second:
        goes_on(second, 1)
        await steps(second, 0, 2)
        await quiet(second)
        assert second.actor._parts.snapshots.of(LANE)  # type: ignore[arg-type]
        assert second.actor.models.pins.get(version).directory == half


async def test_a_save_whose_answer_was_lost_finds_its_own_checkpoint(tmp_path: Path) -> None:
    """The row was there, the outcome was not: its repeat is not told that the name is taken."""
    async with lasting(tmp_path / "a") as first:
        await first.model(LANE)
        gate = Gate(ControlPass)
        saved = await first.does(LANE, SaveWeights("kept"))
        gate.open()
        row = first.catalogue.find_checkpoint(saved.path)
        assert row is not None
        assert row.request_id == f"{LANE}:1"
        copy = image(tmp_path / "a", tmp_path / "b")
        cut = image(tmp_path / "a", tmp_path / "c")
    # The journal of before the outcome, the catalogue of after it.
    shutil.rmtree(cut / "journal")
    async with lasting(tmp_path / "e") as other:
        await other.model(LANE)
        waiting = Gate(ControlPass)
        other.actor._parts.engine._before = waiting  # type: ignore[attr-defined]
        promise = await other.send(LANE, SaveWeights("kept"))
        shutil.copytree(tmp_path / "e" / "journal", cut / "journal")
        waiting.open()
        await other.outcome(promise)
    async with lasting(cut) as second:
        outcome = await second.outcome(promise)
        assert outcome == WeightsSaved(saved.path)
        again = second.catalogue.find_checkpoint(saved.path)
        assert again is not None
        assert again.created_at == row.created_at
        goes_on(second, 1)
        taken = await second.fails(LANE, SaveWeights("kept"))
        assert "exists already" in taken.error.message
    assert copy.exists()


async def test_followers_of_a_save_that_was_cut_short_read_its_version(tmp_path: Path) -> None:
    """Its row was there and moved them; its outcome was not."""
    async with lasting(tmp_path / "a") as first:
        await first.model(LANE)
        for number in range(2):
            await steps(first, number, number + 1)
            name = SamplingSessionId(f"s:sample:{number}")
            save = SaveWeightsForSampler(None, name, inflight=True)
            before = image(tmp_path / "a", tmp_path / f"before-{number}")
            promise = await first.send(LANE, save)
            await first.outcome(promise)
        row = first.catalogue.sampler("s:sample:0", ALICE)
        assert row.target.version == promise
        expected = await first.does("s:sample:0", sample([1, 2], seed=5), target=row.target)
        after = image(tmp_path / "a", tmp_path / "after")
    async with lasting(before, engine=FakeEngine([BASE], vocab_size=64, before=_never)) as cut:
        goes_on(cut, first.seqs[LANE] - 1)
        assert await cut.send(LANE, save) == promise
    for file in before.glob("catalogue.sqlite*"):
        file.unlink()
    for file in after.glob("catalogue.sqlite*"):
        shutil.copy(file, before)
    async with lasting(before) as second:
        sampled = await second.does("s:sample:0", sample([1, 2], seed=5), target=row.target, seq=7)
        assert not isinstance(await second.outcome(promise), Failed)
    np.testing.assert_array_equal(sampled.sequences[0].tokens, expected.sequences[0].tokens)


def _never(work: Pass) -> None:
    raise EngineDied("for the test")


async def test_a_damaged_model_is_stopped_alone_and_says_what_to_do(tmp_path: Path) -> None:
    async with lasting(tmp_path / "a", ALWAYS) as first:
        await first.model(LANE)
        saved = await first.does(LANE, SaveWeights("kept"))
        await steps(first, 0, 3)
        await first.model("t:train:0")
        await steps(first, 0, 3, "t:train:0")
        expected = await first.logprobs("t:train:0")
        await quiet(first)
        await quiet(first, "t:train:0")
        copy = image(tmp_path / "a", tmp_path / "b")
        (theirs,) = first.actor._parts.snapshots.of(LANE)[-1:]  # type: ignore[arg-type]
    for manifest in (copy / theirs.parent.relative_to(tmp_path / "a")).glob("*/manifest.json"):
        manifest.unlink()
    async with lasting(copy, ALWAYS) as second:
        goes_on(second, first.seqs[LANE])
        failed = await second.fails(LANE, batch(3))
        assert isinstance(failed.error, ServerError)
        assert saved.path in failed.error.message
        goes_on(second, first.seqs["t:train:0"], "t:train:0")
        np.testing.assert_array_equal(await second.logprobs("t:train:0"), expected)


async def test_a_base_model_that_is_not_served_makes_its_models_wait(tmp_path: Path) -> None:
    gate = Gate(TrainPass)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=gate)
    async with lasting(tmp_path / "a", engine=engine) as first:
        await first.model(LANE)
        promise = await first.send(LANE, batch(0))
        copy = image(tmp_path / "a", tmp_path / "b")
        gate.open()
    async with lasting(copy, engine=FakeEngine(["another"])) as second:
        goes_on(second, 1)
        with pytest.raises(Unavailable, match="not served now"):
            await second.send(LANE, STEP)
        assert "not served now" in second.admission.why_waiting(promise)
        assert second.admission.queue_state(promise) == "paused_capacity"
    async with lasting(copy) as third:
        assert not isinstance(await third.outcome(promise), Failed)


async def test_a_base_model_that_cannot_be_loaded_makes_its_own_models_wait(
    tmp_path: Path,
) -> None:
    gate = Gate(TrainPass)
    engine = FakeEngine([BASE, "other"], vocab_size=64, context_length=64, before=gate)
    async with lasting(tmp_path / "a", engine=engine) as first:
        await first.model(LANE)
        promise = await first.send(LANE, batch(0))
        copy = image(tmp_path / "a", tmp_path / "b")
        gate.open()
    unloadable = {BASE: "model.safetensors is cut short"}
    half = FakeEngine([BASE, "other"], vocab_size=64, context_length=64, unloadable=unloadable)
    async with lasting(copy, engine=half) as second:
        await second.actor.loaded()
        goes_on(second, 1)
        with pytest.raises(Unavailable, match="cut short"):
            await second.send(LANE, STEP)
        assert "cut short" in second.admission.why_waiting(promise)
        assert second.admission.queue_state(promise) == "paused_capacity"
        await second.does("x:train:0", CreateModel("other", LoraConfig(rank=8)))
        await second.does("x:train:0", batch(0))
    async with lasting(copy, engine=FakeEngine([BASE, "other"], vocab_size=64)) as third:
        assert not isinstance(await third.outcome(promise), Failed)


async def test_a_request_that_ends_the_process_each_time_fails_at_last(tmp_path: Path) -> None:
    """And nobody fails with it who shared its passes."""
    data = tmp_path / "0"
    lanes = (LANE, "t:train:0")
    async with lasting(data) as whole:
        for lane in lanes:
            await whole.model(lane)
    promises: list[RequestId] = []
    for life in range(3):
        gate = Gate(TrainPass)
        engine = Late(gate)
        async with lasting(data, engine=engine) as whole:
            promises = promises or [await whole.send(lane, batch(0), seq=1) for lane in lanes]
            engine.come.set()
            await until(lambda: any(each.started for each in whole.actor.backlog))
            await whole.actor._parts.journal.flushed()
            data = image(data, tmp_path / str(life + 1))
            gate.open()
    async with lasting(data) as last:
        outcomes = [await last.outcome(promise) for promise in promises]
        assert sum(isinstance(each, Failed) for each in outcomes) == 1
        (failed,) = (each for each in outcomes if isinstance(each, Failed))
        assert "ended 3 times" in failed.error.message
        lane = promises[outcomes.index(failed)].rpartition(":")[0]
        await last.does(lane, STEP, seq=2)


async def test_what_ends_each_start_when_it_is_done_again_stops_its_model_alone(
    tmp_path: Path,
) -> None:
    """And nobody stops with it who shared its passes, or was killed as often by something else."""
    data, poison = tmp_path / "0", RequestId("t:train:0:1")
    async with lasting(data, securing=SELDOM) as first:
        for lane in (LANE, "t:train:0"):
            await first.model(lane)
            await steps(first, 0, 3, lane)
        expected = await first.logprobs(LANE)

    companies: list[int] = []

    def dies(work: Pass) -> None:
        if isinstance(work, TrainPass):
            companies.append(len({piece.model_id for piece in work.pieces}))
            if poison in {piece.request_id for piece in work.pieces}:
                raise EngineDied("the device fell off the bus")

    def engine() -> FakeEngine:
        return FakeEngine([BASE], vocab_size=64, context_length=64, before=dies)

    for _ in range(3):
        async with lasting(data, engine=engine(), securing=SELDOM) as whole:
            with pytest.raises(ServerError, match="could not be made again: the device fell"):
                await whole.actor.lost()
    assert companies[0] == 2, "at first nobody is suspect"
    assert set(companies[1:]) == {1}
    for life in range(4):  # and each ends in a kill, when nothing is done again any more
        async with lasting(data, engine=engine(), securing=SELDOM) as whole:
            await whole.actor.loaded()
            await whole.actor._parts.journal.flushed()
            data = image(data, tmp_path / f"killed {life}")
    async with lasting(data, engine=engine(), securing=SELDOM) as last:
        goes_on(last, 6)
        np.testing.assert_array_equal(await last.logprobs(LANE), expected)
        failed = await last.fails("t:train:0", STEP, seq=7)
        assert (
            f"ended 3 times while it did {poison} again; make a new model" in failed.error.message
        )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is the server's, and tells nobody
            await asyncio.sleep(0.001)


async def test_models_side_by_side_come_back_as_each_would_alone(tmp_path: Path) -> None:
    """Of different lengths, in shared passes, one of them from a snapshot."""
    lanes = [f"s{number}:train:0" for number in range(4)]
    async with lasting(tmp_path / "a", SELDOM) as first:
        for number, lane in enumerate(lanes):
            await first.model(lane)
            await steps(first, 0, 1 + number, lane)
        await first.actor._runner.securing.snapshot_now([ModelId(lanes[2])])
        for number, lane in enumerate(lanes):
            await steps(first, 1 + number, 3 + number, lane)
        copy = image(tmp_path / "a", tmp_path / "b")
        expected = [await first.logprobs(lane) for lane in lanes]
    passes: list[Pass] = []
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=passes.append)
    async with lasting(copy, SELDOM, engine=engine) as second:
        for lane, logprobs in zip(lanes, expected, strict=True):
            goes_on(second, first.seqs[lane] - 1, lane)
            np.testing.assert_array_equal(await second.logprobs(lane), logprobs)
    fused = [
        len({piece.model_id for piece in each.pieces})
        for each in passes
        if isinstance(each, OptimPass)
    ]
    assert max(fused) == 4


async def test_while_the_disk_is_full_training_is_not_taken_and_samples_are(
    tmp_path: Path,
) -> None:
    """What was taken before waits, says why, and is answered as soon as there is room."""
    files = FaultyFiles()
    async with lasting(tmp_path / "a", files=files) as whole:
        await whole.model(LANE)
        files.room = 0
        waiting = whole.admission.submit(whole.work(LANE, batch(0)))
        await until(lambda: whole.actor._parts.journal.trouble is not None)
        with pytest.raises(Unavailable, match="No space left"):
            await whole.send(LANE, STEP, seq=2)
        await whole.does("s:sample:0", sample([1, 2]), target=SamplerTarget(BASE))
        await until(lambda: whole.actor.backlog.find(waiting.request_id) is None)
        assert whole.admission.queue_state(waiting.request_id) == "paused_capacity"
        assert "No space left" in whole.admission.why_waiting(waiting.request_id)
        files.room = None
        await waiting.committed
        assert not isinstance(await whole.outcome(waiting.request_id), Failed)
        await whole.does(LANE, STEP, seq=2)
        copy = image(tmp_path / "a", tmp_path / "b")
    async with lasting(copy) as second:
        goes_on(second, 2)
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 1)
        )


async def test_a_journal_that_fails_stops_the_node_and_the_next_goes_on(tmp_path: Path) -> None:
    """Nothing is acknowledged that is not durable; what was is done by the next process."""
    files = FaultyFiles()
    async with lasting(tmp_path / "a", files=files) as whole:
        await whole.model(LANE)
        await whole.does(LANE, batch(0))

        def broken(name: str) -> None:
            raise RuntimeError("a bolt fell off")

        files.before = broken
        with pytest.raises(Unavailable, match="send it again to the next process"):
            await whole.send(LANE, STEP)
        with pytest.raises(ServerError, match="writer has failed: RuntimeError: a bolt fell off"):
            await whole.actor.lost()
        with pytest.raises(Unavailable, match="a bolt fell off"):
            await whole.send(LANE, batch(1))
        assert not whole.actor.ready
    async with lasting(tmp_path / "a") as second:
        goes_on(second, 1)
        await second.does(LANE, STEP)
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 1)
        )


async def test_after_a_drain_nothing_is_done_again(tmp_path: Path) -> None:
    passes: list[Pass] = []
    async with lasting(tmp_path / "a", SELDOM) as first:
        await first.model(LANE)
        await steps(first, 0, 2)
        await first.does(LANE, batch(2))  # snapshots hold gradients, too
        assert await first.admission.drain(5.0) == 0
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=passes.append)
    async with lasting(tmp_path / "a", SELDOM, engine=engine) as second:
        goes_on(second, first.seqs[LANE])
        await second.does(LANE, STEP)
        assert len(passes) == 2, passes
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 3)
        )


async def test_what_a_drain_cannot_finish_goes_on_with_the_next_start(tmp_path: Path) -> None:
    """The pass that runs counts still; what waits behind it is not begun."""
    gate = Gate(TrainPass)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=gate)
    async with lasting(tmp_path / "a", SELDOM, engine=engine) as first:
        await first.model(LANE)
        promises = [await first.send(LANE, each) for each in (batch(0), STEP, batch(1), STEP)]
        draining = asyncio.create_task(first.admission.drain(0.0))
        await until(lambda: first.actor._ending)
        gate.open()
        assert await draining == 3
        assert await first.futures.wait(first.futures.find(promises[1], ALICE), 9.0) is None
        with pytest.raises(Unavailable):
            await first.send(LANE, STEP)
    async with lasting(tmp_path / "a", SELDOM) as second:
        for promise in promises:
            assert not isinstance(await second.outcome(promise), Failed)
        goes_on(second, 4)
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 2)
        )


async def test_work_that_an_engine_died_of_goes_on_with_another(tmp_path: Path) -> None:
    """Samples are to be sent again; training waits, and its polls say for what."""

    def die(work: Pass) -> None:
        if isinstance(work, OptimPass):
            raise EngineDied("the device fell off the bus")

    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=die)
    async with lasting(tmp_path / "a", engine=engine) as first:
        await first.model(LANE)
        await first.does(LANE, batch(0))
        promise = await first.send(LANE, STEP)
        with pytest.raises(EngineDied):
            await first.actor.lost()
        assert first.admission.queue_state(promise) == "paused_capacity"
        assert "fell off the bus" in first.admission.why_waiting(promise)
        assert await first.admission.drain(30.0) == 1
    async with lasting(tmp_path / "a") as second:
        assert not isinstance(await second.outcome(promise), Failed)
        goes_on(second, 2)
        np.testing.assert_array_equal(
            await second.logprobs(LANE), await undisturbed(tmp_path / "c", 1)
        )


async def test_an_engine_that_dies_in_a_replay_is_not_said_to_lack_its_weights(
    tmp_path: Path,
) -> None:
    def die(work: Pass) -> None:
        if isinstance(work, OptimPass):
            raise EngineDied("the device fell off the bus")

    async with lasting(tmp_path / "a") as first:
        await first.model(LANE)
        await first.step(LANE)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=die)
    async with lasting(tmp_path / "a", engine=engine) as second:
        with pytest.raises(ServerError, match="could not be made again: the device fell"):
            await second.actor.lost()


async def test_a_creation_that_was_not_answered_is_made(tmp_path: Path) -> None:
    gate = Gate(ControlPass)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=gate)
    async with lasting(tmp_path / "a", engine=engine) as first:
        first.catalogue.add_session(Session(SessionId("s"), ALICE, 0.0))
        promise = await first.send(LANE, CreateModel(BASE, LoraConfig(rank=8)))
        gradient = await first.send(LANE, batch(0))
        copy = image(tmp_path / "a", tmp_path / "b")
        gate.open()
    async with lasting(copy) as second:
        for each in (promise, gradient):
            assert not isinstance(await second.outcome(each), Failed)
        run = second.catalogue.run(LANE, ALICE)
        assert run.lora.seed is not None


async def test_a_hole_in_the_order_is_waited_for_again(tmp_path: Path) -> None:
    """The POST of operation 1 was lost; 2 had come and was refused; 3 waits."""
    gate = Gate(TrainPass)
    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=gate)
    config = SchedulerConfig(gap_seconds=30.0, atom_tokens=8)
    async with lasting(tmp_path / "a", engine=engine, config=config) as first:
        await first.model(LANE)
        await first.fails(LANE, training([]), seq=2)
        third = await first.send(LANE, STEP, seq=3)
        copy = image(tmp_path / "a", tmp_path / "b")
        gate.open()
    async with lasting(copy, config=config) as second:
        await second.does(LANE, batch(0), seq=1)
        done = await second.outcome(third)
        assert "skipped_no_gradients" not in done.metrics  # type: ignore[union-attr]


def test_versions_are_named_after_requests() -> None:
    """What recovery reads from their names."""
    assert VersionId("s:train:0:5").rpartition(":")[0] == LANE
    assert SamplerTarget(BASE, VersionId("s:train:0:5")).path is None
