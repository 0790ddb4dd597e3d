"""What the journal asks of a file system, in one place, so that tests can make it fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from openrl.journal.records import Buffer


class FileOperations(Protocol):
    """All raise `OSError`."""

    def create(self, path: Path) -> int:
        """A new file for writing, readable by its owner alone; its name is durable."""
        ...

    def write(self, file: int, data: Buffer) -> int:
        """May write less than all; returns how much."""
        ...

    def sync(self, file: int) -> None:
        """Returns when what was written is durable."""
        ...

    def truncate(self, file: int, size: int) -> None: ...

    def close(self, file: int) -> None: ...

    def read(self, path: Path, offset: int = 0, size: int | None = None) -> bytes:
        """`size` bytes, or all; less where the file ends."""
        ...

    def cut(self, path: Path, size: int) -> None:
        """The file is `size` bytes long, durably."""
        ...

    def unlink(self, path: Path) -> None: ...


class LocalFiles:
    def create(self, path: Path) -> int:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            _sync_directory(path.parent)
        except OSError:
            os.close(file)
            raise
        return file

    def write(self, file: int, data: Buffer) -> int:
        return os.write(file, data)

    def sync(self, file: int) -> None:
        _sync_data(file)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def close(self, file: int) -> None:
        os.close(file)

    def read(self, path: Path, offset: int = 0, size: int | None = None) -> bytes:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            wanted = os.fstat(file.fileno()).st_size - offset if size is None else size
            parts = []
            while wanted > 0 and (part := file.read(wanted)):
                parts.append(part)
                wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def cut(self, path: Path, size: int) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(file, size)
            os.fsync(file)
        finally:
            os.close(file)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)


_sync_data = getattr(os, "fdatasync", os.fsync)  # there is none on macOS


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
