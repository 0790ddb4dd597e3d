"""The harness, attacked: by experiments that cheat, overspend or meddle, on a real node. And the
statistics that it decides by."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from openrl import demo
from recipes.autoresearch import harness as harness_module
from recipes.autoresearch import judging, report, working
from recipes.autoresearch import study as study_module
from recipes.autoresearch.harness import Harness, Node
from recipes.autoresearch.judging import bar, interval, p_value
from recipes.autoresearch.ledger import KEPT, LOST, Experiment, Ledger
from recipes.autoresearch.main import main, seconds
from recipes.autoresearch.proposing import Agent, Proposal, Settings
from recipes.autoresearch.study import Sources, Study
from recipes.autoresearch.working import Failed, Limits, Refused
from recipes.kit.running import Model
from recipes.kit.server import local_server

FILE = Path("recipes/text_to_sql/research.py")
HEAD = """
import json, pathlib, time
import tinker

async def model_of(service, settings):
    return await service.create_lora_training_client(settings["model"], rank=4, seed=1)

async def saved(model, name):
    return (await model.save_weights_for_sampler(name)).path

async def research(service, tokenizer, settings):
    model = await model_of(service, settings)
"""
HONEST = HEAD + "    yield await saved(model, 'only')\n"


def proposal(body):
    return Proposal("a change", {}, HEAD + body)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy to meddle with."""
    real = study_module.ROOT
    shutil.copytree(real, tmp_path / "checkout" / "recipes")
    for module in (study_module, working):
        monkeypatch.setattr(module, "ROOT", tmp_path / "checkout" / "recipes")
    return tmp_path / "checkout"


@pytest.fixture
async def harness(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "SPLITS", {"search": 3, "validation": 4, "test": 5})
    (checkout / FILE).write_text(HONEST)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    async with local_server(tmp_path) as server:
        yield Harness(
            study=replace(Study.read("text_to_sql"), rungs=1),
            node=Node(server.url, demo.NAME),
            tokenizer=Model.parse(demo.NAME).tokenizer,
            ledger=ledger,
            sources=Sources.read(),
            limits=Limits(engine_seconds=30.0, wall_seconds=60.0),
            budget=1e9,
            alpha=0.05,
            seed=0,
        )
    ledger.close()


async def experiment(harness, body):
    await harness._experiment(proposal(body), None)
    return harness.ledger.experiments()[-1]


OTHER = "recipes/tasks/sql.py"
SPENDER = """    while True:
        sampler = await model.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=64)
        await sampler.sample(tinker.ModelInput.from_ints([1]), 64, params)
    yield ''
"""


@pytest.mark.slow
async def test_the_harness_holds(harness):
    await harness._experiment(harness.defaults(), None)
    (honest,) = harness.ledger.experiments()
    assert honest.decision == KEPT
    assert len(honest.validation) == 4
    assert honest.engine_seconds > 0

    faked = await experiment(
        harness,
        "    print(json.dumps({'path': await saved(model, 'a'), 'score': 1.0, 'search': [1.0]}))\n"
        f"    pathlib.Path({OTHER!r}).write_text('def reward(*_): return 1.0')\n"
        "    for _ in (): yield ''\n",
    )
    assert faked.search == honest.search  # the same weights have the same score, whatever is said
    assert faked.decision == "refused"
    assert OTHER in faked.because

    harness.limits = Limits(engine_seconds=0.2, wall_seconds=60.0)
    spender = await experiment(harness, SPENDER)
    assert spender.decision == "over budget"
    assert spender.engine_seconds > 0.2
    assert harness.ledger.best().number == 0


@pytest.mark.nightly
async def test_the_harness_holds_against_more(harness, checkout):
    await harness._experiment(harness.defaults(), None)
    (honest,) = harness.ledger.experiments()

    stolen = await experiment(harness, f"    yield {honest.checkpoint!r}\n")
    assert stolen.decision == "failed"

    greedy = await experiment(
        harness, "    for i in range(3): yield await saved(model, f'try-{i}')\n"
    )
    assert greedy.decision == "refused"
    assert "more than 1 judgements" in greedy.because

    before = (checkout / OTHER).read_bytes()
    reached = await experiment(
        harness,
        f"    pathlib.Path({str(checkout / OTHER)!r}).write_text('gone')\n"
        "    yield await saved(model, 'only')\n",
    )
    assert reached.decision == "refused"
    assert "outside its copy" in reached.because
    assert (checkout / OTHER).read_bytes() == before

    broken = await experiment(harness, "    raise SystemError('it broke')\n    yield ''\n")
    assert broken.decision == "failed"
    assert "it broke" in broken.because

    loud = await experiment(harness, "    print('x' * 200_000)\n    yield ''\n")
    assert loud.decision == "refused"
    assert "64 KiB" in loud.because

    harness.limits = Limits(engine_seconds=30.0, wall_seconds=6.0)
    sleeper = await experiment(harness, "    time.sleep(600)\n    yield ''\n")
    assert sleeper.decision == "over budget"
    assert "took longer than 6 s" in sleeper.because

    text = report.progress(harness.ledger)
    assert text.count("\n") == 1 + len(harness.ledger.experiments())


@pytest.mark.nightly
async def test_the_test_split_is_used_once_and_the_best_can_be_run_again(harness, monkeypatch):
    await harness._experiment(harness.defaults(), None)
    best = harness.ledger.best()
    judged = await harness.test()
    assert len(judged["best"]) == 5
    again = await harness.again(Proposal("", dict(best.settings), best.source), "validation")
    assert again == list(best.validation)
    monkeypatch.setattr(harness_module, "scores", None)  # it would be called, if it were
    assert await harness.test() == judged
    assert "Test split, used once, 5 questions" in report.tested(**judged)


async def test_an_agent_may_change_one_file(checkout, tmp_path):
    study, sources = Study.read("text_to_sql"), Sources.read()
    best = Proposal("", {}, "begin = 1\n")

    def agent(script):
        return Agent(study, ["sh", "-c", script], FILE, sources, seconds=10.0)

    said = await agent(f"cat RESEARCH.md | head -1; echo 'x = 2' >> {FILE}; echo bigger").next(
        best, "the table"
    )
    assert said.source == "begin = 1\nx = 2\n"
    assert said.change == "bigger"
    with pytest.raises(Refused, match=r"tasks/sql\.py"):
        await agent(f"echo >> {FILE}; echo >> recipes/tasks/sql.py").next(best, "")
    with pytest.raises(Refused, match=r"recipes/new\.py"):
        await agent(f"echo >> {FILE}; echo > recipes/new.py").next(best, "")
    with pytest.raises(Failed, match="changed nothing"):
        await agent("true").next(best, "")
    with pytest.raises(Failed, match="ended with 3"):
        await agent("exit 3").next(best, "")
    with pytest.raises(Failed, match="longer than"):
        await replace(agent("exec sleep 60"), seconds=0.2).next(best, "")


async def test_an_agent_that_never_gives_anything_ends_research(checkout, tmp_path):
    """It costs no engine time, so the budget would not."""
    study, sources = Study.read("text_to_sql"), Sources.read()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.put(Experiment(0, "the defaults", {}, "s", KEPT, ended=1.0, engine_seconds=1.0))
    harness = Harness(study, Node("http://127.0.0.1:9", demo.NAME), None, ledger, sources,
                      Limits(1.0, 1.0), 1e9, 0.05, 0)  # fmt: skip
    idle = Agent(study, ["true"], FILE, sources, seconds=10.0)
    with pytest.raises(Failed, match="5 proposals in a row"):
        await harness.run(idle, parallel=1)
    assert [each.decision for each in ledger.experiments()] == [KEPT, *["failed"] * 5]
    ledger.close()


async def test_optuna_goes_on_where_it_was(checkout, tmp_path):
    study = Study.read("text_to_sql")
    first = Settings(study, tmp_path, "source")
    tried = [await first.next(Proposal("", {}, ""), "") for _ in range(3)]
    assert all(t.settings.keys() == study.defaults.keys() for t in tried)
    assert all(3e-4 <= t.settings["learning_rate"] <= 8e-3 for t in tried)
    first.tell(tried[0], 0.5)
    first.tell(tried[1], None)
    second = Settings(study, tmp_path, "source")
    assert [t.state.name for t in second._optuna.trials] == ["COMPLETE", "FAIL", "FAIL"]


def test_an_interrupted_study_goes_on(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    salt = ledger.salt()
    ledger.put(Experiment(0, "kept", {"a": 1}, "s", KEPT, ended=1.0, engine_seconds=5.0))
    ledger.put(Experiment(1, "on its way", {}, "s"))
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.salt() == salt
    assert [each.decision for each in again.experiments()] == [KEPT, LOST]
    assert again.experiments()[0].settings == {"a": 1}
    assert again.spent() == 5.0
    again.close()


@pytest.mark.parametrize("size", [20, 200])
def test_what_is_no_better_is_seldom_kept(size, monkeypatch):
    """Under the null the p-value is at most u with a chance of about u."""
    monkeypatch.setattr(judging, "PERMUTATIONS", 1_000)
    rng = np.random.default_rng(size)
    values = [p_value(*rng.binomial(4, 0.5, (2, size)) / 4) for _ in range(300)]
    assert np.mean(np.array(values) <= 0.05) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_what_is_better_is_kept():
    rng = np.random.default_rng(0)
    worse = rng.binomial(4, 0.4, 192) / 4
    assert p_value(np.minimum(worse + 0.15, 1), worse) < 1e-4
    assert p_value(worse, worse) == 1.0


def test_a_permutation_test_by_hand():
    """Three differences of +1: of the eight signs one gives as much."""
    assert p_value([1, 1, 1], [0, 0, 0]) == pytest.approx(1 / 8, abs=0.01)


def test_the_bars_sum_to_alpha():
    assert sum(bar(0.05, n) for n in range(1, 10_000)) < 0.05
    assert bar(0.05, 1) == pytest.approx(0.0304, abs=1e-4)


def test_an_interval_covers_the_mean():
    low, high = interval([0.0, 1.0] * 50)
    assert low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 10, rel=0.1)


@pytest.mark.parametrize(("text", "found"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("5", 5)])
def test_times(text, found):
    assert seconds(text) == found


def test_what_is_wrong_is_said(tmp_path, capsys):
    assert main(["nonsense", "--directory", str(tmp_path)]) == 1
    assert "there are" in capsys.readouterr().err
    assert main(["text_to_sql", "--directory", str(tmp_path), "--reproduce",
                 "--base-url", "http://127.0.0.1:9"]) == 1  # fmt: skip
    assert "no research in this directory" in capsys.readouterr().err
    assert main(["text_to_sql", "--directory", str(tmp_path), "--seed", "3"]) == 1
    assert "another seed" in capsys.readouterr().err
