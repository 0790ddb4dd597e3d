"""The file of keys: `openrl keys` changes it, and a running server follows it."""

from __future__ import annotations

import fcntl
import hmac
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openrl.config import Config
from openrl.errors import UserError
from openrl.keys import (
    ID_CHARS,
    Holder,
    KeyEntry,
    digest_of,
    file_of,
    from_settings,
    new_key,
    parse,
)
from openrl.types import OwnerId

LOOK_SECONDS = 1.0
"""How old what a server knows of the file may be: a revoked key is good for no longer."""

log = logging.getLogger("openrl")


class KeysFile:
    """What `openrl keys` changes. Changes of two at a time follow each other, and readers see the
    old file or the new one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> tuple[KeyEntry, ...]:
        """None when there is no file. Raises `UserError` for one that cannot be read, is not in
        form, or may be written by others."""
        try:
            with self.path.open(encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & 0o022:
                    raise UserError(
                        f"{self.path} may be written by others than its owner: chmod go-w it"
                    )
                return tuple(parse(file.read(), str(self.path)))
        except FileNotFoundError:
            return ()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"keys file {self.path} cannot be read: {error}") from error

    def add(self, owner: OwnerId, admin: bool, since: str) -> tuple[str, KeyEntry]:
        """A new key, which is nowhere kept, and its line in the file. Raises `UserError`."""
        with self._changing() as standing:
            key = new_key()
            entry = KeyEntry(owner, digest_of(key), admin, since)
            self._write([*standing, entry.line])
        return key, entry

    def revoke(self, goes: Callable[[KeyEntry], bool]) -> tuple[KeyEntry, ...]:
        """Takes out what `goes` says; returns that. Raises `UserError`."""
        with self._changing() as standing:
            gone = tuple(filter(goes, self.entries()))
            digests = {f"sha256:{entry.digest}" for entry in gone}
            if gone:
                self._write([line for line in standing if digests.isdisjoint(line.split()[1:2])])
        return gone

    @contextmanager
    def _changing(self) -> Iterator[list[str]]:
        """Gives the lines that stand, while nobody else changes them."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.entries()  # in form, or nothing is changed
            yield self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        finally:
            os.close(lock)

    def _write(self, lines: Iterable[str]) -> None:
        """For its owner's eyes alone: that of the file before, or of the directory, since a
        server often runs as another user than the one who makes keys for it."""
        template = self.path if self.path.exists() else self.path.parent
        new = self.path.with_name(f"{self.path.name}.new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write("".join(f"{line}\n" for line in lines))
            with suppress(PermissionError):
                os.fchown(descriptor, template.stat().st_uid, template.stat().st_gid)
            out.flush()
            os.fsync(descriptor)
        new.replace(self.path)


def read_keys(config: Config) -> tuple[KeyEntry, ...]:
    """All that are listed. Raises `UserError`."""
    return (*KeysFile(file_of(config)).entries(), *from_settings(config.auth.keys))


# --- what a server knows --------------------------------------------------------------------


class KeyRing:
    """The keys that are let in: a file's, followed as it changes, and those of the settings."""

    def __init__(self, file: Path, fixed: Iterable[KeyEntry], clock: Callable[[], float]) -> None:
        """`clock` gives seconds and never goes back. Raises `UserError` for a file that is wrong:
        a server does not start with it, and does not stop for it later."""
        self._file = KeysFile(file)
        self._fixed = tuple(fixed)
        self._clock = clock
        self._seen = self._look()
        self._looked_at = clock()
        self._by_id = self._indexed(self._file.entries())

    def __len__(self) -> int:
        return len(self._by_id)

    def owners(self) -> frozenset[OwnerId]:
        return frozenset(entry.owner for entry in self._by_id.values())

    def find(self, key: str) -> Holder | None:
        """Compares in constant time: only the id, which is no secret, is looked up by itself."""
        self._follow()
        digest = digest_of(key)
        entry = self._by_id.get(digest[:ID_CHARS])
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            return None
        return entry.holder

    def named(self, key_id: str) -> Holder | None:
        """Of a key that was let in before, if it still is."""
        self._follow()
        entry = self._by_id.get(key_id)
        return entry.holder if entry else None

    def _follow(self) -> None:
        """Looks at the file again, once a second at most. One that is no more holds nobody; of one
        that cannot be read, what was known before holds until it is mended."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        if (seen := self._look()) == self._seen:
            return
        self._seen = seen
        try:
            self._by_id = self._indexed(self._file.entries())
        except UserError as error:
            log.error("the keys of before hold, since %s", error.message)
        else:
            log.info("the keys have changed: %d are let in", len(self))

    def _look(self) -> tuple[int, int, int, int] | None:
        """Differs when the file does: it is never written in place by us, and a Secret is a link
        that moves."""
        try:
            there = self._file.path.stat()
        except OSError:
            return None
        return there.st_ino, there.st_mtime_ns, there.st_ctime_ns, there.st_size

    def _indexed(self, listed: Iterable[KeyEntry]) -> dict[str, KeyEntry]:
        return {entry.key_id: entry for entry in (*self._fixed, *listed)}
