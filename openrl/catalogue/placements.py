"""Which node serves a model or sampling session of a session that has its home here."""

from __future__ import annotations

import sqlite3


class Placements:
    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def node(self, name: str) -> str | None:
        row = self._sql.execute("SELECT node FROM placements WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, name: str, session_id: str, node: str) -> str:
        """The first one stands: a repeated creation goes where the first went."""
        self._sql.execute(
            "INSERT INTO placements VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (name, session_id, node),
        )
        return self.node(name) or node

    def nodes_of(self, session_id: str) -> frozenset[str]:
        rows = self._sql.execute(
            "SELECT DISTINCT node FROM placements WHERE session = ?", (session_id,)
        )
        return frozenset(str(node) for (node,) in rows)
