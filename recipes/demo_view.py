"""What the demo shows while it learns, and the picture and files that it leaves behind."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from recipes.demo_loop import Plan, Step
from recipes.kit.groups import Answer
from recipes.tasks.sql import Question

BARS = "▁▂▃▄▅▆▇█"
AT_THE_ENDS = 5
WINDOW = 6


@dataclass
class Job:
    """One training run, as far as it has come."""

    name: str
    plan: Plan
    history: list[Step] = field(default_factory=list)
    before: list[Answer] = field(default_factory=list)
    after: list[Answer] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.history]

    @property
    def ends(self) -> int:
        """How many steps are its beginning, and its end: five, or half of a short run."""
        return max(1, min(AT_THE_ENDS, len(self.history) // 2))

    @property
    def first_and_last(self) -> tuple[float, float]:
        """Mean reward over its beginning and over its end."""
        rewards = self.rewards
        return _mean(rewards[: self.ends]), _mean(rewards[-self.ends :])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


@dataclass
class Meter:
    """How busy the engine was, in [0, 1], by seconds since the start. A pass counts when it ends,
    so each share is over the last `WINDOW` readings."""

    busy: list[tuple[float, float]] = field(default_factory=list)
    readings: list[tuple[float, float]] = field(default_factory=list)

    def read(self, now: float, engine_seconds: float) -> None:
        self.readings.append((now, engine_seconds))
        since, worked = self.readings[-WINDOW:][0]
        if now > since:
            self.busy.append((now, min(1.0, (engine_seconds - worked) / (now - since))))

    def __str__(self) -> str:
        return f"engine {self.busy[-1][1]:.0%} busy" if self.busy else ""


class View:
    """Redraws a table in a terminal; elsewhere prints a line for each step."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self.jobs = jobs
        self.meter = Meter()
        self._console = console
        self._status = ""
        self._started = time.monotonic()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def status(self, text: str) -> None:
        self._status = text
        if not self._console.is_terminal:
            self._line(text)

    def stepped(self, job: Job) -> None:
        if self._console.is_terminal:
            return
        step = job.history[-1]
        self._line(
            f"{job.name}  step {step.step + 1}/{job.plan.steps}  reward {step.reward:.3f}  "
            f"{step.tokens_per_second:.0f} tokens/s  {self.elapsed:.0f} s  {self.meter}"
        )

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def _draw(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for title in ("job", "step", "reward", "tokens/s", "right of 8", "curve"):
            table.add_column(title, justify="left" if title in ("job", "curve") else "right")
        for job in self.jobs:
            table.add_row(*_cells(job))
        return Group(Text(f"{self._status}   {self.elapsed:.0f} s   {self.meter}"), table)


def _cells(job: Job) -> tuple[str, ...]:
    curve = "".join(BARS[min(7, int(reward * 8))] for reward in job.rewards)
    if not job.history:
        return job.name, f"0/{job.plan.steps}", "", "", "", curve
    last = job.history[-1]
    return (
        job.name,
        f"{last.step + 1}/{job.plan.steps}",
        f"{last.reward:.3f}",
        f"{last.tokens_per_second:.0f}",
        f"{last.solved:.0%}",
        curve,
    )


# --- files ------------------------------------------------------------------------------------


def append_metrics(path: Path, job: Job, elapsed: float) -> None:
    """The job's last step as one line of JSON."""
    step = job.history[-1]
    line: Mapping[str, object] = {
        "job": job.name,
        "learning_rate": job.plan.learning_rate,
        "seed": job.plan.seed,
        **asdict(step),
        "tokens_per_second": round(step.tokens_per_second, 1),
        "elapsed": round(elapsed, 2),
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def plot(path: Path, jobs: Sequence[Job], meter: Meter) -> None:
    """Reward by step, and below it how busy the engine was by time."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, engine = figure.subplots(2, height_ratios=(3, 1))
    for job in jobs:
        curves.plot(range(1, len(job.rewards) + 1), job.rewards, marker=".", label=job.name)
    curves.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Text to SQL, GRPO")
    curves.grid(alpha=0.3)
    curves.legend(loc="lower right")
    if meter.busy:
        engine.fill_between(*zip(*meter.busy, strict=True), alpha=0.5, step="pre")
    engine.set(xlabel="seconds", ylabel="engine busy", ylim=(0, 1))
    figure.savefig(path, dpi=100)


def write_samples(path: Path, shown: Sequence[Question], jobs: Sequence[Job]) -> None:
    """Each question with the right query and one sample from before and from after."""
    lines = ["# The same questions before and after training", ""]
    for job in jobs:
        lines += [f"## {job.name}", ""]
        for question, before, after in zip(shown, job.before, job.after, strict=True):
            lines += [question.text, "", "```sql", f"-- the right query\n{question.sql}"]
            lines += [f"-- before ({_verdict(before)})\n{before.text}"]
            lines += [f"-- after ({_verdict(after)})\n{after.text}", "```", ""]
    path.write_text("\n".join(lines))


def _verdict(answer: Answer) -> str:
    return "right" if answer.reward else "wrong"


def print_samples(console: Console, shown: Sequence[Question], job: Job, count: int = 6) -> None:
    console.print(f"\nSampled queries, {job.name}:", highlight=False)
    for question, before, after in list(zip(shown, job.before, job.after, strict=True))[:count]:
        console.print(f"  {question.text}", highlight=False, markup=False)
        for label, answer in (("before", before), ("after ", after)):
            mark, style = ("✓", "green") if answer.reward else ("✗", "red")
            text = Text(f"    {label} {mark} {answer.text}", style=style)
            console.print(text, soft_wrap=True)
