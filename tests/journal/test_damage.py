"""A log that was cut off, and a log of which bits have changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.journal import (
    QuickFiles,
    Seen,
    Story,
    opened,
    same,
    seen,
    segments,
    trained,
    training,
    work,
)

from openrl.errors import UserError
from openrl.journal import DiskJournal, Recovered
from openrl.types import Datum, Failed, ForwardBackward, RequestId

A, B, C, D = (f"s:train:{number}" for number in range(4))


async def test_a_log_that_is_cut_anywhere_tells_what_was_before_the_cut(tmp_path: Path) -> None:
    journal, _ = await DiskJournal.open(tmp_path, files=QuickFiles())
    story = Story(journal)
    durable = {0: 0}  # bytes: the state that was flushed by then
    story.create(A)
    await journal.flushed()
    durable[_size(tmp_path)] = len(story.states) - 1
    waits = training(A, 1, 3)
    story.accept(waits)
    story.create(B)
    story.commit(waits, trained(1, 3))
    await journal.flushed()
    durable[_size(tmp_path)] = len(story.states) - 1
    story.do(A, 2)
    story.snapshot(A, 2, "one")
    await journal.flushed()
    durable[_size(tmp_path)] = len(story.states) - 1
    await journal.aclose()

    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    reached = set()
    for cut in range(len(whole), -1, -1):
        path.write_bytes(whole[:cut])
        recovered = opened(tmp_path)
        state = story.states.index(seen(recovered))
        least = max(known for size, known in durable.items() if size <= cut)
        assert state >= least, cut
        assert recovered.damage is None
        reached.add(state)
    assert reached == set(range(len(story.states)))


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in segments(directory))


@pytest.fixture
async def told(tmp_path: Path) -> tuple[Path, Story]:
    """Three models in several segments, of which one has a snapshot, one is idle, and one more
    has ended."""
    directory = tmp_path / "log"
    journal, _ = await DiskJournal.open(directory, segment_bytes=3000, files=QuickFiles())
    story = Story(journal)
    for model in (A, B, C, D):
        story.create(model)
    for seq in range(1, 7):
        story.do(A, seq)
        await journal.flushed()
        if seq < 3:
            story.do(B, seq)
            story.do(D, seq)
    story.snapshot(A, 4, "one")
    story.end(D)
    await journal.flushed()
    story.accept(work(A, 7))
    story.accept(training(A, 9, 2))
    refused = work(A, 10)
    story.accept(refused)
    story.commit(refused, Failed(UserError("no")))
    story.do(C, 1)
    await journal.flushed()
    await journal.aclose()
    assert len(segments(directory)) > 2
    assert seen(opened(directory)) == story.now
    return directory, story


def flips(directory: Path, step: int) -> Iterator[tuple[Path, int]]:
    """Every `step`-th byte of the log with one bit changed, on disk for the time of the turn."""
    logs = {path: path.read_bytes() for path in segments(directory)}
    for path, whole in logs.items():
        for at in range(0, len(whole), step):
            changed = bytearray(whole)
            changed[at] ^= 1 << (at % 8)
            path.write_bytes(changed)
            yield path, at
            for each in logs:  # a log that is opened may be cut
                each.write_bytes(logs[each])


def goes_on_alike(found: Seen, expected: Seen) -> bool:
    """A snapshot that is not known of is no loss, as long as all can be executed again."""
    known = found.snapshot == expected.snapshot
    again = len(found.executed) - len(expected.executed)
    whole = [name for name, _, _ in found.executed[:again]] == [f"{A}:{n}" for n in range(1, 5)]
    rest = replace(found, snapshot=expected.snapshot, executed=found.executed[again:])
    return (known or (found.snapshot is None and whole)) and rest == expected


def check_nothing_is_lost_silently(recovered: Recovered, story: Story) -> list[str]:
    """Returns the models that are damaged."""
    found = {model.model_id: model for model in recovered.models}
    for model, expected in story.now.items():
        assert model in found
        assert found[model].damage or goes_on_alike(seen(recovered)[model], expected)
    for model in found.keys() - story.now.keys():
        assert found[model].damage or recovered.damage
    answers = {answer.request_id for answer in recovered.answers}
    for request_id, outcome in story.answers.items():
        model = request_id.rpartition(":")[0]
        if request_id in answers:
            assert same(recovered.outcome(RequestId(request_id)), outcome)
        else:
            assert recovered.damage or found[model].damage
    return [model for model in found if found[model].damage]


async def test_no_bit_that_changes_loses_anything_silently(told: tuple[Path, Story]) -> None:
    directory, story = told
    blamed = [
        len(check_nothing_is_lost_silently(opened(directory), story))
        for _ in flips(directory, step=17)
    ]
    # How many blame nobody depends on what the cleaning has just copied: either copy will do.
    harm = [count for count in blamed if count]
    assert len(harm) > len(blamed) / 5
    assert harm.count(1) > 0.9 * len(harm)  # most is told apart


@pytest.mark.parametrize("part", ["header", "body"])
async def test_damage_is_told_to_whom_it_concerns(tmp_path: Path, part: str) -> None:
    """Of three models that nothing comes after, the one whose record it is."""
    journal, _ = await DiskJournal.open(tmp_path, files=QuickFiles())
    story = Story(journal)
    for model in (A, B, C):
        story.create(model)
        await journal.flushed()
    for model in (A, B, C):
        story.do(model, 1)
        await journal.flushed()
    await journal.aclose()
    (path,) = segments(tmp_path)
    log = bytearray(path.read_bytes())
    named = log.rindex(f"{B}:1".encode()) if part == "body" else log.rindex(b"committed")
    if part == "header":
        named = log.rindex(b"committed", 0, named)
    log[named + 3] ^= 4
    path.write_bytes(log)
    recovered = opened(tmp_path)
    damaged = {model.model_id: model.damage for model in recovered.models if model.damage}
    assert list(damaged) == [B]
    assert "segment 1" in damaged[B]
    assert seen(recovered)[A] == story.now[A]
    assert seen(recovered)[C] == story.now[C]

    journal, _ = await DiskJournal.open(tmp_path, files=QuickFiles())
    await journal.aclose()
    path.unlink()  # as cleaning might, when all of it is copied
    (left,) = (model for model in opened(tmp_path).models if model.model_id == B)
    assert left.damage == damaged[B]


async def test_a_segment_that_is_gone_is_damage(told: tuple[Path, Story]) -> None:
    directory, story = told
    segments(directory)[1].unlink()
    story.answers.clear()  # of those that replay does not need nobody knows
    assert check_nothing_is_lost_silently(opened(directory), story)


async def test_what_is_in_a_payload_cannot_pass_for_a_record(tmp_path: Path) -> None:
    """A caller who knows the format sends another model's end; then the frame around it breaks."""
    other = tmp_path / "other"
    journal, _ = await DiskJournal.open(other, files=QuickFiles())
    story = Story(journal)
    story.create(B)
    story.end(B)
    await journal.aclose()
    forged = segments(other)[0].read_bytes()

    journal, _ = await DiskJournal.open(tmp_path / "log", files=QuickFiles())
    story = Story(journal)
    story.create(A)
    story.create(B)
    tokens = np.frombuffer(forged[: len(forged) // 4 * 4], np.int32)
    job = work(A, 1, ForwardBackward((Datum(tokens, {}),), "cross_entropy", {}))
    story.accept(job)
    story.do(B, 1)
    await journal.flushed()
    await journal.aclose()
    (path,) = segments(tmp_path / "log")
    log = bytearray(path.read_bytes())
    at = log.index(f"{A}:1".encode())
    log[at] ^= 1
    path.write_bytes(log)
    recovered = opened(tmp_path / "log")
    assert seen(recovered)[B] == story.now[B]
    assert [model.model_id for model in recovered.models if model.damage] == [A]
