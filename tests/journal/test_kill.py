"""A process that is killed while it appends: everything that it was told is durable is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.journal import opened, same, trained

from openrl.types import RequestId

CHILD = """
import asyncio, sys
from pathlib import Path
from support.journal import Story
from openrl.journal import DiskJournal

async def main():
    journal, _ = await DiskJournal.open(Path(sys.argv[1]), segment_bytes=20000)
    story = Story(journal)
    models = [f"s:train:{n}" for n in range(3)]
    for model in models:
        story.create(model)
    async def loop(model):
        for seq in range(1, 10**6):
            story.do(model, seq, 64)
            if seq % 10 == 0:
                story.snapshot(model, seq - 4, str(seq))
            await journal.flushed()
            print(model, seq, flush=True)
    await asyncio.gather(*map(loop, models))

asyncio.run(main())
"""


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    tests = str(Path(__file__).parent.parent)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": tests}
    ) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(150)]
        child.kill()
        said += child.stdout.readlines()
    reported: dict[str, int] = {}
    for line in said:
        if line.endswith("\n") and len(parts := line.split()) == 2:
            reported[parts[0]] = int(parts[1])
    recovered = opened(tmp_path)
    assert recovered.damage is None
    assert len(recovered.models) == 3
    for model in recovered.models:
        assert model.damage is None
        last = reported[model.model_id]
        assert model.last_seq in (last, last + 1)  # the report of the latter may be lost
        assert model.snapshot is not None
        first = int(model.snapshot.position.rpartition(":")[2]) + 1
        names = [f"{model.model_id}:{seq}" for seq in range(first, model.last_seq + 1)]
        assert [each.request_id for each in model.executed] == names
        odd = last - (last + 1) % 2
        outcome = recovered.outcome(RequestId(f"{model.model_id}:{odd}"))
        assert same(outcome, trained(odd, 64))
