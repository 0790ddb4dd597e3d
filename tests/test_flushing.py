"""Rows outlive a power cut once they are flushed: the log is synced, once for all who ask."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from openrl.catalogue import Catalogue, Session
from openrl.types import OwnerId, SessionId


def session(name: str) -> Session:
    return Session(SessionId(name), OwnerId("ann"), 1.0)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are synced, in order."""
    files: list[str] = []

    def fsync(descriptor: int) -> None:
        files.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    return files


async def test_rows_are_synced_once_and_not_again(tmp_path: Path, synced: list[str]) -> None:
    catalogue = Catalogue(tmp_path / "c.sqlite")
    await catalogue.flushing.flushed()
    synced.clear()
    catalogue.add_session(session("a"))
    assert catalogue.flushing.behind
    await asyncio.gather(*(catalogue.flushing.flushed() for _ in range(5)))
    assert synced == ["c.sqlite-wal"]
    assert not catalogue.flushing.behind
    await catalogue.flushing.flushed()
    assert len(synced) == 1
    catalogue.close()


async def test_who_writes_during_a_sync_waits_for_the_next(
    tmp_path: Path, synced: list[str]
) -> None:
    catalogue = Catalogue(tmp_path / "c.sqlite")
    await catalogue.flushing.flushed()
    synced.clear()
    catalogue.add_session(session("a"))
    first = asyncio.create_task(catalogue.flushing.flushed())
    await asyncio.sleep(0)  # it has begun
    catalogue.add_session(session("b"))
    await catalogue.flushing.flushed()
    await first
    assert len(synced) == 2
    catalogue.close()


async def test_a_disk_that_fails_to_sync_is_said_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("the disk is ill")

    catalogue = Catalogue(tmp_path / "c.sqlite")
    monkeypatch.setattr(os, "fsync", fail)
    catalogue.add_session(session("a"))
    await catalogue.flushing.flushed()
    assert "the disk is ill" in caplog.text
    assert catalogue.flushing.behind  # a later sync has it too
    catalogue.close()


async def test_what_is_in_memory_alone_needs_no_sync(synced: list[str]) -> None:
    catalogue = Catalogue(None)
    catalogue.add_session(session("a"))
    await catalogue.flushing.flushed()
    assert synced == []
