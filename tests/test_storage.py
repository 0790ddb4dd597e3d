"""Checkpoints that are kept elsewhere too, over real fsspec file systems."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrl.checkpoints import CheckpointStore, Staged
from openrl.config import CheckpointsConfig
from openrl.errors import NotFound, UserError
from openrl.storage import FsspecStorage
from openrl.types import TinkerPath

PATH = TinkerPath("tinker://s:train:0/weights/a")
MADE = 1733333333.123456
FILE = "adapter_model.safetensors"


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/bucket/prefix"
    return f"memory://{uuid.uuid4().hex}/prefix"


def store_at(root: Path, url: str, cache_bytes: int = 1 << 30) -> CheckpointStore:
    return CheckpointStore(root, FsspecStorage(url), CheckpointsConfig(cache_bytes=cache_bytes))


def written(store: CheckpointStore, text: str = "weights") -> Staged:
    staged = store.stage()
    (staged.directory / FILE).write_text(text)
    (staged.directory / "adapter_config.json").write_text("{}")
    return staged


def test_another_node_reads_what_one_has_published(url: str, tmp_path: Path) -> None:
    store_at(tmp_path / "one", url).publish(written(store_at(tmp_path / "one", url)), PATH, MADE)
    other = store_at(tmp_path / "two", url)
    assert not other.exists(PATH, MADE)
    directory = other.fetch(PATH, MADE)
    assert {f.name: f.read_text() for f in directory.iterdir()} == {
        FILE: "weights",
        "adapter_config.json": "{}",
    }
    assert other.fetch(PATH, MADE) == directory  # it stays


def test_what_is_nowhere_is_said_to_be(url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        store_at(tmp_path / "one", url).fetch(PATH, MADE)
    with pytest.raises(NotFound, match="not here"):
        CheckpointStore(tmp_path / "two").fetch(PATH, MADE)
    assert not list((tmp_path / "one" / ".staging").iterdir())


def test_deletion_reaches_both(url: str, tmp_path: Path) -> None:
    store = store_at(tmp_path / "one", url)
    store.publish(written(store), PATH, MADE)
    store.delete(PATH, MADE)
    assert not store.exists(PATH, MADE)
    with pytest.raises(NotFound):
        store_at(tmp_path / "two", url).fetch(PATH, MADE)
    store.delete(PATH, MADE)  # once more is no error


class Breaking(FsspecStorage):
    def _do(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if getattr(call, "__name__", "") == "pipe_file":
            raise OSError("the connection broke before the manifest")
        return super()._do(call, *arguments, **options)


def test_a_broken_upload_leaves_no_checkpoint(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    store = CheckpointStore(tmp_path / "one", Breaking(url))
    with pytest.raises(OSError, match="before the manifest"):
        store.publish(written(store), PATH, MADE)
    assert not store.exists(PATH, MADE)
    with pytest.raises(NotFound):
        store_at(tmp_path / "two", url).fetch(PATH, MADE)


def test_a_file_that_lost_its_end_is_not_taken(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    store = store_at(tmp_path / "one", url)
    store.publish(written(store), PATH, MADE)
    (kept,) = (tmp_path / "bucket").rglob(FILE)
    os.truncate(kept, 3)
    with pytest.raises(OSError, match="3 bytes instead of 7"):
        store_at(tmp_path / "two", url).fetch(PATH, MADE)


def test_copies_are_trimmed_by_their_last_use_and_come_back(url: str, tmp_path: Path) -> None:
    store = store_at(tmp_path / "one", url, cache_bytes=20)
    for number in range(3):
        store.publish(written(store), PATH, MADE + number)
        os.utime(store.directory(PATH, MADE + number), (1000 + number, 1000 + number))
    store.fetch(PATH, MADE)  # the oldest is used now
    assert store.trim(now=1001 + 3600) == 0  # the rest was used within an hour of then
    assert store.trim(now=2000 + 3600) == 1
    assert [store.exists(PATH, MADE + n) for n in range(3)] == [True, False, True]
    assert (store.fetch(PATH, MADE + 1) / FILE).read_text() == "weights"


def test_nothing_is_trimmed_that_is_here_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "one", config=CheckpointsConfig(cache_bytes=1))
    store.publish(written(store), PATH, MADE)
    assert store.trim(now=1e12) == 0
    assert store.exists(PATH, MADE)


def test_an_owner_who_keeps_too_much_is_told_what_to_do(tmp_path: Path) -> None:
    config = CheckpointsConfig(owner_count=2, owner_bytes=1000)
    store = CheckpointStore(tmp_path / "one", config=config)
    store.check_room(1, 999)
    with pytest.raises(UserError, match="2 checkpoints, and this server allows 2: delete some"):
        store.check_room(2, 0)
    with pytest.raises(UserError, match="1,200 bytes"):
        store.check_room(1, 1200)
    CheckpointStore(tmp_path / "two").check_room(10**6, 10**15)


def test_strays_are_found_and_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "one")
    store.publish(written(store), PATH, MADE)
    store.publish(written(store), PATH, MADE + 1)
    strays = store.strays({store.directory(PATH, MADE)})
    assert [store.run_of(stray) for stray in strays] == ["s:train:0"]
    store.sweep(strays)
    assert [store.exists(PATH, MADE + n) for n in range(2)] == [True, False]


def test_a_url_that_nothing_can_read_says_what_to_install() -> None:
    with pytest.raises(UserError, match="gcsfs"):
        FsspecStorage("no-such-protocol://bucket")
