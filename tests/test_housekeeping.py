"""A full disk: what cannot be written waits, and what makes room is done."""

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.actors import every
from openrl.catalogue import Catalogue, Checkpoint, Run
from openrl.catalogue.ledgers import HOUR, Bucket
from openrl.checkpoints import CheckpointStore
from openrl.futures import Futures
from openrl.housekeeping import delete_expired, sweep_strays, tidy
from openrl.storage import FsspecStorage
from openrl.types import LoraConfig, ModelId, OwnerId, RequestId, SessionId, TinkerPath

ME = OwnerId("me")
RUN = Run(ModelId("s:train:0"), SessionId("s"), ME, "base", LoraConfig(), 1.0, 1.0)
BUCKET = Bucket(ME, HOUR, "s", "base", "training")
PATH = TinkerPath("tinker://s:train:0/weights/old")


def expired() -> Checkpoint:
    model, lora = ModelId("s:train:0"), LoraConfig()
    return Checkpoint(PATH, model, ME, "weights", "old", "base", lora, 1.0, 4, True, expires_at=2.0)


async def test_a_full_disk_stops_nothing_for_good(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.sqlite"
    catalogue, store = Catalogue(file), CheckpointStore(tmp_path / "checkpoints")
    futures = Futures(clock=lambda: 1e9, retention_seconds=0.0)
    staged = store.stage()
    (staged.directory / "adapter").write_bytes(b"1234")
    store.publish(staged, PATH, 1.0)
    catalogue.add_run(RUN)
    catalogue.add_checkpoint(expired())
    catalogue.touch_run(RUN.model_id, 7.0)
    catalogue.usage.count(BUCKET, 5)

    disk = sqlite3.connect(file)
    for table, what in (("nouns", "INSERT"), ("nouns", "DELETE"), ("usage", "INSERT")):
        disk.execute(
            f"CREATE TRIGGER {table}_{what} BEFORE {what} ON {table} "
            "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
        )
    catalogue.audit.add(ME, 3.0, "checkpoint_create")
    await tidy(catalogue, store, futures, 3.0)
    assert not store.exists(PATH, 1.0)  # the room that the rest needs
    assert catalogue.runs(ME).items[0].last_request_at == 7.0  # reading needs no writing

    for name in ("nouns_INSERT", "nouns_DELETE", "usage_INSERT"):
        disk.execute(f"DROP TRIGGER {name}")
    await tidy(catalogue, store, futures, 3.0)
    assert catalogue.find_checkpoint(PATH) is None
    assert catalogue.usage.between(ME, 0.0, 1e9) == ((BUCKET, 5),)
    catalogue.close()
    assert Catalogue(file).run(RUN.model_id, ME).last_request_at == 7.0


class Away(FsspecStorage):
    """A storage that can be reached no more."""

    def remove(self, name: str) -> None:
        raise OSError("no route to the bucket")


async def test_a_storage_that_is_away_keeps_nobody_from_being_counted(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.sqlite")
    store = CheckpointStore(tmp_path / "checkpoints", Away(f"file://{tmp_path}/bucket"))
    futures = Futures(clock=lambda: 1e9, retention_seconds=0.0)
    catalogue.add_checkpoint(expired())
    catalogue.usage.count(BUCKET, 5)
    await tidy(catalogue, store, futures, 3.0)
    assert catalogue.find_checkpoint(PATH) is not None  # the next round's
    written = sqlite3.connect(tmp_path / "catalogue.sqlite")
    assert written.execute("SELECT amount FROM usage").fetchall() == [(5,)]


def test_an_entry_that_cannot_be_kept_fails_nobody(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.sqlite")
    sqlite3.connect(tmp_path / "catalogue.sqlite").execute("DROP TABLE audit")
    catalogue.audit.add(ME, 3.0, "checkpoint_create")


async def test_old_answers_are_forgotten(tmp_path: Path) -> None:
    catalogue, store = Catalogue(None), CheckpointStore(tmp_path)
    time = [0.0]
    futures = Futures(lambda: time[0], retention_seconds=10.0)
    futures.open(RequestId("r"), ME, "Sample", "lane")
    futures.resolve(RequestId("r"), None)  # type: ignore[arg-type]
    time[0] = 11.0
    await tidy(catalogue, store, futures, 0.0)
    assert len(futures) == 0


async def test_strays_of_known_runs_go_and_those_of_a_lost_catalogue_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue, store = Catalogue(None), CheckpointStore(tmp_path)
    catalogue.add_run(RUN)
    catalogue.add_checkpoint(expired())
    lost = TinkerPath("tinker://other:train:0/weights/old")
    for path, created_at in ((PATH, 1.0), (PATH, 2.0), (lost, 1.0)):
        staged = store.stage()
        (staged.directory / "adapter").write_bytes(b"1234")
        store.publish(staged, path, created_at)
    await sweep_strays(catalogue, store)
    assert store.exists(PATH, 1.0)
    assert not store.exists(PATH, 2.0)
    assert store.exists(lost, 1.0)
    assert "1 checkpoints are of runs that catalogue.sqlite doesn't know" in caplog.text


async def test_one_checkpoint_that_cannot_be_deleted_keeps_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(CheckpointStore):
        def delete(self, path: TinkerPath, created_at: float) -> None:
            if path == PATH:
                raise OSError("the bucket is away")
            super().delete(path, created_at)

    other = TinkerPath("tinker://s:train:0/weights/other")
    catalogue = Catalogue(None)
    catalogue.add_checkpoint(expired())
    catalogue.add_checkpoint(replace(expired(), path=other))
    assert await delete_expired(catalogue, Away(tmp_path), 1e9) == 1
    assert catalogue.find_checkpoint(PATH) is not None
    assert catalogue.find_checkpoint(other) is None
    assert "the bucket is away" in caplog.text


async def test_a_round_that_fails_is_followed_by_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds: list[int] = []
    third = asyncio.Event()

    async def tidying() -> None:
        rounds.append(1)
        if len(rounds) == 3:
            third.set()
        raise ValueError("a surprise")

    task = asyncio.create_task(every(0.0, tidying))
    await third.wait()
    task.cancel()
    assert "a round of tidying failed" in caplog.text
