"""What nothing needs goes; what is needed stays, wherever the process ends."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

from support.journal import (
    FaultyFiles,
    QuickFiles,
    Story,
    opened,
    same,
    seen,
    segments,
    trained,
    training,
    work,
)

from openrl.journal import DiskJournal, cleaning
from openrl.types import RequestId

A, B, C = (f"s:train:{number}" for number in range(3))
SEGMENT = 4000
SECONDS = 20


async def started(directory: Path, **options: object) -> tuple[DiskJournal, Story]:
    options = {"segment_bytes": SEGMENT, "files": QuickFiles(), **options}
    journal, _ = await DiskJournal.open(directory, **options)
    return journal, Story(journal)


def forget(journal: DiskJournal, story: Story) -> None:
    journal.forgotten([RequestId(each) for each in story.answers])
    story.answers.clear()


def test_a_step_is_measured_once_however_many_records_it_has() -> None:
    class Record:
        asked = 0

        @property
        def size(self) -> int:
            Record.asked += 1
            return 1 << 10

    records = [Record() for _ in range(10_000)]
    steps = list(cleaning._steps(records))  # type: ignore[arg-type]
    assert [record for step in steps for record in step] == records
    assert [len(step) for step in steps] == [4096, 4096, 1808]
    assert Record.asked == len(records)


async def test_the_log_stays_small_while_snapshots_are_taken(tmp_path: Path) -> None:
    journal, story = await started(tmp_path)
    story.create(A)
    story.create(B)
    waits = training(B, 1)
    story.accept(waits)
    largest = 0
    for seq in range(1, 301):
        story.do(A, seq)
        if seq % 10 == 0:
            story.snapshot(A, seq - 2, f"at {seq}")
            forget(journal, story)
        await journal.flushed()
        if seq % 50 == 0:
            await journal.clean()
            largest = max(largest, journal.statistics().bytes)
    assert journal.statistics().bytes == sum(path.stat().st_size for path in segments(tmp_path))
    assert largest < 6 * SEGMENT
    await journal.aclose()
    recovered = opened(tmp_path)
    assert recovered.damage is None
    assert seen(recovered) == story.now
    assert same(recovered.work(waits.request_id), waits)


async def test_nothing_goes_before_what_made_it_needless_is_durable(tmp_path: Path) -> None:
    goes_on = threading.Event()
    goes_on.set()
    files = FaultyFiles(before=lambda name: name != "sync" or goes_on.wait(SECONDS))
    journal, story = await started(tmp_path, files=files)
    story.create(A)
    first = work(A, 1)
    story.accept(first)
    story.commit(first, trained(1, 1000))  # it is kept: the first segment needs no cleaning
    for seq in range(2, 40):
        story.do(A, seq)
        await journal.flushed()
    story.accept(work(A, 40))  # so that the newest segment has something that is needed
    await journal.flushed()
    kept = story.answers.pop(f"{A}:1")
    forget(journal, story)
    story.answers[f"{A}:1"] = kept
    goes_on.clear()
    story.snapshot(A, 39, "not durable yet")
    files.calls.clear()
    cleaning = asyncio.gather(journal.clean())
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert "unlink" not in files.calls
    goes_on.set()
    await cleaning
    assert "unlink" in files.calls
    await journal.aclose()
    assert seen(opened(tmp_path)) == story.now


async def test_prompts_of_a_model_that_has_ended_are_erased(tmp_path: Path) -> None:
    journal, story = await started(tmp_path)
    for model in (A, B):
        story.create(model)
    for seq in range(1, 40):
        story.do(A, seq)
        story.do(B, seq)
        await journal.flushed()
    assert any(A.encode() in path.read_bytes() for path in segments(tmp_path))
    story.end(A)
    forget(journal, story)
    for _ in range(3):  # what is said of the end goes last
        await journal.clean()
        await journal.flushed()
    assert not [path for path in segments(tmp_path) if f"{A}:".encode() in path.read_bytes()]
    await journal.aclose()
    assert seen(opened(tmp_path)) == story.now


async def test_an_answer_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    journal, story = await started(tmp_path)
    story.create(A)
    for seq in range(1, 40):
        story.do(A, seq)
        await journal.flushed()
    story.snapshot(A, 39, "all")
    await journal.clean()
    await journal.aclose()
    journal, recovered = await DiskJournal.open(tmp_path, segment_bytes=SEGMENT)
    assert [answer.request_id for answer in recovered.answers] == list(story.answers)
    for request_id, outcome in story.answers.items():
        assert same(recovered.outcome(RequestId(request_id)), outcome)
    journal.forgotten([answer.request_id for answer in recovered.answers])
    story.journal = journal
    story.do(A, 40)
    await journal.flushed()
    await journal.clean()
    await journal.aclose()
    recovered = opened(tmp_path)
    assert [answer.request_id for answer in recovered.answers] == [f"{A}:0", f"{A}:40"]
    assert seen(recovered) == story.now


async def test_over_its_bound_it_is_trouble_until_a_snapshot(tmp_path: Path) -> None:
    journal, story = await started(tmp_path, max_bytes=2 << 20)
    story.create(A)
    seq = 0
    while journal.trouble is None:
        seq += 1
        story.do(A, seq, tokens=10_000)
        await journal.flushed()
        forget(journal, story)
    assert "journal.max_bytes" in journal.trouble
    assert journal.statistics().bytes < 3 << 20
    story.snapshot(A, seq, "room")
    assert journal.trouble is None
    await journal.flushed()
    await journal.clean()
    assert journal.statistics().bytes < SEGMENT * 3
    await journal.aclose()
    assert seen(opened(tmp_path)) == story.now


class Photographs(QuickFiles):
    """Copies the directory before and after every operation that cleaning does."""

    def __init__(self, directory: Path, album: Path) -> None:
        self.directory, self.album = directory, album
        self.count = 0
        self.on = False

    def _take(self) -> None:
        if self.on:
            self.count += 1
            shutil.copytree(self.directory, self.album / str(self.count))

    def write(self, file: int, data: bytes | memoryview) -> int:
        count = super().write(file, data[: max(1, len(data) // 2)])
        self._take()
        return count

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._take()


async def test_the_process_may_end_anywhere_in_a_cleaning(tmp_path: Path) -> None:
    files = Photographs(tmp_path / "log", tmp_path / "album")
    journal, story = await started(tmp_path / "log", files=files)
    for model in (A, B, C):
        story.create(model)
    for seq in range(1, 20):
        story.do(A, seq)
        story.do(B, seq)
        await journal.flushed()
    story.accept(work(A, 20))
    story.snapshot(A, 10, "ten")
    story.end(C)
    story.snapshot(B, 19, "nineteen")
    forget(journal, story)
    await journal.flushed()
    files.on = True
    for _ in range(3):
        await journal.clean()
    files.on = False
    await journal.aclose()
    assert files.count > 10
    for path in (tmp_path / "album").iterdir():
        recovered = opened(path)
        assert recovered.damage is None
        assert seen(recovered) == story.now, path
    assert len(segments(tmp_path / "log")) < len(segments(tmp_path / "album" / "1"))
