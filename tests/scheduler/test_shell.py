"""The server below HTTP, end to end: what a client's requests come to."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shell import ALICE, BASE, BOB, SECONDS, Shell, datum, sample, shell, training

from openrl.catalogue import Sampler
from openrl.config import SchedulerConfig
from openrl.engines.base import (
    DecodePass,
    OptimPass,
    Pass,
    RowId,
    TrainPass,
)
from openrl.engines.fake import FakeEngine
from openrl.errors import (
    EngineDied,
    Gone,
    InvalidDatum,
    NotFound,
    Overloaded,
    ServerError,
    Unavailable,
    UserError,
)
from openrl.journal import NullJournal
from openrl.types import (
    AdamParams,
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    LoadWeights,
    LoraConfig,
    ModelCreated,
    OptimStep,
    Outcome,
    RequestId,
    SampleOutput,
    SamplerTarget,
    SamplerWeightsSaved,
    SamplingSessionId,
    SaveWeights,
    SaveWeightsForSampler,
    SessionId,
    TinkerPath,
    UnloadModel,
    WeightsLoaded,
    WeightsSaved,
    Work,
)

# --- training ------------------------------------------------------------------------------


async def test_a_request_of_several_atoms_is_answered_as_one(tmp_path: Path) -> None:
    """Atoms of at most 8 tokens: five datums of 3 make three atoms."""
    data = [datum([i, i + 1, i + 2], [i + 1, i + 2, i + 3]) for i in range(5)]
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        together = await whole.does(lane, training(data, forward_only=True))
        alone = [await whole.does(lane, training([d], forward_only=True)) for d in data]
    assert len(together.outputs) == 5
    for output, one in zip(together.outputs, alone, strict=True):
        np.testing.assert_array_equal(output["logprobs"], one.outputs[0]["logprobs"])
    total = sum(one.metrics["loss:sum"] for one in alone)
    assert together.metrics["loss:sum"] == pytest.approx(total)
    assert together.metrics["num_tokens:sum"] == 15


async def test_chunks_add_up_to_the_whole(tmp_path: Path) -> None:
    data = [datum([i, i + 1, i + 2], [i + 1, i + 2, i + 3]) for i in range(5)]
    async with shell(tmp_path) as both:
        a, b = await both.model("s:train:0"), await both.model("s:train:1")
        await both.does(a, training(data))
        for one in data:
            await both.does(b, training([one]))
        for lane in (a, b):
            await both.does(lane, OptimStep(AdamParams(learning_rate=0.1)))
        np.testing.assert_allclose(await both.logprobs(a), await both.logprobs(b), rtol=1e-6)


async def test_operations_run_in_order_though_sent_together(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        before = await whole.logprobs(lane)
        sent = [
            await whole.send(lane, training([datum([1, 2, 3], [2, 3, 4])])),
            await whole.send(lane, OptimStep(AdamParams(learning_rate=0.1))),
        ]
        after = await whole.logprobs(lane)
        versions = [await whole.outcome(request) for request in sent]
    assert after.sum() > before.sum()
    assert versions[1].version == 1  # type: ignore[union-attr]


async def test_a_hole_in_the_sequence_is_waited_for_and_passed_over(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        work = training([datum([1, 2], [2, 3])])
        await whole.does(lane, work, seq=7)
        failed = await whole.fails(lane, work, seq=3)
    assert "seq_id 3" in failed.error.message


async def test_a_step_without_gradients_changes_nothing(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        await whole.step(lane)
        before = await whole.logprobs(lane)
        done = await whole.does(lane, OptimStep(AdamParams(learning_rate=0.5)))
        assert done.metrics["skipped_no_gradients"] == 1.0
        np.testing.assert_array_equal(await whole.logprobs(lane), before)


# --- bad content ---------------------------------------------------------------------------


async def test_bad_training_content_fails_through_the_future_and_alone(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        good = datum([1, 2], [2, 3])
        bad = await whole.send(lane, training([good, datum([1, 2], [2, 99])]))
        await whole.step(lane)
        outcome = await whole.outcome(bad)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, InvalidDatum)
    assert (outcome.error.index, outcome.error.field) == (1, "target_tokens")
    assert outcome.error.category == "user"


async def test_a_refused_request_leaves_no_hole_to_wait_for(tmp_path: Path) -> None:
    async with shell(tmp_path, config=SchedulerConfig(gap_seconds=1000.0)) as whole:
        lane = await whole.model()
        await whole.fails(lane, training([]))
        await whole.does(lane, training([datum([1], [2])]))


async def test_a_failed_request_leaves_no_gradient(tmp_path: Path) -> None:
    """Its second atom overflows, after the first has gone well."""
    fine = datum([1, 2, 3], [2, 3, 4])
    policy = {
        "target_tokens": np.array([2, 3, 4]),
        "advantages": np.ones(3, np.float32),
        "logprobs": np.full(3, -1.0, np.float32),
    }
    over = dict(policy, logprobs=np.full(3, -1000.0, np.float32))
    data = [type(fine)(fine.tokens, policy) for _ in range(3)] + [type(fine)(fine.tokens, over)]
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        failed = await whole.fails(lane, training(data, "importance_sampling"))
        assert isinstance(failed.error, InvalidDatum)
        assert failed.error.index == 3
        done = await whole.does(lane, OptimStep(AdamParams(learning_rate=0.5)))
    assert done.metrics["skipped_no_gradients"] == 1.0


async def test_a_model_that_cannot_be_made_says_so_to_what_follows(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        failed = await whole.fails("s:train:0", CreateModel(BASE, LoraConfig(rank=12)))
        after = await whole.fails("s:train:0", training([datum([1], [2])]))
        unknown = await whole.fails("s:train:1", CreateModel("nope", LoraConfig()))
    assert failed.error.message == "lora_config.rank must be a power of 2"
    assert "was not created: lora_config.rank" in after.error.message
    assert BASE in unknown.error.message


async def test_what_is_queued_behind_a_failed_creation_fails_with_its_cause(
    tmp_path: Path,
) -> None:
    missing = TinkerPath("tinker://x:train:0/weights/none")
    async with shell(tmp_path) as whole:
        creation = CreateModelFromCheckpoint(BASE, LoraConfig(rank=8), missing, False)
        first = await whole.send("s:train:0", creation)
        second = await whole.send("s:train:0", training([datum([1], [2])]))
        for request in (first, second):
            outcome = await whole.outcome(request)
            assert isinstance(outcome, Failed)
            assert "no checkpoint" in outcome.error.message


async def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        with pytest.raises(NotFound):
            await whole.send("s:train:0", OptimStep(AdamParams()), seq=1)


# --- once ----------------------------------------------------------------------------------


async def test_a_repeat_runs_once_and_has_the_first_answer(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        work = training([datum([1, 2, 3], [2, 3, 4])])
        first = await whole.send(lane, work, seq=1)
        again = await whole.send(lane, work, seq=1)
        assert first == again
        await whole.outcome(first)
        assert await whole.send(lane, work, seq=1) == first  # resolved by now
        await whole.does(lane, OptimStep(AdamParams(learning_rate=0.1)), seq=2)
        b = await whole.model("s:train:1")
        await whole.step(b)
        np.testing.assert_array_equal(await _logprobs(whole, lane, 3), await whole.logprobs(b))


async def _logprobs(whole: Shell, lane: str, seq: int) -> np.ndarray:
    work = training([datum([1, 2, 3], [2, 3, 4])], forward_only=True)
    return np.asarray((await whole.does(lane, work, seq=seq)).outputs[0]["logprobs"])


async def test_seeds_are_drawn_before_the_journal_sees_the_work(tmp_path: Path) -> None:
    class Recorder(NullJournal):
        def __init__(self) -> None:
            self.log: list[str] = []
            self.works: list[Work] = []

        def accepted(self, work: Work, atom_tokens: int | None = None) -> None:
            self.works.append(work)
            self.log.append(f"accepted {work.request_id}")

        def committed(self, work: Work, outcome: Outcome) -> None:
            self.log.append(f"committed {work.request_id}")

        async def flushed(self) -> None:
            self.log.append("flushed")

    journal = Recorder()
    async with shell(tmp_path, journal=journal) as whole:
        lane = await whole.model()
        await whole.step(lane)
        target = SamplerTarget(BASE)
        await whole.does("s:sample:0", sample([1, 2]), target=target)
    assert journal.works[0].operation.lora.seed is not None  # type: ignore[union-attr]
    assert len(journal.works) == 3, "samples are not journalled"
    for work in journal.works:
        accepted = journal.log.index(f"accepted {work.request_id}")
        committed = journal.log.index(f"committed {work.request_id}")
        assert "flushed" in journal.log[accepted:committed]
        assert "flushed" in journal.log[committed:]


# --- owners --------------------------------------------------------------------------------


async def test_another_owners_names_are_not_found(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        path = (await whole.does(lane, SaveWeights("a"))).path
        with pytest.raises(NotFound):
            await whole.send(lane, OptimStep(AdamParams()), owner=BOB)
        with pytest.raises(NotFound):  # also by repeating a request that is there
            await whole.send(lane, SaveWeights("a"), seq=1, owner=BOB)
        with pytest.raises(NotFound):
            whole.admission.cancel(RequestId(f"{lane}:1"), BOB)
        theirs = await whole.model("b:train:0", owner=BOB)
        stolen = await whole.fails(theirs, LoadWeights(path, False), owner=BOB)
    assert isinstance(stolen.error, NotFound)


# --- checkpoints ---------------------------------------------------------------------------


async def test_save_and_load_bring_the_weights_back(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        await whole.step(lane)
        saved = await whole.does(lane, SaveWeights("a"))
        assert saved == WeightsSaved(TinkerPath("tinker://s:train:0/weights/a"))
        at_save = await whole.logprobs(lane)
        await whole.step(lane)
        onward = await whole.logprobs(lane)
        assert not np.array_equal(onward, at_save)
        row = whole.catalogue.checkpoint(saved.path, ALICE)
        assert row.size_bytes == whole.store.total_bytes() > 0

        await whole.does(lane, LoadWeights(saved.path, with_optimizer=True))
        np.testing.assert_array_equal(await whole.logprobs(lane), at_save)
        await whole.step(lane)  # with Adam's moments: the same second step
        np.testing.assert_array_equal(await whole.logprobs(lane), onward)

        creation = CreateModelFromCheckpoint(BASE, row.lora, saved.path, False)
        made = await whole.does("s:train:1", creation)
        assert made == WeightsLoaded(saved.path, "s:train:1")
        np.testing.assert_array_equal(await whole.logprobs("s:train:1"), at_save)
        await whole.step("s:train:1")  # with fresh moments: another one
        assert not np.array_equal(await whole.logprobs("s:train:1"), onward)


async def test_a_name_is_taken_unless_overwritten(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        path = (await whole.does(lane, SaveWeights("a"))).path
        first = whole.catalogue.checkpoint(path, ALICE)
        taken = await whole.fails(lane, SaveWeights("a"))
        assert taken.error.category == "user"
        assert whole.catalogue.checkpoint(path, ALICE) == first
        await whole.step(lane)
        at_save = await whole.logprobs(lane)
        await whole.does(lane, SaveWeights("a", overwrite=True))
        second = whole.catalogue.checkpoint(path, ALICE)
        assert second.version != first.version
        assert not whole.store.exists(path, first.created_at)
        await whole.step(lane)
        await whole.does(lane, LoadWeights(path, False))
        np.testing.assert_array_equal(await whole.logprobs(lane), at_save)


async def test_a_checkpoint_that_does_not_fit_says_what_differs(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        path = (await whole.does(lane, SaveWeights("a"))).path
        bare = (await whole.does(lane, SaveWeightsForSampler("b", None))).path
        await whole.does("s:train:1", CreateModel(BASE, LoraConfig(rank=4, train_mlp=False)))
        failed = await whole.fails("s:train:1", LoadWeights(path, False))
        without = await whole.fails(lane, LoadWeights(bare, True))
    assert failed.error.message == (
        "Checkpoint model configuration is incompatible with target model: "
        "checkpoint rank is 8 but target model rank is 4; "
        "checkpoint train_mlp is True but target model train_mlp is False"
    )
    assert "no optimizer state" in without.error.message


async def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def disk_full(work: Pass) -> None:
        raise OSError(28, "No space left on device")

    engine = FakeEngine([BASE], vocab_size=64, context_length=64)
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        engine._before = disk_full
        failed = await whole.fails(lane, SaveWeights("a"))
        engine._before = None
        assert "No space left" in failed.error.message
        assert whole.catalogue.checkpoints(ALICE).total == 0
        assert not list((tmp_path / "checkpoints" / ".staging").iterdir())
        await whole.does(lane, SaveWeights("a"))


async def test_a_save_that_cannot_be_published_leaves_nothing(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        in_the_way = tmp_path / "checkpoints" / lane
        in_the_way.touch()
        failed = await whole.fails(lane, SaveWeights("a"))
        assert isinstance(failed.error, ServerError)
        assert whole.store.total_bytes() == 0
        assert whole.catalogue.checkpoints(ALICE).total == 0
        in_the_way.unlink()
        await whole.does(lane, SaveWeights("a"))


async def test_after_a_restart_checkpoints_load_and_old_models_say_what_to_do(
    tmp_path: Path,
) -> None:
    async with shell(tmp_path) as first:
        lane = await first.model()
        await first.step(lane)
        at_save = await first.logprobs(lane)
        path = (await first.does(lane, SaveWeights("a"))).path
        ephemeral = SamplingSessionId("s:sample:0")
        await first.does(lane, SaveWeightsForSampler(None, ephemeral))
    async with shell(tmp_path) as second:
        assert [run.model_id for run in second.catalogue.runs(ALICE).items] == [lane]
        failed = await second.fails(lane, OptimStep(AdamParams()), seq=9)
        assert path in failed.error.message
        lora = second.catalogue.checkpoint(path, ALICE).lora
        await second.does("s:train:1", CreateModelFromCheckpoint(BASE, lora, path, True))
        np.testing.assert_array_equal(await second.logprobs("s:train:1"), at_save)
        target = second.catalogue.sampler(ephemeral, ALICE).target
        with pytest.raises(Gone):
            await second.send(ephemeral, sample([1]), target=target)


async def test_an_unloaded_model_takes_no_more_work(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        await whole.does(lane, UnloadModel())
        failed = await whole.fails(lane, OptimStep(AdamParams()))
    assert isinstance(failed.error, Gone)


# --- samples -------------------------------------------------------------------------------


def _tokens(output: SampleOutput) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in output.sequences]


async def test_samples_pin_the_version_they_were_made_from(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        session = SamplingSessionId("s:sample:0")
        done = await whole.does(lane, SaveWeightsForSampler(None, session))
        assert done == SamplerWeightsSaved(sampling_session_id=session)
        path = (await whole.does(lane, SaveWeightsForSampler("v0", None))).path
        ephemeral = whole.catalogue.sampler(session, ALICE).target
        named = whole.catalogue.checkpoint(path, ALICE).target
        ask = sample([1, 2, 3], n=2, seed=5)
        base = await whole.does("s:sample:1", ask, target=SamplerTarget(BASE))
        for _ in range(3):
            await whole.step(lane)
        pinned = await whole.does(session, ask, target=ephemeral)
        loaded = await whole.does("s:sample:2", ask, target=named)
        await whole.does(lane, SaveWeightsForSampler(None, SamplingSessionId("s:sample:3")))
        newer = whole.catalogue.sampler("s:sample:3", ALICE).target
        moved = await whole.does("s:sample:3", ask, target=newer)
    assert _tokens(base) == _tokens(pinned) == _tokens(loaded)  # a fresh adapter is the base
    assert len(_tokens(base)) == 2
    assert _tokens(base)[0] != _tokens(base)[1]
    assert any(
        not np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(base.sequences, moved.sequences, strict=True)
    )


async def test_sampled_logprobs_are_the_trainers(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        await whole.step(lane)
        await whole.does(lane, SaveWeightsForSampler(None, SamplingSessionId("s:sample:0")))
        target = whole.catalogue.sampler("s:sample:0", ALICE).target
        output = await whole.does("s:sample:0", sample([1, 2], 6, seed=3), target=target)
        sequence = output.sequences[0]
        tokens = [1, 2, *sequence.tokens.tolist()]
        scored = await whole.does(lane, training([datum(tokens[:-1], tokens[1:])]))
    np.testing.assert_allclose(sequence.logprobs, scored.outputs[0]["logprobs"][1:], rtol=1e-5)


async def test_many_samples_of_several_sessions(tmp_path: Path) -> None:
    """More rows than the engine holds, and so little KV memory that some are preempted."""
    preempted: list[RowId] = []

    def watch(work: Pass) -> None:
        if isinstance(work, DecodePass):
            preempted.extend(work.preempt)

    engine = FakeEngine(
        [BASE],
        vocab_size=64,
        context_length=64,
        max_rows=6,
        kv_blocks=12,
        block_tokens=4,
        before=watch,
    )
    config = SchedulerConfig(decode_steps=2)
    async with shell(tmp_path, engine, config) as whole:
        lanes = [f"{owner}:sample:{i}" for owner in ("s", "t") for i in range(2)]
        sent = {
            (lane, seq): await whole.send(
                lane, sample([1, 2, 3], 20, n=2, seed=seq), target=SamplerTarget(BASE)
            )
            for seq in range(4)
            for lane in lanes
        }
        outputs = {key: await whole.outcome(request) for key, request in sent.items()}
        alone = [
            await whole.does(
                "u:sample:0", sample([1, 2, 3], 20, n=2, seed=seq), target=SamplerTarget(BASE)
            )
            for seq in range(4)
        ]
    assert preempted
    for (_, seq), output in outputs.items():
        assert isinstance(output, SampleOutput)
        assert _tokens(output) == _tokens(alone[seq])


async def test_bad_samples_are_refused_at_once(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        for bad in (sample([]), sample([64]), sample([1], 64), sample([1], temperature=-1.0)):
            with pytest.raises(UserError):
                await whole.send("s:sample:0", bad, target=SamplerTarget(BASE))
        with pytest.raises(NotFound):
            await whole.send("s:sample:0", sample([1]), target=SamplerTarget("nope"))


async def test_a_replaced_checkpoint_is_gone_for_its_samplers(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        path = (await whole.does(lane, SaveWeightsForSampler("v", None))).path
        checkpoint = whole.catalogue.checkpoint(path, ALICE)
        whole.catalogue.delete_checkpoint(checkpoint)
        with pytest.raises(Gone):
            await whole.send("s:sample:0", sample([1]), target=checkpoint.target)


async def test_old_pinned_versions_make_room(tmp_path: Path) -> None:
    config = SchedulerConfig(pinned_versions=16)
    async with shell(tmp_path, config=config) as whole:
        lane = await whole.model()
        for i in range(20):
            session = SamplingSessionId(f"s:sample:{i}")
            await whole.does(lane, SaveWeightsForSampler(None, session))
        oldest = whole.catalogue.sampler("s:sample:0", ALICE).target
        newest = whole.catalogue.sampler("s:sample:19", ALICE).target
        with pytest.raises(Gone, match="made room for newer ones: at most 16 "):
            await whole.send("s:sample:0", sample([1]), target=oldest)
        await whole.does("s:sample:19", sample([1]), target=newest)


async def test_weights_that_inflight_samplers_left_do_not_stay(tmp_path: Path) -> None:
    """Twenty saves that followers follow are one version in the end."""
    async with shell(tmp_path, config=SchedulerConfig(pinned_versions=2)) as whole:
        lane = await whole.model()
        await whole.does(lane, SaveWeightsForSampler(None, SamplingSessionId("s:sample:0")))
        snapshot = whole.catalogue.sampler("s:sample:0", ALICE).target
        ask = sample([1, 2, 3], n=2, seed=5)
        before = await whole.does("s:sample:0", ask, target=snapshot)
        for i in range(1, 20):
            await whole.step(lane)
            session = SamplingSessionId(f"s:sample:{i}")
            await whole.does(lane, SaveWeightsForSampler(None, session, inflight=True))
        targets = {whole.catalogue.sampler(f"s:sample:{i}", ALICE).target for i in range(1, 20)}
        (newest,) = targets
        assert newest.version == f"{lane}:{whole.seqs[lane]}"
        moved = await whole.does("s:sample:1", ask, target=newest)
        kept = await whole.does("s:sample:0", ask, target=snapshot)
    assert _tokens(kept) == _tokens(before)
    assert not np.array_equal(moved.sequences[0].logprobs, kept.sequences[0].logprobs)


# --- sessions that end ---------------------------------------------------------------------


async def test_a_finished_session_leaves_nothing_in_the_engine(tmp_path: Path) -> None:
    """What is queued still is answered first; checkpoints stay, and other sessions."""
    gate, engine = _gated(DecodePass, TrainPass)
    async with shell(tmp_path, engine=engine) as whole:
        lane, other = await whole.model(), await whole.model("t:train:0")
        for name, model in (("s:sample:0", lane), ("t:sample:0", other)):
            await whole.does(model, SaveWeightsForSampler(None, SamplingSessionId(name)))
        path = (await whole.does(lane, SaveWeights("kept"))).path
        target = whole.catalogue.sampler("s:sample:0", ALICE).target
        sent = [
            await whole.send("s:sample:0", sample([1]), target=target),
            await whole.send(lane, training([datum([1, 2], [2, 3])])),
        ]
        whole.admission.end_session(SessionId("s"))
        whole.admission.end_session(SessionId("s"))  # a repeat changes nothing
        gate.open.set()
        for request in sent:
            assert not isinstance(await whole.outcome(request), Failed)
        await whole.actor.backlog.empty()
        for _ in range(10):  # until the task that waits for that has had its turn
            await asyncio.sleep(0)
        await whole.outcome(RequestId(f"{lane}:end"))
        assert list(engine._adapters) == [other]
        assert list(engine._versions) == [
            whole.catalogue.sampler("t:sample:0", ALICE).target.version
        ]
        assert (await whole.fails(lane, SaveWeights("late"))).error.status == 410
        await whole.does(
            "t:sample:0", sample([1]), target=whole.catalogue.sampler("t:sample:0", ALICE).target
        )
        lora = whole.catalogue.checkpoint(path, ALICE).lora
        await whole.does("t:train:1", CreateModelFromCheckpoint(BASE, lora, path, True))


async def test_what_cannot_be_recorded_is_taken_back(tmp_path: Path) -> None:
    engine = FakeEngine([BASE], vocab_size=64, context_length=64)
    async with shell(tmp_path, engine=engine) as whole:
        lane = await whole.model()
        disk = sqlite3.connect(tmp_path / "catalogue.sqlite")
        disk.executescript(
            "CREATE TRIGGER full BEFORE INSERT ON nouns BEGIN SELECT RAISE(FAIL, 'full'); END;"
        )
        await whole.fails(lane, SaveWeightsForSampler(None, SamplingSessionId("s:sample:0")))
        await whole.fails("s:train:1", CreateModel(BASE, LoraConfig(rank=8)))
        await whole.fails(lane, SaveWeights("a"))
        assert list(engine._adapters) == [lane]
        assert engine._versions == {}
        assert whole.store.total_bytes() == 0
        disk.executescript("DROP TRIGGER full;")
        await whole.does(lane, SaveWeights("a"))


async def test_a_catalogue_that_cannot_be_read_fails_no_pass(tmp_path: Path) -> None:
    gate, engine = _gated(TrainPass)
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        path = (await whole.does(lane, SaveWeightsForSampler("a", None))).path
        target = whole.catalogue.checkpoint(path, ALICE).target
        training_goes_on = await whole.send(lane, training([datum([1], [2])]))
        await gate.is_reached()
        sent = await whole.send("s:sample:0", sample([1]), target=target)
        disk = sqlite3.connect(tmp_path / "catalogue.sqlite")
        disk.execute("ALTER TABLE nouns RENAME TO away")
        whole.catalogue._known.clear()
        gate.open.set()
        assert not isinstance(await whole.outcome(training_goes_on), Failed)
        lost = await whole.outcome(sent)
        assert isinstance(lost, Failed)
        assert lost.error.status == 410
        await whole.does("s:sample:1", sample([1]), target=SamplerTarget(BASE))
        disk.execute("ALTER TABLE away RENAME TO nouns")


async def test_an_ephemeral_sampler_needs_a_free_name(tmp_path: Path) -> None:
    async with shell(tmp_path) as whole:
        lane = await whole.model()
        name = SamplingSessionId("s:sample:0")
        whole.catalogue.add_sampler(
            Sampler(
                name,
                whole.work(lane, UnloadModel(), 99).session_id,
                ALICE,
                SamplerTarget(BASE),
                0.0,
            )
        )
        failed = await whole.fails(lane, SaveWeightsForSampler(None, name))
        assert failed.error.category == "user"
        assert "exists already" in failed.error.message
        await whole.step(lane)


# --- pressure, cancel ----------------------------------------------------------------------


class Gate:
    """Holds the engine's thread before passes of one kind."""

    def __init__(self, *kinds: type) -> None:
        import threading

        self.kinds = kinds
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, work: Pass) -> None:
        if isinstance(work, self.kinds):
            self.reached.set()
            assert self.open.wait(SECONDS)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, SECONDS)


def _gated(*kinds: type) -> tuple[Gate, FakeEngine]:
    gate = Gate(*kinds)
    return gate, FakeEngine([BASE], vocab_size=64, context_length=64, before=gate)


async def test_too_many_samples_of_one_owner_are_put_off(tmp_path: Path) -> None:
    gate, engine = _gated(DecodePass)
    config = SchedulerConfig(max_queued_samples=3)
    target = SamplerTarget(BASE)
    async with shell(tmp_path, engine, config) as whole:
        sent = [await whole.send("s:sample:0", sample([1]), target=target) for _ in range(3)]
        with pytest.raises(Overloaded) as refused:
            await whole.send("s:sample:0", sample([1]), seq=3, target=target)
        assert refused.value.retry_after > 0
        theirs = await whole.send("t:sample:0", sample([1]), owner=BOB, target=target)
        gate.open.set()
        for request in sent:
            await whole.outcome(request)
        await whole.outcome(theirs, BOB)
        await whole.does("s:sample:0", sample([1]), seq=3, target=target)  # the same again


async def test_training_over_the_bound_is_held_and_then_put_off(tmp_path: Path) -> None:
    gate, engine = _gated(TrainPass)
    work = training([datum([1, 2, 3], [2, 3, 4])])  # 3 tokens: 12 + 24 + 12 bytes
    config = SchedulerConfig(max_queued_bytes=100)
    async with shell(tmp_path, engine, config, hold_seconds=SECONDS) as whole:
        lane = await whole.model()
        await whole.send(lane, work)
        await whole.send(lane, work)
        held = asyncio.create_task(whole.send(lane, work))
        await gate.is_reached()
        assert not held.done()
        gate.open.set()
        await whole.outcome(await held)
    gate, engine = _gated(TrainPass)
    async with shell(tmp_path / "b", engine, config, hold_seconds=0.0) as whole:
        lane = await whole.model()
        await whole.send(lane, work)
        await whole.send(lane, work)
        with pytest.raises(Overloaded):
            await whole.send(lane, work)
        await whole.send(lane, OptimStep(AdamParams()))  # no data: never held
        gate.open.set()


async def test_cancelled_work_is_answered_and_the_rest_goes_on(tmp_path: Path) -> None:
    gate, engine = _gated(TrainPass)
    target = SamplerTarget(BASE)
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        running = await whole.send(lane, training([datum([1], [2])]))
        await gate.is_reached()
        waiting = await whole.send("s:sample:0", sample([1]), target=target)
        assert whole.admission.why_waiting(waiting)
        whole.admission.cancel(waiting, ALICE)
        outcome = await whole.outcome(waiting)
        assert isinstance(outcome, Failed)
        assert outcome.error.status == 499
        whole.admission.cancel(running, ALICE)  # has started: runs to its end
        gate.open.set()
        assert not isinstance(await whole.outcome(running), Failed)
        whole.admission.cancel(running, ALICE)  # answered: nothing to cancel
        await whole.does("s:sample:0", sample([1]), target=target)


# --- an engine in trouble ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TrainPass, OptimPass, DecodePass])
async def test_an_engine_that_raises_fails_that_pass_alone(
    tmp_path: Path, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(work: Pass) -> None:
        if isinstance(work, kind):
            raise RuntimeError("a bolt fell off")

    engine = FakeEngine([BASE], vocab_size=64, context_length=64)
    operations = {
        TrainPass: training([datum([1], [2])]),
        OptimPass: OptimStep(AdamParams()),
        DecodePass: sample([1]),
    }
    target = SamplerTarget(BASE) if kind is DecodePass else None
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        lane = "s:sample:0" if kind is DecodePass else lane
        engine._before = broken
        failed = await whole.fails(lane, operations[kind], target=target)
        assert isinstance(failed.error, ServerError)
        assert "a bolt fell off" in failed.error.message
        engine._before = None
        await whole.does(lane, operations[kind], target=target)


async def test_what_an_engine_raises_at_fails_the_culprit_alone(tmp_path: Path) -> None:
    """The others of its pass are run without it, and have the numbers of a quiet day."""
    culprit, passes = "s0:train:0", list[int]()

    def broken(work: Pass) -> None:
        if isinstance(work, TrainPass | OptimPass):
            models = {piece.model_id for piece in work.pieces}
            passes.append(len(models))
            if culprit in models:
                raise RuntimeError("a bolt fell off")

    async def three(data: Path, before: Callable[[Pass], None] | None) -> list[Any]:
        """A gradient of each of three models in one pass, and then their steps in one."""
        engine = FakeEngine([BASE], vocab_size=64, context_length=64)
        async with shell(data, engine) as whole:
            lanes = [await whole.model(f"s{number}:train:0") for number in range(3)]
            outcomes: list[Any] = []
            for operation in (training([datum([1, 2, 3], [2, 3, 4])] * 4), OptimStep(AdamParams())):
                gate = Gate(DecodePass)
                engine._before = gate
                held = await whole.send("s:sample:0", sample([1]), target=SamplerTarget(BASE))
                await gate.is_reached()
                sent = [await whole.send(lane, operation) for lane in lanes]
                engine._before = before
                gate.open.set()
                await whole.outcome(held)
                outcomes += [await whole.outcome(each) for each in sent]
            engine._before = None
            return [*outcomes, *[await whole.logprobs(lane) for lane in lanes]]

    quiet = await three(tmp_path / "quiet", None)
    sick = await three(tmp_path / "sick", broken)
    assert passes == [3, 1, 1, 1, 3, 1, 1, 1]
    for failed in (sick[0], sick[3]):
        assert isinstance(failed, Failed)
        assert "a bolt fell off" in failed.error.message
    for other in (1, 2):
        assert sick[other].metrics == quiet[other].metrics
        assert sick[3 + other] == quiet[3 + other]
        np.testing.assert_array_equal(sick[6 + other], quiet[6 + other])


async def test_a_first_pass_that_fails_takes_no_memory_from_samples(tmp_path: Path) -> None:
    """The engine has said what it has room for when it was loaded, and nothing since."""
    async with shell(tmp_path) as whole:
        nowhere = TinkerPath("tinker://nobody:train:0/weights/a")
        creation = CreateModelFromCheckpoint(BASE, LoraConfig(rank=8), nowhere, False)
        assert (await whole.fails("s:train:0", creation)).error.status == 404
        await whole.does("s:sample:0", sample([1]), target=SamplerTarget(BASE))


async def test_a_failed_slice_leaves_other_base_models_rows_alone(tmp_path: Path) -> None:
    """The rows of one decode on while the engine raises for the other."""
    gate = Gate(DecodePass)

    def broken(work: Pass) -> None:
        gate(work)
        if isinstance(work, DecodePass) and work.weights == "fake:other":
            raise RuntimeError("a bolt fell off")

    engine = FakeEngine([BASE, "other"], vocab_size=64, context_length=64, before=broken)
    config = SchedulerConfig(decode_steps=1, quantum_seconds=0.0)
    async with shell(tmp_path, engine, config) as whole:
        long = sample([1], max_tokens=40, temperature=0.0)
        good = await whole.send("s:sample:0", long, target=SamplerTarget(BASE))
        await gate.is_reached()
        target = SamplerTarget("other")
        bad = await whole.send("t:sample:0", sample([1]), owner=BOB, target=target)
        gate.open.set()
        assert isinstance(await whole.outcome(bad, BOB), Failed)
        done = await whole.outcome(good)
        assert isinstance(done, SampleOutput), done
        assert engine._rows == {}


async def test_a_dead_engine_fails_everything_and_takes_nothing_more(tmp_path: Path) -> None:
    gate = Gate(TrainPass)

    def dies(work: Pass) -> None:
        gate(work)
        if isinstance(work, TrainPass):
            raise EngineDied("the device fell off the bus")

    engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=dies)
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        running = await whole.send(lane, training([datum([1], [2])]))
        queued = await whole.send(lane, OptimStep(AdamParams()))
        waiting = await whole.send("s:sample:0", sample([1]), target=SamplerTarget(BASE))
        gate.open.set()
        for request in (running, queued, waiting):
            outcome = await whole.outcome(request)
            assert isinstance(outcome, Failed)
            assert "fell off the bus" in outcome.error.message
        assert whole.actor.enquiries.status()[0].state == "failed"
        with pytest.raises(Unavailable):
            await whole.send(lane, OptimStep(AdamParams()))


async def test_work_waits_for_the_weights(tmp_path: Path) -> None:
    import threading

    class Slow(FakeEngine):
        loaded = threading.Event()

        def load(self, progress):  # type: ignore[no-untyped-def]
            assert self.loaded.wait(SECONDS)
            return super().load(progress)

    engine = Slow([BASE], vocab_size=64, context_length=64)
    async with shell(tmp_path, engine) as whole:
        request = await whole.send("s:train:0", CreateModel(BASE, LoraConfig(rank=8)))
        assert "loading" in whole.admission.why_waiting(request)
        assert (whole.actor.enquiries.status()[0].state, whole.actor.ready) == ("loading", False)
        engine.loaded.set()
        assert isinstance(await whole.outcome(request), ModelCreated)
        assert (whole.actor.enquiries.status()[0].state, whole.actor.ready) == ("ready", True)


async def test_weights_that_cannot_load_concern_their_own_models_alone(tmp_path: Path) -> None:
    unloadable = {"other": "model.safetensors is cut short"}
    engine = FakeEngine([BASE, "other"], vocab_size=64, context_length=64, unloadable=unloadable)
    async with shell(tmp_path, engine) as whole:
        await whole.actor.loaded()
        states = {s.name: (s.state, s.error) for s in whole.actor.enquiries.status()}
        assert states == {BASE: ("ready", None), "other": ("failed", unloadable["other"])}
        failed = await whole.fails("t:train:0", CreateModel("other", LoraConfig(rank=8)))
        assert "could not be loaded: model.safetensors is cut short" in failed.error.message
        target = SamplerTarget("other")
        failed = await whole.fails("t:sample:0", sample([1], n=2), target=target)
        assert "cut short" in failed.error.message
        lane = await whole.model()
        await whole.step(lane)
        await whole.does("s:sample:0", sample([1], n=2), target=SamplerTarget(BASE))
        assert whole.actor.backlog.find(RequestId("t:sample:0:0")) is None


async def test_weights_that_cannot_load_are_told(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def load(self, progress):  # type: ignore[no-untyped-def]
            raise OSError("model.safetensors is cut short")

    engine = Broken([BASE], vocab_size=64, context_length=64)
    async with shell(tmp_path, engine) as whole:
        with pytest.raises(ServerError, match="cut short"):
            await whole.actor.loaded()
        status = whole.actor.enquiries.status()[0]
        assert status.state == "failed"
        assert status.error is not None
        assert "cut short" in status.error
        with pytest.raises(Unavailable, match="cut short"):
            await whole.send("s:train:0", CreateModel(BASE, LoraConfig()))


# --- the end -------------------------------------------------------------------------------


async def test_draining_finishes_what_is_accepted_and_refuses_the_rest(tmp_path: Path) -> None:
    gate, engine = _gated(TrainPass)
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        running = await whole.send(lane, training([datum([1], [2])]))
        await gate.is_reached()
        draining = asyncio.create_task(whole.admission.drain(SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await whole.send(lane, OptimStep(AdamParams()))
        assert await whole.send(lane, training([datum([1], [2])]), seq=1) == running
        gate.open.set()
        assert await draining == 0
        assert whole.futures.find(running, ALICE).outcome is not None


async def test_what_a_drain_cannot_finish_fails_clearly(tmp_path: Path) -> None:
    gate, engine = _gated(TrainPass)
    async with shell(tmp_path, engine) as whole:
        lane = await whole.model()
        running = await whole.send(lane, training([datum([1], [2])]))
        await gate.is_reached()
        assert await whole.admission.drain(0.0) == 1
        outcome = whole.futures.find(running, ALICE).outcome
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, Unavailable)
        gate.open.set()
