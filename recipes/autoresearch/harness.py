"""Experiments side by side on one node, each judged by us, until the budget is spent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from dataclasses import dataclass, field, replace

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.autoresearch import ledger as book
from recipes.autoresearch.experiment import Order
from recipes.autoresearch.judging import bar, p_value, scores
from recipes.autoresearch.ledger import Experiment, Ledger
from recipes.autoresearch.proposing import Proposal, Proposer
from recipes.autoresearch.report import progress
from recipes.autoresearch.study import Sources, Study
from recipes.autoresearch.working import Failed, Limits, Meter, OverBudget, Refused, attempt
from recipes.kit.server import together

UNUSABLE = 5


class Pruned(Exception):
    """The proposer gave it up on the way."""


OUTCOMES: dict[type[Exception], str] = {
    Pruned: book.PRUNED,
    Refused: book.REFUSED,
    OverBudget: book.OVER_BUDGET,
}
"""Of what an experiment may end by; anything else is a failure."""


@dataclass(frozen=True)
class Node:
    """`model` may be NAME=DIRECTORY."""

    url: str
    model: str


@dataclass
class Harness:
    """`budget` is in engine-seconds, of all experiments and what judged them. `alpha` bounds the
    chance that anything that is no better is ever kept."""

    study: Study
    node: Node
    tokenizer: PreTrainedTokenizerBase
    ledger: Ledger
    sources: Sources
    limits: Limits
    budget: float
    alpha: float
    seed: int
    _deciding: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, proposer: Proposer, parallel: int) -> None:
        """The defaults first, whatever they score; then what is proposed."""
        if self.ledger.best() is None:
            await self._experiment(self.defaults(), None)
        if self.ledger.best() is None:
            last = self.ledger.experiments()[-1]
            raise Failed(f"the defaults could not be run: {last.decision}: {last.because}")
        async with together() as workers:
            for _ in range(parallel):
                workers.create_task(self._work(proposer))

    def defaults(self) -> Proposal:
        source = self.sources.files[self._file].decode()
        return Proposal("the defaults", dict(self.study.defaults), source)

    async def _work(self, proposer: Proposer) -> None:
        """Raises `Failed` when nothing that can be run is proposed any more."""
        unusable = 0
        while self._has_room():
            best = self.ledger.best()
            assert best is not None
            basis = Proposal(best.change, best.settings, best.source)
            try:
                proposal = await proposer.next(basis, progress(self.ledger))
            except (Refused, Failed) as error:
                self._note_unusable(error)
                unusable += 1
                if unusable == UNUSABLE:  # each costs no engine time, so no budget would end it
                    raise Failed(
                        f"{UNUSABLE} proposals in a row could not be run: {error}"
                    ) from error
                continue
            unusable = 0
            await self._experiment(proposal, proposer)

    async def _experiment(self, proposal: Proposal, proposer: Proposer | None) -> None:
        experiment = self._begin(proposal)
        order = self._order(experiment)
        service = tinker.ServiceClient(base_url=order.url, api_key=order.key)
        try:
            experiment = await self._rungs(experiment, order, service, proposal, proposer)
            async with self._deciding:
                experiment = await self._decide(experiment, service)
        except (Pruned, Refused, Failed, OverBudget, tinker.TinkerError) as error:
            so_far = self.ledger.experiments()[experiment.number]
            decision = OUTCOMES.get(type(error), book.FAILED)
            experiment = replace(so_far, decision=decision, because=str(error))
        finally:
            with contextlib.suppress(tinker.TinkerError):
                await service.close("success")
        spent = await Meter(order.url, order.key).engine_seconds()
        experiment = replace(experiment, ended=time.time(), engine_seconds=spent)
        self.ledger.put(experiment)
        if proposer is not None:
            scored = experiment.decision in (book.KEPT, book.DISCARDED)
            proposer.tell(proposal, experiment.search[-1] if scored else None)
        print(line(experiment), flush=True)

    def _has_room(self) -> bool:
        """For one more like the mean of those so far, beside those that run."""
        done = [e.engine_seconds for e in self.ledger.experiments() if e.engine_seconds]
        running = sum(e.decision == book.RUNNING for e in self.ledger.experiments())
        return self.ledger.spent() + (running + 1) * sum(done) / len(done) <= self.budget

    def _begin(self, proposal: Proposal) -> Experiment:
        experiment = Experiment(
            number=len(self.ledger.experiments()),
            change=proposal.change,
            settings=dict(proposal.settings),
            source=proposal.source,
            started=time.time(),
        )
        self.ledger.put(experiment)
        return experiment

    def _note_unusable(self, error: Exception) -> None:
        """What an agent gave, and cannot be run."""
        noted = self._begin(Proposal("", {}, ""))
        decision = OUTCOMES.get(type(error), book.FAILED)
        self.ledger.put(
            replace(
                noted, decision=decision, because=str(error), ended=time.time(), engine_seconds=0.0
            )
        )

    def _order(self, experiment: Experiment) -> Order:
        """A key that nobody else has, so that the node counts this experiment alone, and no other
        can name its weights."""
        return Order(
            module=".".join(self._file.with_suffix("").parts),
            url=self.node.url,
            key=f"tml-research-{experiment.number}-{secrets.token_hex(8)}",
            model=self.node.model,
            seed=self.seed,
            rungs=self.study.rungs,
            settings=dict(experiment.settings),
        )

    async def _rungs(
        self,
        experiment: Experiment,
        order: Order,
        service: tinker.ServiceClient,
        proposal: Proposal,
        proposer: Proposer | None,
    ) -> Experiment:
        """Its scores on the search split. Raises `Pruned` and what `attempt` raises."""
        found: list[float] = []
        path = None
        async with attempt(order, proposal.source, self._file, self.sources, self.limits) as trying:
            async for path in trying.paths():
                judged = await self._scores(service, path, "search")
                found.append(sum(judged) / len(judged))
                experiment = replace(experiment, search=found, checkpoint=path)
                self.ledger.put(experiment)
                last = len(found) == self.study.rungs
                if not last and proposer and proposer.stop(proposal, len(found) - 1, found[-1]):
                    raise Pruned
        if path is None:
            raise Failed("it gave no weights")
        return experiment

    async def _decide(self, experiment: Experiment, service: tinker.ServiceClient) -> Experiment:
        """Only what looks better on the search split is held against the best on the validation
        split: each such judgement spends some of `alpha`."""
        best = self.ledger.best()
        if best is not None and experiment.search[-1] <= best.search[-1]:
            because = "no better on the search split"
            return replace(experiment, decision=book.DISCARDED, because=because)
        assert experiment.checkpoint is not None
        judged = await self._scores(service, experiment.checkpoint, "validation")
        experiment = replace(experiment, validation=judged)
        if best is None:
            return replace(experiment, decision=book.KEPT, because="the first")
        chance = p_value(judged, best.validation)
        most = bar(self.alpha, self.ledger.judged() + 1)
        kept = chance <= most
        return replace(
            experiment,
            p_value=chance,
            bar=most,
            decision=book.KEPT if kept else book.DISCARDED,
            because="" if kept else "not surely better on the validation split",
        )

    async def _scores(self, service: tinker.ServiceClient, path: str, split: str) -> list[float]:
        salt = self.ledger.salt()
        return await scores(service, self.tokenizer, self.study, path, split, salt)

    async def test(self) -> dict[str, list[float]]:
        """The defaults and the best, on the test split: once in a study's life. Both are run anew,
        so that their weights are there."""
        if (known := self.ledger.fact("test")) is not None:
            return dict(json.loads(known))
        best = self.ledger.best()
        assert best is not None
        chosen = {"defaults": self.defaults(),
                  "best": Proposal(best.change, best.settings, best.source)}  # fmt: skip
        judged = {name: await self.again(each, "test") for name, each in chosen.items()}
        self.ledger.fact("test", json.dumps(judged))
        return judged

    async def again(self, proposal: Proposal, split: str) -> list[float]:
        """Runs what was run before, and gives the scores of its last weights."""
        order = self._order(Experiment(0, "", dict(proposal.settings), proposal.source))
        service = tinker.ServiceClient(base_url=order.url, api_key=order.key)
        async with attempt(order, proposal.source, self._file, self.sources, self.limits) as trying:
            paths = [path async for path in trying.paths()]
        if not paths:
            raise Failed("it gave no weights")
        return await self._scores(service, paths[-1], split)

    @property
    def _file(self):
        return self.study.file.relative_to(self.study.file.parents[2])


def line(experiment: Experiment) -> str:
    said = f"experiment {experiment.number}: {experiment.change}: {experiment.decision}"
    if experiment.search:
        said += f", search {experiment.search[-1]:.3f}"
    if experiment.mean is not None:
        said += f", validation {experiment.mean:.3f}"
    if experiment.p_value is not None:
        said += f", p {experiment.p_value:.4f} (at most {experiment.bar:.4f})"
    if experiment.because:
        said += f" ({experiment.because.strip().splitlines()[-1][:200]})"
    return said
