"""Runs SQL written by a model. Nothing it says can write, reach a file, hang or eat the memory.

Each query gets a database of its own in memory, which is gone afterwards, and these fences:

- one statement, at most `MAX_SQL` characters, that starts with SELECT; common table expressions
  are refused, because nested ones grow exponentially before the first step is counted;
- an authorizer that lets through reading the given tables and the functions in `FUNCTIONS`
  alone, so no ATTACH, no PRAGMA, no load_extension, and nothing that makes large values or runs
  long within one step;
- a step limit, counted in virtual machine instructions and so the same on every machine;
- a limit on the length of values and rows, temporary storage in memory, a limit on result rows.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable

MAX_SQL = 500
MAX_ROWS = 200
MAX_STEPS = 200_000
STEPS_PER_CHECK = 1_000
MAX_VALUE_BYTES = 4_096

# Missing on purpose: LIKE and GLOB (exponential on some patterns, inside one step), REPLACE,
# PRINTF, ZEROBLOB, RANDOMBLOB, GROUP_CONCAT (large values), RANDOM (rewards must repeat).
FUNCTIONS = frozenset(
    {"abs", "avg", "coalesce", "count", "ifnull", "length", "lower", "max", "min", "round"}
    | {"sum", "total", "upper"}
)

LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 32,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 4,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 20_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

Row = tuple[object, ...]


class Rejected(Exception):
    """The query was refused, or failed. The message says why."""


def run_query(setup: Iterable[tuple[str, Iterable[Row]]], sql: str) -> list[Row]:
    """The rows of `sql` over a fresh database.

    `setup` is trusted: pairs of a statement and the rows to run it with (no rows: once, plain).
    Raises `Rejected`.
    """
    _check_text(sql)
    database = sqlite3.connect(":memory:")
    try:
        for statement, rows in setup:
            _fill(database, statement, list(rows))
        _fence(database)
        return _fetch(database, sql)
    finally:
        database.close()


def _check_text(sql: str) -> None:
    if len(sql.encode("utf-8", "replace")) > MAX_SQL:
        raise Rejected(f"longer than {MAX_SQL} bytes")
    if not re.match(r"\s*select\b", sql, re.IGNORECASE):
        raise Rejected("not a SELECT")
    if re.search(r"\bwith\b", sql, re.IGNORECASE):
        raise Rejected("common table expressions are not allowed")


def _fill(database: sqlite3.Connection, statement: str, rows: list[Row]) -> None:
    if rows:
        database.executemany(statement, rows)
    else:
        database.execute(statement)


def _fence(database: sqlite3.Connection) -> None:
    database.commit()
    database.execute("PRAGMA temp_store = MEMORY")
    database.execute("PRAGMA query_only = ON")
    for limit, value in LIMITS.items():
        database.setlimit(limit, value)
    checks_left = MAX_STEPS // STEPS_PER_CHECK

    def out_of_steps() -> bool:
        nonlocal checks_left
        checks_left -= 1
        return checks_left < 0

    names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    tables = frozenset(name for (name,) in names)

    def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
        """`first` is the table of a read, `second` the name of a function."""
        allowed = (
            action == sqlite3.SQLITE_SELECT
            or (action == sqlite3.SQLITE_READ and first in tables)
            or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    database.set_progress_handler(out_of_steps, STEPS_PER_CHECK)
    database.set_authorizer(authorize)


def _fetch(database: sqlite3.Connection, sql: str) -> list[Row]:
    try:
        rows = database.execute(sql).fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        # ValueError: a NUL in the text; UnicodeEncodeError, its subclass: a lone surrogate.
        raise Rejected(str(error)) from error
    if len(rows) > MAX_ROWS:
        raise Rejected(f"more than {MAX_ROWS} rows")
    return rows
