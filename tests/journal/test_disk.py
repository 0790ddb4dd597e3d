"""What is told comes back."""

from pathlib import Path

import pytest
from support.journal import (
    Seen,
    created,
    creation,
    same,
    seen,
    segments,
    stepped,
    trained,
    training,
    work,
)

from openrl.errors import ServerError, UserError
from openrl.journal import DiskJournal
from openrl.types import Failed, ModelId, RequestId, UnloadModel

A = "s:train:0"
B = "s:train:1"


async def begin(journal: DiskJournal, model: str) -> None:
    journal.accepted(creation(model), atom_tokens=512)
    journal.committed(creation(model), created(model))


async def test_a_model_comes_back_with_what_it_did_and_what_waits(tmp_path: Path) -> None:
    journal, nothing = await DiskJournal.open(tmp_path)
    assert (nothing.models, nothing.answers, nothing.damage) == ((), (), None)
    await begin(journal, A)
    journal.accepted(training(A, 1))
    journal.accepted(work(A, 2))
    journal.accepted(work(A, 3))
    journal.started(training(A, 1))
    journal.committed(training(A, 1), trained(1))
    journal.started(work(A, 2))
    journal.started(work(A, 2))
    journal.committed(work(A, 3), Failed(UserError("no")))
    await journal.flushed()
    await journal.aclose()

    journal, recovered = await DiskJournal.open(tmp_path)
    (model,) = recovered.models
    assert model.model_id == A
    assert same(model.creation, creation(A))
    assert model.created == created(A)
    assert (model.atom_tokens, model.owner) == (512, "alice")
    assert seen(recovered)[A] == Seen(
        None,
        ((f"{A}:1", "ForwardBackward", False), (f"{A}:3", "OptimStep", True)),
        (f"{A}:2",),
        3,
        True,
    )
    assert recovered.attempts == {f"{A}:2": 2}
    assert [each.request_id for each in recovered.answers] == [f"{A}:0", f"{A}:1", f"{A}:3"]
    assert same(recovered.work(RequestId(f"{A}:1")), training(A, 1))
    assert same(recovered.work(RequestId(f"{A}:2")), work(A, 2))
    assert same(recovered.outcome(RequestId(f"{A}:1")), trained(1))
    assert same(recovered.outcome(RequestId(f"{A}:3")), Failed(UserError("no")))
    with pytest.raises(ServerError, match="is not in the journal"):
        recovered.outcome(RequestId(f"{A}:2"))
    await journal.aclose()


async def test_a_snapshot_hides_what_it_includes(tmp_path: Path) -> None:
    journal, _ = await DiskJournal.open(tmp_path)
    await begin(journal, A)
    for seq in (1, 2, 3, 4):
        journal.accepted(work(A, seq))
    for seq in (1, 2, 3):
        journal.committed(work(A, seq), stepped(seq))
    before = journal.size_of(ModelId(A))
    journal.snapshot(ModelId(A), RequestId(f"{A}:2"), "first")
    assert 0 < journal.size_of(ModelId(A)) < before
    await journal.aclose()
    expected = Seen((f"{A}:2", "first"), ((f"{A}:3", "OptimStep", False),), (f"{A}:4",), 3, True)
    for _ in range(2):
        journal, recovered = await DiskJournal.open(tmp_path)
        assert seen(recovered)[A] == expected
        assert same(recovered.work(RequestId(f"{A}:3")), work(A, 3))
        await journal.aclose()
    journal, _ = await DiskJournal.open(tmp_path)
    with pytest.raises(ValueError, match="no executed operation"):
        journal.snapshot(ModelId(A), RequestId(f"{A}:1"), "older")
    journal.snapshot(ModelId(A), RequestId(f"{A}:2"), "same position")
    await journal.aclose()


async def test_what_ended_does_not_come_back(tmp_path: Path) -> None:
    journal, _ = await DiskJournal.open(tmp_path)
    await begin(journal, A)
    journal.accepted(work(A, 1, UnloadModel()))
    journal.committed(work(A, 1, UnloadModel()), stepped(0))
    journal.ended(ModelId(A))
    journal.ended(ModelId(A))
    journal.accepted(creation(B))
    journal.committed(creation(B), Failed(UserError("no such model")))
    await journal.aclose()
    journal, recovered = await DiskJournal.open(tmp_path)
    assert recovered.models == ()
    assert [each.request_id for each in recovered.answers] == [f"{A}:0", f"{A}:1", f"{B}:0"]
    journal.forgotten([each.request_id for each in recovered.answers])
    await journal.clean()
    await journal.clean()
    await journal.aclose()
    _, recovered = await DiskJournal.open(tmp_path)
    assert (recovered.models, recovered.answers, recovered.damage) == ((), (), None)


async def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    journal, _ = await DiskJournal.open(tmp_path / "journal")
    await begin(journal, A)
    await journal.aclose()
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in segments(tmp_path / "journal")] == [0o600]


async def test_what_starts_ended_in_is_told_until_one_goes_on(tmp_path: Path) -> None:
    """Each start makes the model first, then does again what has an outcome, in its order."""
    journal, _ = await DiskJournal.open(tmp_path, segment_bytes=256)
    await begin(journal, A)
    for seq in (1, 2, 3):
        journal.accepted(work(A, seq))
        journal.committed(work(A, seq), stepped(seq))
    await journal.aclose()

    async def start(*done: int | None) -> dict[str, int]:
        """Does those again and ends; how often starts have ended in what, for the next."""
        journal, _ = await DiskJournal.open(tmp_path, segment_bytes=256)
        for seq in done:
            request_id = None if seq is None else RequestId(f"{A}:{seq}")
            journal.redoing(ModelId(A), request_id)
        await journal.flushed()
        await journal.clean()
        await journal.aclose()
        journal, recovered = await DiskJournal.open(tmp_path, segment_bytes=256)
        await journal.aclose()
        return {name.removeprefix(f"{A}:"): n for name, n in recovered.deaths.items()}

    assert await start(0) == {"0": 1}
    assert await start(0, 1, 2) == {"2": 1}
    assert await start(0, 1, 2) == {"2": 2}
    assert await start(0, 1) == {"1": 1, "2": 2}
    assert await start(0, 1, 2, 3) == {"3": 1}
    assert await start(0) == {"0": 1, "3": 1}
    assert await start(0, 1, 2, 3, None) == {}
    for _ in range(3):
        assert await start() == {}
    assert await start(0, 1, 2, 3) == {"3": 1}
    journal, _ = await DiskJournal.open(tmp_path, segment_bytes=256)
    journal.snapshot(ModelId(A), RequestId(f"{A}:3"), "all")
    await journal.aclose()
    assert await start() == {}
    assert await start(3) == {"3": 1}
    assert await start(3, None) == {}
