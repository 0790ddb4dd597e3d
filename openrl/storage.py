"""Where checkpoints are kept besides this node's disk: anything that fsspec can write to.

`gs://bucket/prefix` needs gcsfs, `s3://bucket/prefix` s3fs; a shared file system is `file:///path`.
A folder counts once its manifest is there, which is written last: object stores have no rename
of folders. All calls block.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from openrl.errors import UserError

_MANIFEST = "complete.json"

T = TypeVar("T")


class Storage(Protocol):
    """Folders of files under names with slashes, whole or not there. Raises `OSError`."""

    def put(self, directory: Path, name: str) -> None: ...

    def fetch(self, name: str, directory: Path) -> None:
        """Into a directory that exists and is empty. Raises `FileNotFoundError`."""
        ...

    def has(self, name: str) -> bool: ...

    def remove(self, name: str) -> None:
        """Does nothing when it is not there."""
        ...


class FsspecStorage:
    def __init__(self, url: str) -> None:
        """Raises `UserError` when nothing here can read such a URL."""
        try:
            # Here, since only who keeps checkpoints elsewhere needs it.
            self._files, root = import_module("fsspec").url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoints.url {url!r} cannot be used: {error}. Install what it needs: gcsfs "
                "for gs://, s3fs for s3://"
            ) from error
        self._root = root.rstrip("/")

    def put(self, directory: Path, name: str) -> None:
        sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
        manifest = json.dumps({"files": sizes}).encode()
        self._do(self._files.makedirs, self._at(name), exist_ok=True)
        for file in sizes:
            self._do(self._files.put_file, str(directory / file), self._at(name, file))
        self._do(self._files.pipe_file, self._at(name, _MANIFEST), manifest)

    def fetch(self, name: str, directory: Path) -> None:
        manifest = self._do(self._files.cat_file, self._at(name, _MANIFEST))
        for file, size in json.loads(manifest)["files"].items():
            target = directory / file
            self._do(self._files.get_file, self._at(name, file), str(target))
            if target.stat().st_size != size:
                raise OSError(f"{name}/{file} has {target.stat().st_size} bytes instead of {size}")

    def has(self, name: str) -> bool:
        return bool(self._do(self._files.exists, self._at(name, _MANIFEST)))

    def remove(self, name: str) -> None:
        """The manifest goes first, so that what a broken connection leaves behind is nothing."""
        for path, recursive in ((self._at(name, _MANIFEST), False), (self._at(name), True)):
            if self._do(self._files.exists, path):
                self._do(partial(self._files.rm, recursive=recursive), path)

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _do(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        try:
            return call(*arguments, **options)
        except OSError:
            raise
        except Exception as error:  # each backend has errors of its own
            raise OSError(f"{type(error).__name__}: {error}") from error
