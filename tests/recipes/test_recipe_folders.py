"""Each recipe's short form, through the unmodified SDK on a real server."""

import asyncio
import json
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import islice
from pathlib import Path

import pytest
import tinker

from openrl import demo
from recipes.distill import train as distill
from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import policy, supervised
from recipes.kit.record import Record
from recipes.kit.running import Model
from recipes.kit.server import local_server
from recipes.multi_turn import episode
from recipes.multi_turn import train as multi_turn
from recipes.pig_latin import train as pig_latin
from recipes.preference import train as preference
from recipes.rlvr_arithmetic import train as rlvr_arithmetic
from recipes.tasks import arithmetic, sql
from recipes.tasks import pig_latin as pig_latin_task
from recipes.text_to_sql import grpo, sft

RECIPE_FOLDER = Path(pig_latin.__file__).parents[1]
SHORT = {
    "steps": 2, "test_every": 2, "batch": 4, "questions": 4, "samples": 4,
    "warm_up": 1, "teacher_steps": 1,
}  # fmt: skip
RECIPES = (pig_latin, sft, grpo, rlvr_arithmetic, preference, distill, multi_turn)


def short_plan(recipe):
    script = Path(recipe.__file__)
    settings = tomllib.loads(script.with_name("config.toml").read_text())[script.stem]
    names = {each.name for each in fields(recipe.Plan)}
    shortened = {name: value for name, value in SHORT.items() if name in names}
    assert names == {*settings, "model", "seed"}
    return recipe.Plan(**settings | shortened | {"model": demo.NAME, "seed": 0})


@pytest.mark.slow
async def test_two_steps_of_each(tmp_path):
    tokenizer = Model.parse(demo.NAME).tokenizer
    async with local_server(tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        for recipe in RECIPES:
            plan = short_plan(recipe)
            rows = [row async for row in recipe.train(service, tokenizer, plan)]
            assert rows[-1]["step"] == 2, recipe.__name__
            assert all(isinstance(value, int | float) for row in rows for value in row.values())


def test_a_recipe_says_its_settings():
    command = [sys.executable, "-m", "recipes.pig_latin.train", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "--learning-rate" in ran.stdout
    assert "--seeds" in ran.stdout


def test_a_record_is_lines_a_table_and_a_curve(tmp_path, capsys):
    record = Record("recipes.some.train", tmp_path, ["--seeds", "0", "1"], "some/model")
    for seed in (0, 1):
        record.add(seed, 1.0, {"step": 0, "test": 0.25})
        record.add(seed, 2.0, {"step": 1, "reward": 0.5, "test": 0.75})
    record.conclude()
    assert "| test | 1 | 0.250 | 0.750 |" in capsys.readouterr().out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4
    assert "python -m recipes.some.train --seeds 0 1" in (tmp_path / "results.json").read_text()


def test_an_answer_ends_with_the_end_of_a_turn():
    tokenizer = Model.parse(demo.NAME).tokenizer
    messages = [{"role": "user", "content": "hello"}]
    tokens = answer_tokens(tokenizer, messages, "SELECT 1")
    assert tokenizer.decode(tokens) == "SELECT 1<|im_end|>"
    prompt = prompt_tokens(tokenizer, messages)
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")


def test_targets_are_one_ahead_and_the_prompt_weighs_nothing():
    datum = supervised([10, 11, 12], [20, 21], weight=0.5)
    assert datum.model_input.to_ints() == [10, 11, 12, 20]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [11, 12, 20, 21]
    assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == [0, 0, 0.5, 0.5]
    datum = policy([10], [20, 21], [-1.0, -2.0], [0.5, -0.5])
    assert datum.loss_fn_inputs["advantages"].to_numpy().tolist() == [0.5, -0.5]


def test_what_an_agent_is_told_is_what_the_template_says():
    tokenizer = Model.parse(demo.NAME).tokenizer
    said = tokenizer.decode(episode.told_tokens(tokenizer, "error: no", ended=True))
    assert said == "\n<|im_start|>user\nerror: no<|im_end|>\n<|im_start|>assistant\n"
    cut_short = tokenizer.decode(episode.told_tokens(tokenizer, "error: no", ended=False))
    assert cut_short == "<|im_end|>" + said


def test_an_agent_is_told_errors_but_not_whether_it_is_right():
    question = next(sql.questions(0))
    assert episode.complaint_about(question, question.sql) is None
    assert episode.complaint_about(question, "SELECT 1") is None
    assert "no such column" in episode.complaint_about(question, "SELECT nonsense")


@pytest.mark.parametrize(
    ("word", "said"),
    [("pig", "igpay"), ("queen", "eenquay"), ("apple", "appleway"), ("string", "ingstray"),
     ("year", "earyay"), ("sky", "yskay"), ("fly", "yflay")],
)  # fmt: skip
def test_pig_latin(word, said):
    assert pig_latin_task.translated(word) == said


def test_pig_latin_counts_words_in_their_places():
    question = pig_latin_task.Question(("pig", "apple"))
    assert pig_latin_task.score(question, question.answer) == 1
    assert pig_latin_task.score(question, "igpay") == 0.5
    assert pig_latin_task.score(question, "appleway igpay") == 0
    assert pig_latin_task.score(question, "igpay appleway again") == pytest.approx(2 / 3)
    assert not set(pig_latin_task.TEST) & set(pig_latin_task.TRAINING)


def test_sums_of_the_test_are_asked_nowhere_else():
    trained = {(q.a, q.b) for q in islice(arithmetic.questions(0, 20), 2000)}
    tested = {(q.a, q.b) for q in islice(arithmetic.questions("test", 20), 2000)}
    assert trained
    assert tested
    assert not trained & tested


@pytest.mark.parametrize(
    ("text", "score"),
    [("7", 1), ("3 + 4 = 7", 1), ("-7", 0), ("it is 7, not 8", 0), ("", 0), ("17", 0)],
)
def test_the_last_number_counts(text, score):
    assert arithmetic.reward(arithmetic.Question(3, 4, "+"), text) == score


@pytest.mark.slow
async def test_the_notebooks_run(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRL_MODEL", demo.NAME)
    monkeypatch.setenv("OPENRL_STEPS", "1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    async with local_server(tmp_path) as server:
        monkeypatch.setenv("OPENRL_URL", server.url)
        for notebook in ("pig_latin/pig_latin", "text_to_sql/text_to_sql"):
            seen = await asyncio.to_thread(run_notebook, RECIPE_FOLDER / f"{notebook}.ipynb")
            assert len(seen.get("losses", seen.get("rewards"))) == 1


def run_notebook(file):
    seen = {}
    for cell in json.loads(file.read_text())["cells"]:
        assert not cell.get("outputs"), "notebooks are kept without what they printed"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(file), "exec"), seen)
    return seen
