"""Anything that may happen to some models, with restarts and cleanings in between."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.journal import QuickFiles, Story, opened, same, seen, stepped, trained, training, work

from openrl.errors import UserError
from openrl.journal import DiskJournal
from openrl.types import Failed, ForwardBackward, RequestId, Work


class Life:
    """Draws what happens next from what may."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory
        self._rng = random.Random(seed)
        self._models: dict[str, int] = {}  # the next seq_id of each
        self._done: dict[str, list[int]] = {}  # after the snapshot, in order
        self._waiting: list[Work] = []
        self._made = 0

    async def run(self, turns: int) -> None:
        journal = await self._open()
        story = self._story = Story(journal)
        for _ in range(turns):
            if self._rng.random() < 0.02:
                await journal.aclose()
                journal = story.journal = await self._open()
                recovered = opened(self._directory)
                assert recovered.damage is None
                assert seen(recovered) == story.now
                answers = {each.request_id for each in recovered.answers}
                assert story.answers.keys() <= answers
                for request_id, outcome in story.answers.items():
                    assert same(recovered.outcome(RequestId(request_id)), outcome)
                for waits in self._waiting:
                    assert same(recovered.work(waits.request_id), waits)
            elif self._rng.random() < 0.05:
                await journal.clean()
            elif self._rng.random() < 0.2:
                await journal.flushed()
            else:
                self._happen(story)
        await journal.aclose()

    async def _open(self) -> DiskJournal:
        journal, _ = await DiskJournal.open(self._directory, segment_bytes=2500, files=QuickFiles())
        return journal

    def _happen(self, story: Story) -> None:
        model = self._rng.choice([*self._models, None, None][:4])
        match self._rng.randrange(12):
            case _ if model is None:
                name = f"s:train:{self._made}"
                self._made += 1
                story.create(name)
                self._models[name], self._done[name] = 1, []
            case 0 | 1 | 2 | 3:
                seq, self._models[model] = self._models[model], self._models[model] + 1
                job = training(model, seq, 3) if self._rng.random() < 0.5 else work(model, seq)
                story.accept(job)
                self._waiting.append(job)
            case 4 | 5 | 6 | 7 | 8 if self._waiting:
                job = self._waiting.pop(self._rng.randrange(len(self._waiting)))
                if self._rng.random() < 0.3:
                    story.journal.started(job)
                if self._rng.random() < 0.1:
                    story.commit(job, Failed(UserError("no")))
                elif isinstance(job.operation, ForwardBackward):
                    story.commit(job, trained(job.seq_id, 3))
                else:
                    story.commit(job, stepped(job.seq_id))
                self._done[job.lane].append(job.seq_id)
            case 9 if self._done[model]:
                at = self._rng.randrange(len(self._done[model]))
                story.snapshot(model, self._done[model][at], f"at {at}")
                self._done[model] = self._done[model][at + 1 :]
            case 10 if self._rng.random() < 0.2:
                story.end(model)
                del self._models[model], self._done[model]
                self._waiting = [job for job in self._waiting if job.lane != model]
            case 11:
                forgotten = [name for name in story.answers if self._rng.random() < 0.5]
                story.journal.forgotten([RequestId(name) for name in forgotten])
                for name in forgotten:
                    del story.answers[name]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_told_is_what_comes_back(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(Life(Path(directory), seed).run(turns=250))
