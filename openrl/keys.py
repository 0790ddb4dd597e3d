"""Who holds which key, and whose keys are let in.

Keys are listed in a file of hashes (see `key_files`), one a line, `OWNER sha256:HASH [admin]
[since=TIME]`; an owner may hold several. Empty lines and those that begin with `#` are left as they
are. A mounted Secret has the same form.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from openrl.config import Config
from openrl.errors import UserError
from openrl.types import OwnerId

ID_CHARS = 12
"""How much of a hash names its key, to people and in identities. It is no secret."""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_ADMIN = "admin"
_SINCE = "since="


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose request it is. `key_id` is what its key is called. `near`: the key is good on the
    server's own machine alone. `unlisted`: anybody could have named it."""

    owner: OwnerId
    key_id: str
    admin: bool = False
    near: bool = False
    unlisted: bool = False


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


def file_of(config: Config) -> Path:
    return config.auth.keys_file or config.data / "keys"


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
