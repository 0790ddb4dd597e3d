"""The catalogue's one table in SQLite: bodies in JSON, found by id, by owner or by parent."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

from openrl.errors import ServerError

Column = Literal["owner", "parent"]

# What is looked up by has a column; everything else is in `body`.
_MIGRATIONS = (
    """
    CREATE TABLE nouns (
        kind TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, parent TEXT NOT NULL,
        created_at REAL NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, id)) WITHOUT ROWID;
    CREATE INDEX by_owner ON nouns (kind, owner, created_at DESC, id DESC);
    CREATE INDEX by_parent ON nouns (kind, parent, created_at DESC, id DESC);
    CREATE INDEX by_expiry ON nouns (kind, json_extract(body, '$.expires_at'));
    """,
)
_PUT = """INSERT INTO nouns VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (kind, id) DO UPDATE SET
    owner = excluded.owner, parent = excluded.parent, created_at = excluded.created_at,
    body = excluded.body"""
_GET = "SELECT body FROM nouns WHERE kind = ? AND id = ?"
_DELETE = "DELETE FROM nouns WHERE kind = ? AND id = ?"
_EXPIRED = "SELECT body FROM nouns WHERE kind = ? AND json_extract(body, '$.expires_at') <= ?"
_PAGE = {
    "owner": """SELECT body FROM nouns WHERE kind = ? AND owner = ?
        ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?""",
    "parent": """SELECT body FROM nouns WHERE kind = ? AND parent = ?
        ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?""",
}
_COUNT = {
    "owner": "SELECT count(*) FROM nouns WHERE kind = ? AND owner = ?",
    "parent": "SELECT count(*) FROM nouns WHERE kind = ? AND parent = ?",
}


class NounTable:
    def __init__(self, file: Path | None) -> None:
        if file is not None:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
        self._sql = sqlite3.connect(file or ":memory:", isolation_level=None)
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = NORMAL")
        self._migrate()

    def _migrate(self) -> None:
        (version,) = self._sql.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise ServerError(
                f"the catalogue has format {version}; this server knows up to "
                f"{len(_MIGRATIONS)}: start the newer version that wrote it"
            )
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            self._sql.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")

    def close(self) -> None:
        self._sql.close()

    def put(
        self, kind: str, identity: str, owner: str, parent: str, created_at: float, body: str
    ) -> None:
        """Takes the place of one of the same kind and id."""
        self._sql.execute(_PUT, (kind, identity, owner, parent, created_at, body))

    def get(self, kind: str, identity: str) -> str | None:
        row = self._sql.execute(_GET, (kind, identity)).fetchone()
        return None if row is None else row[0]

    def delete(self, kind: str, identity: str) -> None:
        self._sql.execute(_DELETE, (kind, identity))

    def expired(self, kind: str, now: float) -> list[str]:
        return [body for (body,) in self._sql.execute(_EXPIRED, (kind, now))]

    def page(
        self, kind: str, by: Column, value: str, limit: int, offset: int
    ) -> tuple[list[str], int]:
        """Newest first, and how many there are in all; a negative limit is none."""
        rows = self._sql.execute(_PAGE[by], (kind, value, limit, offset))
        bodies = [body for (body,) in rows]
        (total,) = self._sql.execute(_COUNT[by], (kind, value)).fetchone()
        return bodies, total
