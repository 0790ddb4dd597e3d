"""Snapshots on disk: files that a thread writes while the engine goes on, and a manifest.

The manifest is written last and names each file with its size and checksum, so a snapshot is
there whole or not at all, on object stores too, where renaming a directory is not atomic.
Directories have mode 0700 and files 0600: adapters are learnt from their users' data.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from openrl.engines.base import Written
from openrl.errors import ServerError

MANIFEST = "manifest.json"

_COPIES = 2
"""So many copies may wait for the disk; who wants one more waits too, so memory is bounded."""

_CHUNK = 1 << 20

WriteFiles = Callable[[Path], None]
"""Writes the snapshot's files into a directory. Raises `OSError` when it cannot."""


class SnapshotWriter:
    """Its thread starts with the first snapshot and ends with the process."""

    def __init__(self) -> None:
        self._orders: queue.Queue[tuple[Path, WriteFiles, bool]] = queue.Queue()
        self._copies = threading.BoundedSemaphore(_COPIES)
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, directory: Path, copy: Callable[[], WriteFiles]) -> None:
        """Copies now and writes later. Returns at once, or when an earlier copy has been
        written."""
        self._copies.acquire()
        try:
            self._order(directory, copy(), True)
        except BaseException:
            self._copies.release()
            raise

    def write_shared(self, directory: Path, files: WriteFiles) -> None:
        """What `files` reads stays as it is and in memory anyway: nobody waits."""
        self._order(directory, files, False)

    def _order(self, directory: Path, files: WriteFiles, copied: bool) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
            self._thread.start()
        self._orders.put((directory, files, copied))

    def finish(self) -> None:
        """Returns when all that was asked for has been written, or has failed."""
        self._orders.join()

    def collect(self) -> tuple[Written, ...]:
        """Those that have ended since the last call."""
        ended = []
        while not self._written.empty():
            ended.append(self._written.get())
        return tuple(ended)

    def _work(self) -> None:
        while True:
            directory, files, copied = self._orders.get()
            self._written.put(_written(directory, files))
            del files
            if copied:
                self._copies.release()
            self._orders.task_done()


def whole(directory: Path, verify: bool = False) -> bool:
    """Whether a snapshot is there with all its files; `verify` reads them for their checksums."""
    try:
        check(directory, verify)
    except ServerError:
        return False
    return True


def check(directory: Path, verify: bool = True) -> None:
    """Raises `ServerError` that says what is missing or damaged."""
    try:
        stated = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, file in stated.items():
            _check_file(directory / name, file["bytes"], file["crc32"] if verify else None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"snapshot {directory.name} is not whole: {error!r}") from error


def _check_file(path: Path, size: int, crc: int | None) -> None:
    if path.stat().st_size != size or (crc is not None and _crc32(path) != crc):
        raise ValueError(f"{path.name} is not what was written")


def _written(directory: Path, files: WriteFiles) -> Written:
    try:
        return Written(directory, _write(directory, files))
    except Exception as error:  # noqa: BLE001 - the thread's boundary: whoever asked is told
        shutil.rmtree(directory, ignore_errors=True)
        return Written(directory, error=f"{type(error).__name__}: {error}")


def _write(directory: Path, files: WriteFiles) -> int:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700)
    files(directory)
    stated = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o600)
        _sync(path)
        stated[path.name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    _write_manifest(directory, json.dumps({"files": stated}))
    _sync(directory.parent)
    return sum(file["bytes"] for file in stated.values())


def _write_manifest(directory: Path, text: str) -> None:
    _sync(directory)  # the names of the files, before the manifest that counts on them
    draft = directory / f".{MANIFEST}"
    draft.write_text(text + "\n", encoding="utf-8")
    draft.chmod(0o600)
    _sync(draft)
    draft.rename(directory / MANIFEST)
    _sync(directory)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
