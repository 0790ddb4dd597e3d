"""Group commit, and disks that fail."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from pathlib import Path

import pytest
from support.journal import FaultyFiles, Story, failing, opened, seen, segments, work

from openrl.errors import ServerError, Unavailable, UserError
from openrl.journal import DiskJournal

A = "s:train:0"
SOON = (0.001, 0.01)
SECONDS = 20


async def until_trouble(journal: DiskJournal) -> str:
    async with asyncio.timeout(SECONDS):
        while journal.trouble is None:  # noqa: ASYNC110 - the writer's thread says so to nobody
            await asyncio.sleep(0.001)
    return journal.trouble


async def test_what_comes_at_once_shares_a_sync(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before=lambda name: name != "sync" or goes_on.wait(SECONDS))
    journal, _ = await DiskJournal.open(tmp_path, files=files)
    story = Story(journal)
    story.create(A)
    async with asyncio.timeout(SECONDS):
        while "sync" not in files.calls:  # noqa: ASYNC110 - it waits on a thread
            await asyncio.sleep(0.001)
    for seq in range(1, 101):
        story.do(A, seq)
    goes_on.set()
    waiting = [journal.flushed() for _ in range(50)]
    assert journal.statistics().unflushed_bytes > 0
    await asyncio.gather(*waiting)
    told = journal.statistics()
    assert told.appended == 202
    assert told.fsyncs <= 3
    assert told.unflushed_bytes == 0
    assert told.bytes == sum(path.stat().st_size for path in segments(tmp_path))
    await journal.aclose()


async def test_flushed_means_durable(tmp_path: Path) -> None:
    """Nobody is told before the sync of what was appended is over."""
    files = FaultyFiles()
    journal, _ = await DiskJournal.open(tmp_path, files=files)
    files.calls.clear()
    Story(journal).create(A)
    await journal.flushed()
    wrote, synced = files.calls.index("write"), files.calls.index("sync")
    assert wrote < synced
    await journal.aclose()


@pytest.mark.parametrize("name", ["write", "sync", "create"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_failing_disk_loses_nothing(tmp_path: Path, name: str, number: int) -> None:
    files = FaultyFiles()
    journal, _ = await DiskJournal.open(tmp_path, files=files, pauses=SOON)
    story = Story(journal)
    story.create(A)
    await journal.flushed()
    files.before = failing(name, number, times=5)
    for seq in range(1, 20):
        story.do(A, seq)
        if seq % 7 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        await journal.flushed()
    assert journal.trouble is None
    await journal.aclose()
    recovered = opened(tmp_path)
    assert seen(recovered) == story.now
    assert recovered.damage is None


async def test_a_full_disk_is_trouble_until_there_is_room(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal, _ = await DiskJournal.open(tmp_path, files=files, pauses=SOON)
    story = Story(journal)
    story.create(A)
    await journal.flushed()
    files.room = 100  # ends within a record
    story.do(A, 1, tokens=1000)
    assert "No space left on device" in await until_trouble(journal)
    assert journal.statistics().trouble == journal.trouble
    story.do(A, 2)
    waiting = asyncio.gather(journal.flushed(), journal.flushed())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    as_it_is = shutil.copytree(tmp_path, tmp_path.with_name("as it is"))
    assert seen(opened(as_it_is)) == story.states[2]  # behind the creation
    files.room = None
    async with asyncio.timeout(SECONDS):
        await waiting
    assert journal.trouble is None
    await journal.aclose()
    assert seen(opened(tmp_path)) == story.now


async def test_the_process_may_end_in_the_middle_of_trouble(tmp_path: Path) -> None:
    """What was durable before is there, though the segment could not be cut."""
    files = FaultyFiles()
    journal, _ = await DiskJournal.open(tmp_path, files=files, pauses=SOON)
    story = Story(journal)
    story.create(A)
    await journal.flushed()
    durable = story.now

    def before(name: str) -> None:
        if name in ("sync", "truncate", "create"):
            raise OSError(errno.EIO, "Input/output error")

    files.before = before
    story.accept(work(A, 1))
    await until_trouble(journal)
    await journal.aclose()
    recovered = opened(tmp_path)
    assert seen(recovered) in (durable, story.now)
    assert recovered.damage is None


async def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    journal, _ = await DiskJournal.open(tmp_path, files=FaultyFiles(most=7))
    story = Story(journal)
    story.create(A)
    story.do(A, 1)
    await journal.flushed()
    await journal.aclose()
    assert seen(opened(tmp_path)) == story.now


async def test_a_directory_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    files = FaultyFiles(before=failing("create", errno.EROFS, times=1))
    with pytest.raises(
        UserError, match=r"cannot be opened: Read-only file system.*journal\.enabled"
    ):
        await DiskJournal.open(tmp_path, files=files)


async def test_a_full_disk_does_not_stop_the_start(tmp_path: Path) -> None:
    journal, _ = await DiskJournal.open(tmp_path)
    story = Story(journal)
    story.create(A)
    await journal.aclose()
    files = FaultyFiles(before=failing("create", errno.ENOSPC, times=9))
    journal, recovered = await DiskJournal.open(tmp_path, files=files, pauses=SOON)
    assert seen(recovered) == story.now
    story.journal = journal
    story.do(A, 1)
    assert "No space left on device" in await until_trouble(journal)
    async with asyncio.timeout(SECONDS):
        await journal.flushed()
    await journal.aclose()


async def test_a_path_that_is_a_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("")
    with pytest.raises(UserError, match="journal cannot be opened"):
        await DiskJournal.open(tmp_path / "journal")


def broken(name: str) -> None:
    """What no disk does: a defect."""
    if name == "write":
        raise RuntimeError("a bolt fell off")


async def test_a_writer_that_fails_says_so_to_all_who_wait(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal, _ = await DiskJournal.open(tmp_path, files=files)
    story = Story(journal)
    story.create(A)
    await journal.flushed()
    durable = story.now
    files.before = broken
    story.accept(work(A, 1))
    async with asyncio.timeout(SECONDS):
        told = await asyncio.gather(journal.flushed(), journal.flushed(), return_exceptions=True)
        assert [type(each) for each in told] == [Unavailable, Unavailable]
        with pytest.raises(ServerError, match="writer has failed: RuntimeError: a bolt fell off"):
            await journal.lost()
    assert "a bolt fell off" in str(journal.trouble)
    with pytest.raises(Unavailable, match="send it again"):
        await journal.flushed()
    await journal.clean()
    await journal.aclose()
    assert seen(opened(tmp_path)) == durable
