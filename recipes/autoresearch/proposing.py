"""What to try next: other settings, by Optuna, or another file, by an agent."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import optuna

from recipes.autoresearch.study import Dimension, Sources, Study
from recipes.autoresearch.working import Failed, Refused, workspace

RULES = "RESEARCH.md"


@dataclass(frozen=True)
class Proposal:
    """`number` is the proposer's own, if it keeps count."""

    change: str
    settings: dict[str, Any]
    source: str
    number: int | None = None


class Proposer(Protocol):
    async def next(self, best: Proposal, report: str) -> Proposal:
        """Raises `Refused` or `Failed` when nothing usable came."""

    def stop(self, proposal: Proposal, rung: int, score: float) -> bool:
        """Whether what scored so on a rung should be given up."""

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """The last score on the search split; None when there is none."""


@dataclass
class Settings:
    """Optuna's tree-structured Parzen estimator and its median pruner, kept in `directory`."""

    study: Study
    directory: Path
    source: str
    seed: int = 0
    _optuna: optuna.Study = field(init=False)

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna.create_study(
            study_name=self.study.recipe,
            storage=f"sqlite:///{self.directory}/optuna.db",
            direction="maximize",
            load_if_exists=True,
            # Constant liar: experiments that run side by side should differ.
            sampler=optuna.samplers.TPESampler(
                seed=self.seed, n_startup_trials=5, constant_liar=True
            ),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
        )
        for trial in self._optuna.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            self._optuna.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        self._trials: dict[int, optuna.Trial] = {}

    async def next(self, best: Proposal, report: str) -> Proposal:
        trial = self._optuna.ask()
        self._trials[trial.number] = trial
        drawn = {each.name: _drawn(trial, each) for each in self.study.space}
        change = ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                           for name, value in drawn.items())  # fmt: skip
        return Proposal(change, {**self.study.defaults, **drawn}, self.source, trial.number)

    def stop(self, proposal: Proposal, rung: int, score: float) -> bool:
        assert proposal.number is not None
        trial = self._trials[proposal.number]
        trial.report(score, rung)
        return trial.should_prune()

    def tell(self, proposal: Proposal, score: float | None) -> None:
        assert proposal.number is not None
        del self._trials[proposal.number]
        if score is None:
            self._optuna.tell(proposal.number, state=optuna.trial.TrialState.FAIL)
        else:
            self._optuna.tell(proposal.number, score)


def _drawn(trial: optuna.Trial, of: Dimension) -> float | int | str:
    if of.choices:
        return trial.suggest_categorical(of.name, list(of.choices))
    if of.whole:
        return trial.suggest_int(of.name, int(of.low), int(of.high), log=of.log)
    return trial.suggest_float(of.name, of.low, of.high, log=of.log)


@dataclass
class Agent:
    """A command that edits the one file, in a copy, with the rules and what was tried so far beside
    it. Whatever else it writes there is refused, and never used."""

    study: Study
    command: Sequence[str]
    file: Path
    sources: Sources
    seconds: float

    async def next(self, best: Proposal, report: str) -> Proposal:
        async with workspace(self.sources) as copy:
            (copy / self.file).write_text(best.source)
            (copy / RULES).write_text(rules(self.file, report))
            process = await asyncio.create_subprocess_exec(
                *self.command, cwd=copy, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(self.seconds):
                    said, _ = await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()
                raise Failed(f"the agent took longer than {self.seconds:g} s") from None
            if process.returncode:
                raise Failed(f"the agent ended with {process.returncode}: {said[-500:]!r}")
            if changed := self.sources.changed(copy, besides=self.file):
                raise Refused(f"the agent changed {', '.join(map(str, changed))}")
            source = (copy / self.file).read_text()
        if source == best.source:
            raise Failed("the agent changed nothing")
        lines = said.decode(errors="replace").strip().splitlines()
        change = lines[-1][:200] if lines else shlex.join(self.command)
        return Proposal(change, dict(self.study.defaults), source)

    def stop(self, proposal: Proposal, rung: int, score: float) -> bool:
        return False

    def tell(self, proposal: Proposal, score: float | None) -> None:
        return None


def rules(file: Path, report: str) -> str:
    return f"""# Your task

Improve `{file}`: an experiment that trains a model. It is run as it stands after you, in another
process, and the weights whose paths it yields are scored by others, on questions that you don't
have. Edit that file alone: a change anywhere else is refused. Let the last line of what you print
say in a few words what you changed.

# What was tried so far

{report}
"""
