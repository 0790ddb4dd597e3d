"""Hostile SQL against the sandbox: refused, quickly, in little memory, and nothing is touched."""

import resource
import time

import pytest

from recipes.tasks.sandbox import MAX_ROWS, MAX_SQL, Rejected, run_query

SETUP = (
    ("CREATE TABLE t (id, name, size)", ()),
    ("INSERT INTO t VALUES (?, ?, ?)", tuple((i, f"t {i}", i * 10) for i in range(30))),
)


def run(sql):
    return run_query(SETUP, sql)


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT COUNT(*) FROM t", [(30,)]),
        ("select name from t where size > 280", [("t 29",)]),
        ("SELECT 1;", [(1,)]),
        ("SELECT 1 -- and a comment", [(1,)]),
        ("SELECT AVG(n) FROM (SELECT size AS n FROM t WHERE id < 3)", [(10.0,)]),
        ("SELECT a.id FROM t a JOIN t b ON a.id = b.id ORDER BY a.id DESC LIMIT 1", [(29,)]),
        ("SELECT id FROM t WHERE id > 40", []),
    ],
)
def test_honest_queries_run(sql, rows):
    assert run(sql) == rows


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "hello",
        "SELECT",
        "SELECT nothing FROM t",
        "SELECT 1; DROP TABLE t",
        "DROP TABLE t",
        "DELETE FROM t",
        "UPDATE t SET size = 0",
        "INSERT INTO t VALUES (1, 2, 3)",
        "CREATE TABLE u (x)",
        "PRAGMA query_only = OFF",
        "BEGIN",
        "EXPLAIN SELECT 1",
        "VALUES (1)",
        "SELECT * FROM pragma_database_list",
        "SELECT * FROM sqlite_master",
        "SELECT * FROM json_each('[1, 2]')",
        "SELECT load_extension('evil')",
        "SELECT readfile('/etc/passwd')",
        "SELECT random()",
        "SELECT randomblob(1000000000)",
        "SELECT hex(zeroblob(1000000000))",
        "SELECT printf('%1000000000d', 1)",
        "SELECT group_concat(name) FROM t",
        "SELECT name LIKE '%t%' FROM t",
        "SELECT name GLOB '*t*' FROM t",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "SELECT * FROM (WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x FROM c) SELECT 1)",
        "SELECT abs(-9223372036854775808)",
        "SELECT CAST(x'ff' AS TEXT)",
        "SELECT ?",
        "SELECT '\x00'",
        "SELECT '\ud800'",
        "SELECT '" + "é" * (MAX_SQL // 2) + "'",
        "SELECT " + "(" * 200 + "1" + ")" * 200,
        "SELECT " + "+".join(["1"] * 200),
        "SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5",
    ],
)
def test_hostile_and_broken_statements_are_rejected(sql):
    with pytest.raises(Rejected):
        run(sql)


@pytest.mark.parametrize("sql", ["ATTACH DATABASE '{path}' AS f", "VACUUM INTO '{path}'"])
def test_no_file_is_made(sql, tmp_path):
    path = tmp_path / "made"
    with pytest.raises(Rejected):
        run(sql.format(path=path))
    assert not path.exists()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(*) FROM t a, t b, t c, t d, t e, t f, t g",
        "SELECT COUNT(*) FROM t a, t b, t c, t d, t e WHERE a.size + e.size < -1",
        "SELECT a.id FROM t a, t b, t c, t d ORDER BY d.size, a.name || b.name",
        "SELECT DISTINCT a.id, b.id, c.id, d.id FROM t a, t b, t c, t d",
        "SELECT MAX(a.name || b.name || c.name || d.name || e.name) FROM t a, t b, t c, t d, t e",
        " ".join(("SELECT 1 FROM", ", ".join(f"t t{i}" for i in range(60)))),
    ],
)
def test_a_query_without_end_is_stopped(sql):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(Rejected):
        run(sql)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert time.process_time() - started < 2.0
    assert grown < 64 * 1024  # kilobytes on Linux


def test_long_values_are_refused():
    doubled = "'" + "x" * 100 + "'"
    for _ in range(6):
        doubled = "(SELECT v || v FROM (SELECT {} AS v))".format(doubled)  # noqa: UP032, S608
    assert len(doubled) < MAX_SQL
    with pytest.raises(Rejected, match="too big"):
        run(f"SELECT {doubled}")


def test_too_many_rows_are_refused():
    assert len(run("SELECT a.id FROM t a, t b LIMIT 200")) == MAX_ROWS
    with pytest.raises(Rejected, match="more than"):
        run("SELECT a.id FROM t a, t b")


def test_queries_do_not_see_one_another():
    with pytest.raises(Rejected):
        run("DELETE FROM t")
    assert run("SELECT COUNT(*) FROM t") == [(30,)]
