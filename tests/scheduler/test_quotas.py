"""What one owner may have at once, through the whole shell."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.shell import ALICE, BASE, BOB, datum, sample, shell, training

from openrl.config import SchedulerConfig
from openrl.engines.base import DecodePass, OptimPass, Pass, TrainPass
from openrl.engines.fake import FakeEngine
from openrl.errors import Cancelled, Overloaded
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.entitlements import Entitlements
from openrl.types import (
    FULL,
    AdamParams,
    CreateModel,
    Failed,
    LoraConfig,
    OptimStep,
    OptimStepDone,
    SamplerTarget,
    SamplingSessionId,
    SaveWeightsForSampler,
    UnloadModel,
)
from openrl.values import OwnerQuota

CONFIG = SchedulerConfig(gap_seconds=0.05, atom_tokens=8)
ONE = training([datum([1], [2])])
STEP = OptimStep(AdamParams(learning_rate=0.1))


class Gate:
    """Holds the engine in passes of these kinds until it is opened."""

    def __init__(self, *kinds: type) -> None:
        self.open = threading.Event()
        self._kinds = kinds
        self.engine = FakeEngine([BASE], vocab_size=64, context_length=64, before=self._before)

    def _before(self, work: Pass) -> None:
        if isinstance(work, self._kinds):
            assert self.open.wait(30)


async def test_an_owner_has_so_many_models_and_no_more(tmp_path: Path) -> None:
    async with shell(tmp_path, config=replace(CONFIG, max_models=2)) as whole:
        first = await whole.model("s:train:0")
        await whole.model("s:train:1")
        await whole.model("t:train:0", owner=BOB)
        third = CreateModel(BASE, LoraConfig(rank=8))
        failed = await whole.fails("s:train:2", third)
        assert failed.error.category == "user"
        assert "2 models" in failed.error.message
        behind = await whole.fails("s:train:2", ONE)
        assert "2 models" in behind.error.message
        await whole.does(first, UnloadModel())
        await whole.does("s:train:3", third)


async def test_an_owner_has_a_quota_of_its_own_and_a_new_one_at_once(tmp_path: Path) -> None:
    config = replace(CONFIG, max_models=2, owners={BOB: OwnerQuota(max_models=1)})
    async with shell(tmp_path, config=config) as whole:
        await whole.model("s:train:0")
        await whole.model("s:train:1")
        await whole.model("t:train:0", owner=BOB)
        another = CreateModel(BASE, LoraConfig(rank=8))
        failed = await whole.fails("t:train:1", another, owner=BOB)
        assert "1 models" in failed.error.message
        whole.actor.entitlements.change(BOB, OwnerQuota(max_models=2))
        await whole.model("t:train:2", owner=BOB)
        assert whole.actor.entitlements.of(ALICE).max_models == 2


async def test_full_models_are_off_until_an_owner_may_have_some(tmp_path: Path) -> None:
    async with shell(
        tmp_path, config=replace(CONFIG, owners={BOB: OwnerQuota(full_models=1)})
    ) as w:
        failed = await w.fails("s:train:0", CreateModel(BASE, FULL))
        assert failed.error.category == "user"
        assert "lora_config is missing" in failed.error.message
        assert "scheduler.full_models" in failed.error.message
        await w.model("s:train:1")  # adapters are another matter
        await w.model("t:train:9", owner=BOB)
        await w.does("t:train:0", CreateModel(BASE, FULL), owner=BOB)
        failed = await w.fails("t:train:1", CreateModel(BASE, FULL), owner=BOB)
        assert "1 models that train all parameters" in failed.error.message
        await w.does("t:train:0", UnloadModel(), owner=BOB)
        await w.does("t:train:2", CreateModel(BASE, FULL), owner=BOB)


async def test_a_full_model_has_no_sampler(tmp_path: Path) -> None:
    async with shell(tmp_path, config=replace(CONFIG, full_models=1)) as whole:
        await whole.model("s:train:9")
        await whole.does("s:train:0", CreateModel(BASE, FULL))
        for save in (
            SaveWeightsForSampler("one", None),
            SaveWeightsForSampler(None, SamplingSessionId("s:sample:0")),
        ):
            failed = await whole.fails("s:train:0", save)
            assert failed.error.category == "user"
            assert "transformers loads" in failed.error.message


async def test_samples_over_the_bound_on_requests_are_put_off(tmp_path: Path) -> None:
    gate = Gate(DecodePass)
    config = replace(CONFIG, max_queued_requests=2)
    async with shell(tmp_path, gate.engine, config, hold_seconds=30.0) as whole:
        lane, target = await whole.model(), SamplerTarget(BASE)
        sent = [await whole.send("s:sample:0", sample([1]), target=target) for _ in range(2)]
        with pytest.raises(Overloaded, match="2 requests") as refused:
            await whole.send("s:sample:0", sample([1]), target=target, seq=7)
        assert 1.0 <= refused.value.retry_after <= 30.0
        held = asyncio.get_running_loop().create_task(whole.admission.admit(whole.work(lane, STEP)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not held.done()
        gate.open.set()
        for each in sent:
            assert not isinstance(await whole.outcome(each), Failed)
        assert isinstance(await whole.outcome(await held), OptimStepDone)


async def test_what_follows_held_work_is_held_too(tmp_path: Path) -> None:
    """A step has no data and would always have room; it must not overtake its gradient."""
    gate = Gate(TrainPass, OptimPass)
    size = 3 * (4 + 8 + 4)
    config = replace(CONFIG, max_queued_bytes=size)
    async with shell(tmp_path, gate.engine, config, hold_seconds=20.0) as whole:
        lane = await whole.model()
        three = training([datum([1, 2, 3], [2, 3, 4])])
        first = await whole.send(lane, three)
        held = [
            asyncio.get_running_loop().create_task(whole.admission.admit(whole.work(lane, each)))
            for each in (three, STEP, three, STEP)
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(each.done() for each in held)
        gate.open.set()
        outcomes = [await whole.outcome(await each) for each in held]
        assert not isinstance(await whole.outcome(first), Failed)
        assert not any(isinstance(each, Failed) for each in outcomes), outcomes
        assert [o.version for o in outcomes if isinstance(o, OptimStepDone)] == [1, 2]


async def test_work_over_the_rate_waits_says_so_and_runs(tmp_path: Path) -> None:
    async with shell(tmp_path, config=replace(CONFIG, tokens_per_minute=6000)) as whole:
        lane = await whole.model()
        many = training([datum(list(range(1, 41)), list(range(1, 41)))] * 151)  # 40 over
        sent = [await whole.send(lane, each) for each in (many, ONE, STEP)]
        for waiting in sent[1:]:
            assert whole.admission.queue_state(waiting) == "paused_rate_limit"
            assert "6000 tokens per minute" in whole.admission.why_waiting(waiting)
        outcomes = [await whole.outcome(each) for each in sent]
        assert not any(isinstance(each, Failed) for each in outcomes), outcomes
        assert outcomes[2].version == 1


async def test_what_waits_for_its_rate_can_be_taken_back(tmp_path: Path) -> None:
    async with shell(tmp_path, config=replace(CONFIG, tokens_per_minute=1)) as whole:
        lane, target = await whole.model(), SamplerTarget(BASE)
        await whole.does(lane, training([datum([1, 2], [2, 3])]))  # a minute in debt
        waiting = [
            await whole.send(lane, ONE),
            await whole.send("s:sample:0", sample([1]), target=target),
        ]
        for each in waiting:
            assert whole.admission.queue_state(each) == "paused_rate_limit"
            whole.admission.cancel(each, ALICE)
            outcome = await whole.outcome(each)
            assert isinstance(outcome, Failed)
            assert isinstance(outcome.error, Cancelled)
        other = await whole.model("t:train:0", owner=BOB)
        await whole.does(other, training([datum([1], [2])]), owner=BOB)


async def test_a_refused_sample_costs_no_rate(tmp_path: Path) -> None:
    gate = Gate(DecodePass)
    config = replace(CONFIG, tokens_per_minute=20)
    async with shell(tmp_path, gate.engine, config) as whole:
        target = SamplerTarget(BASE)
        runs = await whole.send("s:sample:0", sample([1], 50), target=target)  # 93 s of debt
        waits = await whole.send("s:sample:0", sample([1], 4), target=target)
        assert whole.admission.queue_state(waits) == "paused_rate_limit"
        whole.admission.cancel(runs, ALICE)
        gate.open.set()
        assert isinstance(await whole.outcome(runs), Failed)
        assert not isinstance(await whole.outcome(waits), Failed)  # within the time of a test


def test_the_time_to_the_next_answer_is_learned() -> None:
    now = [0.0]
    backlog = Backlog(lambda: now[0])
    share = backlog._shares.setdefault(ALICE, type(backlog.share(ALICE))())
    assert backlog.seconds_to_next(ALICE) == 5.0  # nothing is known
    for at in (10.0, 14.0, 18.0, 22.0):
        share.answered(at)
    now[0] = 22.0
    assert backlog.seconds_to_next(ALICE) == pytest.approx(4.0)
    now[0] = 40.0  # nothing for longer than usual
    assert backlog.seconds_to_next(ALICE) == pytest.approx(18.0)
    now[0] = 500.0
    assert backlog.seconds_to_next(ALICE) == 30.0


def test_what_an_owner_may_have_is_said_in_three_places() -> None:
    """The configuration for all, the one for the owner, and what an administrator said last."""
    owners = {ALICE: OwnerQuota(weight=3.0, tokens_per_minute=60)}
    config = replace(CONFIG, owner_weights={ALICE: 2.0, BOB: 0.5}, owners=owners)
    allowed = Entitlements(config)
    assert allowed.weights() == {ALICE: 3.0, BOB: 0.5}
    assert (allowed.rate(ALICE), allowed.rate(BOB)) == (60, 0)
    changed = allowed.change(ALICE, OwnerQuota(tokens_per_minute=0, max_queued_samples=3))
    assert (changed.weight, changed.tokens_per_minute, changed.max_queued_samples) == (3.0, 0, 3)
    assert allowed.of(BOB).max_queued_samples == CONFIG.max_queued_samples
