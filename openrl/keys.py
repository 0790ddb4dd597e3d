"""Who holds which key: a file of hashes that `openrl keys` writes and a running server follows.

One key a line, `OWNER sha256:HASH [admin] [since=TIME]`; an owner may hold several. Empty lines
and those that begin with `#` are left as they are. A mounted Secret has the same form.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from openrl.config import Config
from openrl.errors import UserError
from openrl.types import OwnerId

ID_CHARS = 12
"""How much of a hash names its key, to people and in identities. It is no secret."""

LOOK_SECONDS = 1.0
"""How old what a server knows of the file may be: a revoked key is good for no longer."""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_ADMIN = "admin"
_SINCE = "since="

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose request it is. `key_id` is what its key is called. `near`: the key is good on the
    server's own machine alone."""

    owner: OwnerId
    key_id: str
    admin: bool = False
    near: bool = False


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """`digest` is the hash in hexadecimal; `since` says when the key was made, in RFC 3339."""

    owner: OwnerId
    digest: str
    admin: bool = False
    since: str = ""

    @property
    def key_id(self) -> str:
        return self.digest[:ID_CHARS]

    @property
    def holder(self) -> Holder:
        return Holder(self.owner, self.key_id, self.admin)

    @property
    def line(self) -> str:
        marks = [_ADMIN] * self.admin + [f"{_SINCE}{self.since}"] * bool(self.since)
        return " ".join([self.owner, f"sha256:{self.digest}", *marks])


def new_key() -> str:
    """256 random bits behind what the SDK wants a key to begin with."""
    return f"tml-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """In hexadecimal. One round of SHA-256, without salt, is right for random keys of 256 bits:
    nobody can guess one to try it, and a slow hash would only be paid at every request. For
    passwords it would be wrong."""
    return hashlib.sha256(key.encode()).hexdigest()


def unlisted_owner(key: str) -> OwnerId:
    """Whom a key stands for where every key is let in."""
    return OwnerId(digest_of(key)[:32])


def check_owner(name: str) -> OwnerId:
    """Raises `UserError`."""
    if not _OWNER.fullmatch(name):
        raise UserError(
            f"owner {name[:80]!r}: use up to 64 letters, digits, '.', '_' and '-', not starting "
            "with one of the last three"
        )
    return OwnerId(name)


def checks_keys(config: Config) -> bool:
    """Whether listed keys alone are let in. Raises `UserError` where nobody has said whose are, and
    others could connect."""
    auth = config.auth
    if auth.keys_file and not auth.keys_file.exists():
        raise UserError(
            f"keys file {auth.keys_file} is not there: make a key with `openrl keys add --owner "
            "NAME`, or mount the file"
        )
    if auth.mode != "auto":
        return auth.mode == "keys"
    if auth.keys or file_of(config).exists():
        return True
    if is_loopback(config.host):
        return False
    raise UserError(
        f"there are no keys, and others can connect to {config.host!r}: make one with `openrl keys "
        f"add --owner NAME --data {config.data}`, listen at 127.0.0.1 alone, or let every key in "
        "with auth.mode = any-key (OPENRL_AUTH__MODE=any-key)"
    )


def is_loopback(host: str) -> bool:
    """Of an address to listen at. A name is loopback when it is `localhost`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- lines ----------------------------------------------------------------------------------


def parse(text: str, place: str) -> Iterator[KeyEntry]:
    """Raises `UserError` naming the line; what is on it is not repeated, it may be a key."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield _entry(line.split())
            except UserError as error:
                raise UserError(f"{place}, line {number}: {error.message}") from None


def _entry(words: list[str]) -> KeyEntry:
    owner = check_owner(words[0])
    found = _HASH.fullmatch(words[1]) if len(words) > 1 else None
    if found is None:
        raise UserError("expected OWNER sha256:HASH [admin] [since=TIME]; see openrl keys add")
    rest = words[2:]
    if unknown := [word for word in rest if word != _ADMIN and not word.startswith(_SINCE)]:
        raise UserError(f"{unknown[0][:20]!r} is not known here: admin or since=TIME")
    since = next((word.removeprefix(_SINCE) for word in rest if word.startswith(_SINCE)), "")
    return KeyEntry(owner, found[1], _ADMIN in rest, since)


def from_settings(given: Mapping[str, str]) -> Iterator[KeyEntry]:
    """Those of `auth.keys`. Raises `UserError`."""
    for owner, key in given.items():
        found = _HASH.fullmatch(key)
        yield KeyEntry(check_owner(owner), found[1] if found else digest_of(key))


# --- the file -------------------------------------------------------------------------------


def file_of(config: Config) -> Path:
    return config.auth.keys_file or config.data / "keys"


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
