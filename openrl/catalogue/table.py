"""The catalogue's table of rows in SQLite: bodies in JSON, found by id, by owner or by parent."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from openrl.errors import ServerError

Filter = Literal["all", "owner", "parent", "readable", "project"]

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
    """
    CREATE INDEX by_public ON nouns (kind, json_extract(body, '$.public'));
    CREATE TABLE audit (
        owner TEXT NOT NULL, at REAL NOT NULL, event TEXT NOT NULL, details TEXT NOT NULL);
    CREATE INDEX audit_by_owner ON audit (owner, at);
    CREATE TABLE usage (
        owner TEXT NOT NULL, hour INTEGER NOT NULL, session TEXT NOT NULL,
        base_model TEXT NOT NULL, kind TEXT NOT NULL, amount INTEGER NOT NULL,
        PRIMARY KEY (owner, hour, session, base_model, kind)) WITHOUT ROWID;
    """,
    """
    CREATE TABLE placements (
        name TEXT PRIMARY KEY, session TEXT NOT NULL, node TEXT NOT NULL) WITHOUT ROWID;
    CREATE INDEX placements_by_session ON placements (session);
    """,
)
_PUT = """INSERT INTO nouns VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (kind, id) DO UPDATE SET
    owner = excluded.owner, parent = excluded.parent, created_at = excluded.created_at,
    body = excluded.body"""
_GET = "SELECT body FROM nouns WHERE kind = ? AND id = ?"
_DELETE = "DELETE FROM nouns WHERE kind = ? AND id = ?"
_EXPIRED = "SELECT body FROM nouns WHERE kind = ? AND json_extract(body, '$.expires_at') <= ?"
# "readable": an owner's runs, and those of others with a published checkpoint. "project": an
# owner's runs whose session is in a project.
_WHERE: dict[Filter, str] = {
    "all": "1",
    "owner": "owner = ?",
    "parent": "parent = ?",
    "readable": """(owner = ? OR id IN (SELECT parent FROM nouns
        WHERE kind = 'Checkpoint' AND json_extract(body, '$.public') = 1))""",
    "project": """owner = ? AND parent IN (SELECT id FROM nouns
        WHERE kind = 'Session' AND json_extract(body, '$.project_id') = ?)""",
}
_NEWEST = "ORDER BY created_at DESC, id DESC"
_AFTER = f"""SELECT body FROM nouns WHERE kind = ? AND owner = ?
    AND (created_at < ? OR (created_at = ? AND id < ?)) {_NEWEST}"""  # noqa: S608 - fixed text
_KEPT = """SELECT count(*), coalesce(sum(json_extract(body, '$.size_bytes')), 0) FROM nouns
    WHERE kind = 'Checkpoint' AND owner = ?"""
_STORED = """SELECT count(*), coalesce(sum(json_extract(body, '$.size_bytes')), 0) FROM nouns
    WHERE kind = 'Checkpoint' AND parent IN
    (SELECT id FROM nouns WHERE kind = 'Run' AND parent = ?)"""


class Table:
    """`sql` is the one connection to the catalogue's file; `ledgers` has its own tables there."""

    def __init__(self, file: Path | None) -> None:
        if file is not None:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
        self.sql = sqlite3.connect(file or ":memory:", isolation_level=None)
        try:
            self.sql.execute("PRAGMA journal_mode = WAL")
            self.sql.execute("PRAGMA synchronous = NORMAL")  # see `flushing`
            self._migrate()
        except sqlite3.Error as error:
            raise ServerError(f"the catalogue {file} cannot be opened: {error}") from error

    def _migrate(self) -> None:
        (version,) = self.sql.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise ServerError(
                f"the catalogue has format {version}; this server knows up to "
                f"{len(_MIGRATIONS)}: start the newer version that wrote it"
            )
        for number, script in enumerate(_MIGRATIONS[version:], start=version + 1):
            self.sql.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")

    def close(self) -> None:
        self.sql.close()

    def put(
        self, kind: str, identity: str, owner: str, parent: str, created_at: float, body: str
    ) -> None:
        """Takes the place of one of the same kind and id."""
        self.sql.execute(_PUT, (kind, identity, owner, parent, created_at, body))

    def get(self, kind: str, identity: str) -> str | None:
        row = self.sql.execute(_GET, (kind, identity)).fetchone()
        return None if row is None else row[0]

    def delete(self, kind: str, identity: str) -> None:
        self.sql.execute(_DELETE, (kind, identity))

    def owners(self, kind: str) -> tuple[str, ...]:
        rows = self.sql.execute("SELECT DISTINCT owner FROM nouns WHERE kind = ?", (kind,))
        return tuple(owner for (owner,) in rows)

    def expired(self, kind: str, now: float) -> list[str]:
        return [body for (body,) in self.sql.execute(_EXPIRED, (kind, now))]

    def page(
        self, kind: str, by: Filter, values: tuple[str, ...], limit: int, offset: int
    ) -> tuple[list[str], int]:
        """Newest first, and how many there are in all; a negative limit is none."""
        where = f"FROM nouns WHERE kind = ? AND {_WHERE[by]}"
        rows = self.sql.execute(  # the clauses are fixed text
            f"SELECT body {where} {_NEWEST} LIMIT ? OFFSET ?",
            (kind, *values, limit, offset),
        )
        bodies = [body for (body,) in rows]
        (total,) = self.sql.execute(
            f"SELECT count(*) {where}",
            (kind, *values),
        ).fetchone()
        return bodies, total

    def after(self, kind: str, owner: str, created_at: float, name: str) -> Iterator[str]:
        """An owner's, newest first, that come after one of this time and id."""
        for (body,) in self.sql.execute(_AFTER, (kind, owner, created_at, created_at, name)):
            yield body

    def stored(self, session_id: str) -> tuple[int, int]:
        """How many checkpoints the runs of a session have, and their size in bytes."""
        count, size = self.sql.execute(_STORED, (session_id,)).fetchone()
        return int(count), int(size)

    def kept(self, owner: str) -> tuple[int, int]:
        """How many checkpoints an owner has, and their size in bytes."""
        count, size = self.sql.execute(_KEPT, (owner,)).fetchone()
        return int(count), int(size)
