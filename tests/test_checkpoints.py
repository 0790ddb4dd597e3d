"""Checkpoints are there whole or not at all, and never outside their root."""

import stat
from pathlib import Path

import pytest

from openrl.checkpoints import CheckpointStore, Staged
from openrl.errors import UserError
from openrl.types import TinkerPath

PATH = TinkerPath("tinker://s:train:0/weights/a")
MADE = 1733333333.123456


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def written(store: CheckpointStore, text: str = "weights") -> Staged:
    staged = store.stage()
    (staged.directory / "adapter_model.safetensors").write_text(text)
    return staged


def test_a_checkpoint_appears_with_its_publication(store: CheckpointStore) -> None:
    staged = written(store)
    assert not store.exists(PATH, MADE)
    assert store.publish(staged, PATH, MADE) == 7
    assert (store.directory(PATH, MADE) / "adapter_model.safetensors").read_text() == "weights"
    assert not staged.directory.exists()
    assert store.total_bytes() == 7


def test_a_newer_creation_leaves_the_older_files_alone(store: CheckpointStore) -> None:
    store.publish(written(store, "old"), PATH, MADE)
    store.publish(written(store, "new"), PATH, MADE + 1e-6)
    old, new = store.directory(PATH, MADE), store.directory(PATH, MADE + 1e-6)
    assert (old / "adapter_model.safetensors").read_text() == "old"
    assert (new / "adapter_model.safetensors").read_text() == "new"
    store.delete(PATH, MADE)
    assert not store.exists(PATH, MADE)
    assert store.exists(PATH, MADE + 1e-6)


def test_a_discarded_or_half_written_one_leaves_nothing(
    store: CheckpointStore, tmp_path: Path
) -> None:
    store.discard(written(store))
    assert store.total_bytes() == 0
    written(store)  # and the process dies
    assert CheckpointStore(tmp_path / "checkpoints").total_bytes() == 0


def test_deletion_takes_empty_parents_with_it(store: CheckpointStore, tmp_path: Path) -> None:
    other = TinkerPath("tinker://s:train:0/sampler_weights/b")
    store.publish(written(store), PATH, MADE)
    store.publish(written(store), other, MADE)
    store.delete(PATH, MADE)
    store.delete(PATH, MADE)  # gone already
    assert store.exists(other, MADE)
    store.delete(other, MADE)
    assert not list((tmp_path / "checkpoints").glob("s*"))


def test_modes_are_private(store: CheckpointStore, tmp_path: Path) -> None:
    store.publish(written(store), PATH, MADE)
    for entry in [tmp_path / "checkpoints", *(tmp_path / "checkpoints").rglob("*")]:
        wanted = 0o700 if entry.is_dir() else 0o600
        assert stat.S_IMODE(entry.stat().st_mode) == wanted, entry


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/a",
        "tinker://..%2f/weights/../../a",
        "tinker://s:train:0/weights/..",
        "tinker://s:train:0/weights/.hidden",
        "tinker://s:train:0/elsewhere/a",
        "tinker://s:train:0/weights/a\0",
        "tinker://" + "m" * 300 + "/weights/a",
        "/etc/passwd",
    ],
)
def test_no_name_escapes(store: CheckpointStore, path: str) -> None:
    with pytest.raises(UserError):
        store.directory(TinkerPath(path), MADE)


def test_odd_model_ids_stay_inside(store: CheckpointStore, tmp_path: Path) -> None:
    path = TinkerPath("tinker://a b\\c%2f..:train:0/weights/a")
    inside = store.directory(path, MADE).resolve()
    assert inside.parents[3] == (tmp_path / "checkpoints").resolve()
