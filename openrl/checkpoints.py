"""Where checkpoints lie on disk.

    ROOT/{model_id}/{kind}/{name}/{creation time in microseconds}/   a published checkpoint
    ROOT/.staging/{random}/                                          one being written

A checkpoint is written into a staging directory, flushed, and renamed: it is there whole or not
at all. Each creation has a directory of its own, so that overwriting a name never changes files
which somebody reads; which one a name means is the catalogue's row. Directories have mode 0700
and files 0600, since adapters may give away what they were trained on.

With a `Storage` beside it, a checkpoint is published when it is there too, and the directory is
a cache: `fetch` brings back what has been trimmed, or what another node has written.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from openrl.config import CheckpointsConfig
from openrl.errors import NotFound, UserError
from openrl.paths import check_name, parse_tinker_path
from openrl.storage import Storage
from openrl.types import ModelId, TinkerPath

_STAGING = ".staging"
_IN_USE_SECONDS = 3600.0
_UNBOUNDED = CheckpointsConfig()


@dataclass(frozen=True, slots=True)
class Staged:
    """An empty directory for an engine to write into."""

    directory: Path


class CheckpointStore:
    """Blocking; the callers run what touches many bytes off the event loop."""

    def __init__(
        self,
        root: Path,
        elsewhere: Storage | None = None,
        config: CheckpointsConfig = _UNBOUNDED,
    ) -> None:
        """Makes the root, and removes what a former process left half-written."""
        self._root = root
        self._config = config
        self._elsewhere = elsewhere
        _make_private(root)
        shutil.rmtree(root / _STAGING, ignore_errors=True)

    def directory(self, path: TinkerPath, created_at: float) -> Path:
        """Where the checkpoint lies, or would lie. Raises `UserError` for what is no path."""
        parsed = parse_tinker_path(path)
        stamp = str(int(created_at * 1e6))
        return self._root / _safe(parsed.model_id) / parsed.kind / check_name(parsed.name) / stamp

    def exists(self, path: TinkerPath, created_at: float) -> bool:
        """On this disk."""
        return self.directory(path, created_at).is_dir()

    def fetch(self, path: TinkerPath, created_at: float) -> Path:
        """The checkpoint's directory on this disk, brought here if need be. Raises `NotFound` when
        it is nowhere, and `OSError`."""
        target = self.directory(path, created_at)
        if target.is_dir():
            os.utime(target)  # used now: see `trim`
            return target
        if self._elsewhere is None:
            raise NotFound(f"the files of checkpoint {path!r} are not here")
        staged = self.stage()
        try:
            self._elsewhere.fetch(self._name(target), staged.directory)
            self._place(staged, target)
        except FileNotFoundError as error:
            self.discard(staged)
            raise NotFound(f"the files of checkpoint {path!r} are nowhere") from error
        except OSError:
            self.discard(staged)
            if not target.is_dir():  # else another has fetched it meanwhile
                raise
        return target

    def files(self, path: TinkerPath, created_at: float) -> tuple[Path, ...]:
        """Raises `NotFound` when the checkpoint's files are gone."""
        try:
            return tuple(sorted(self.directory(path, created_at).iterdir()))
        except FileNotFoundError as error:
            raise NotFound(f"the files of checkpoint {path!r} are not here") from error

    def check_room(self, count: int, size_bytes: int) -> None:
        """Raises `UserError` when an owner who keeps so many, of this size, may keep no more."""
        config = self._config
        for limit, kept, unit in (
            (config.owner_count, count, "checkpoints"),
            (config.owner_bytes, size_bytes, "bytes of checkpoints"),
        ):
            if limit and kept >= limit:
                raise UserError(
                    f"you keep {kept:,} {unit}, and this server allows {limit:,}: delete some, or "
                    "give the next ones a ttl"
                )

    def stage(self) -> Staged:
        directory = self._root / _STAGING / uuid.uuid4().hex
        _make_private(directory)
        return Staged(directory)

    def discard(self, staged: Staged) -> None:
        shutil.rmtree(staged.directory, ignore_errors=True)

    def publish(self, staged: Staged, path: TinkerPath, created_at: float) -> int:
        """Makes the staged files durable under their final name; returns their size in bytes.

        Raises `OSError`; then nothing is left under the final name.
        """
        target = self.directory(path, created_at)
        size = self._place(staged, target)
        if self._elsewhere is not None:
            try:
                self._elsewhere.put(target, self._name(target))
            except OSError:
                self.delete(path, created_at)
                raise
        return size

    def _place(self, staged: Staged, target: Path) -> int:
        size = _harden(staged.directory)
        _make_private(target.parent)
        staged.directory.rename(target)
        for parent in target.parents[:4]:  # as far as the root: any of them may be new
            _sync(parent)
        return size

    def copy(self, source: TinkerPath, made: float, path: TinkerPath, created_at: float) -> int:
        """Gives a checkpoint's files a second name, without taking more room where the file system
        can share them. Raises `NotFound` and `OSError`."""
        staged = self.stage()
        try:
            for file in sorted(self.fetch(source, made).iterdir()):
                _share(file, staged.directory / file.name)
            return self.publish(staged, path, created_at)
        except (OSError, NotFound):
            self.discard(staged)
            raise

    def delete(self, path: TinkerPath, created_at: float) -> None:
        """Does nothing when the checkpoint is not there. Raises `OSError` when a storage elsewhere
        cannot be reached; then it may still be there."""
        target = self.directory(path, created_at)
        self._drop(target)
        if self._elsewhere is not None:
            self._elsewhere.remove(self._name(target))

    def trim(self, now: float) -> int:
        """Forgets copies of what is elsewhere, the longest unused first, as far as they are more
        than the cache may hold and were not used for an hour. Returns how many those were."""
        if self._elsewhere is None:
            return 0
        most_bytes, horizon = self._config.cache_bytes, now - _IN_USE_SECONDS
        copies = sorted(self._copies(), key=lambda copy: copy.stat().st_mtime)
        total, dropped = sum(map(_size, copies)), 0
        for copy in copies:
            if total <= most_bytes or copy.stat().st_mtime >= horizon:
                break
            if self._elsewhere.has(self._name(copy)):
                total, dropped = total - _size(copy), dropped + 1
                self._drop(copy)
        return dropped

    def total_bytes(self) -> int:
        """On this disk."""
        return sum(f.stat().st_size for f in self._root.rglob("*") if f.is_file())

    def strays(self, known: Collection[Path]) -> list[Path]:
        """Directories on this disk that are none of those."""
        return [copy for copy in self._copies() if copy not in known]

    def run_of(self, directory: Path) -> ModelId:
        return ModelId(unquote(directory.relative_to(self._root).parts[0]))

    def sweep(self, strays: Iterable[Path]) -> None:
        for stray in strays:
            self._drop(stray)

    def _copies(self) -> Iterator[Path]:
        return self._root.glob("[!.]*/*/*/*/")

    def _drop(self, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        for parent in target.parents[:3]:
            if parent == self._root or not _remove_if_empty(parent):
                return

    def _name(self, target: Path) -> str:
        return target.relative_to(self._root).as_posix()


def _safe(model_id: str) -> str:
    """A model id as one directory name; ids are ours, yet none may climb out of the root."""
    name = quote(model_id, safe=":")
    if name.startswith(".") or len(name) > 255:
        raise UserError(f"model id {model_id!r} is not allowed")
    return name


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def _make_private(directory: Path) -> None:
    """With its parents; `mkdir` alone gives its mode to the last one only."""
    if not directory.is_dir():
        _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _share(file: Path, name: Path) -> None:
    """Checkpoints never change, so one file may have two names."""
    try:
        name.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(file, name)


def _harden(directory: Path) -> int:
    """Flushes every file and the directory to disk with private modes; returns the total size."""
    size = 0
    for file in directory.iterdir():
        file.chmod(0o600)
        _sync(file)
        size += file.stat().st_size
    _sync(directory)
    return size


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError:  # another name or another creation lies in it
        return False
    return True
