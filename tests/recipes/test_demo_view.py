import io
import json

import pytest
from rich.console import Console

from recipes.demo_loop import Plan, Step
from recipes.demo_view import Job, Meter, View, append_metrics, plot, write_samples
from recipes.kit.groups import Answer
from recipes.tasks.sql import SCHEMAS, Question


def job(rewards):
    history = [Step(i, reward, 0.5, 100, 300, 2.0) for i, reward in enumerate(rewards)]
    return Job("lr 0.002", Plan(steps=len(rewards)), history)


def test_the_gain_is_between_the_first_five_and_the_last_five():
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.0, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert job(rewards).first_and_last == (pytest.approx(0.3), pytest.approx(0.7))


def test_of_a_short_run_the_gain_is_between_its_halves():
    assert job([0.1, 0.2, 0.6]).first_and_last == (0.1, 0.6)
    assert job([0.1]).first_and_last == (0.1, 0.1)
    assert job([]).first_and_last == (0.0, 0.0)


def test_the_meter_shows_the_share_of_the_last_readings():
    meter = Meter()
    for now, worked in [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0)]:
        meter.read(float(now), worked)
    assert meter.busy == [(1.0, 0.0), (2.0, 0.5), (3.0, pytest.approx(2 / 3))]
    for now in range(4, 20):
        meter.read(float(now), now - 1.0)
    assert str(meter) == "engine 100% busy"


def test_without_a_terminal_each_step_is_a_line():
    text = io.StringIO()
    running = job([0.25])
    view = View([running], Console(file=text, force_terminal=False))
    with view:
        view.status("connecting")
        view.stepped(running)
    lines = text.getvalue().splitlines()
    assert lines[0] == "connecting"
    assert lines[1].startswith("lr 0.002  step 1/1  reward 0.250  200 tokens/s")
    assert "\x1b" not in text.getvalue()


def test_in_a_terminal_a_table_is_drawn():
    text = io.StringIO()
    with View([job([0.0, 0.99])], Console(file=text, force_terminal=True, width=100)) as view:
        view.status("training")
    assert "training" in text.getvalue()
    assert "▁█" in text.getvalue()


def test_metrics_are_a_line_of_json_for_each_step(tmp_path):
    running = job([0.25])
    append_metrics(tmp_path / "m.jsonl", running, 3.0)
    append_metrics(tmp_path / "m.jsonl", running, 4.0)
    first, second = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["reward"] == 0.25
    assert first["tokens_per_second"] == 200.0
    assert second["elapsed"] == 4.0


@pytest.mark.parametrize("rewards", [[0.1, 0.5], []])
def test_a_picture_is_drawn_also_of_nothing(tmp_path, rewards):
    plot(tmp_path / "reward.png", [job(rewards)], Meter())
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_samples_tell_what_was_right(tmp_path):
    question = Question(SCHEMAS[0], "Count the books.", "SELECT COUNT(*) FROM book")
    done = job([0.5])
    done.before = [Answer("SELECT 1", [], [], 0.0)]
    done.after = [Answer("SELECT COUNT(id) FROM book", [], [], 1.0)]
    write_samples(tmp_path / "samples.md", [question], [done])
    text = (tmp_path / "samples.md").read_text()
    assert "-- before (wrong)\nSELECT 1" in text
    assert "-- after (right)\nSELECT COUNT(id) FROM book" in text
