"""A text-to-SQL task made from nothing: eight small schemas, questions from templates, and a
reward that is 1 when a query gives the rows of the right query, else 0.

The demo model is trained on these questions (`make_demo_model.py`) and the demo improves it on
them (`demo.py`). Everything is generated; the same seed gives the same questions.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipes.tasks.sandbox import Rejected, Row, run_query

ROWS = 30
PARENT_ROWS = 10


@dataclass(frozen=True)
class Table:
    """`label` names a row in an answer, `category` is the text column that questions filter by,
    `numbers` are the numeric columns with the values they are drawn from."""

    name: str
    plural: str
    label: str
    category: str
    categories: tuple[str, ...]
    numbers: tuple[tuple[str, range], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("id", self.label, self.category, *(name for name, _ in self.numbers))


@dataclass(frozen=True)
class Schema:
    """Two tables: each row of `main` belongs to a row of `parent`."""

    main: Table
    parent: Table

    @property
    def key(self) -> str:
        return f"{self.parent.name}_id"

    @property
    def description(self) -> str:
        """What the model is shown."""
        main = ", ".join((*self.main.columns, self.key))
        parent = ", ".join(self.parent.columns)
        return f"{self.main.name}({main})\n{self.parent.name}({parent})"

    def columns(self, table: str) -> tuple[str, ...]:
        return (self.main if table == self.main.name else self.parent).columns


@dataclass(frozen=True)
class Question:
    schema: Schema
    text: str
    sql: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages; the answer is the assistant's turn."""
        return [
            {"role": "system", "content": self.schema.description},
            {"role": "user", "content": self.text},
        ]


COUNTRIES = ("France", "Japan", "Brazil", "Kenya")
CITIES = ("Paris", "Tokyo", "Lima", "Oslo")

SCHEMAS = (
    Schema(
        Table("book", "books", "title", "genre", ("poetry", "crime", "history", "fantasy"),
              (("year", range(1900, 2020, 2)), ("pages", range(100, 700, 20)))),
        Table("author", "authors", "name", "country", COUNTRIES,
              (("born", range(1860, 1990, 5)),)),
    ),
    Schema(
        Table("album", "albums", "title", "style", ("jazz", "rock", "folk", "soul"),
              (("year", range(1950, 2020, 2)), ("sales", range(100, 4000, 100)))),
        Table("band", "bands", "name", "country", COUNTRIES,
              (("members", range(2, 14)),)),
    ),
    Schema(
        Table("employee", "employees", "name", "role", ("clerk", "manager", "engineer", "analyst"),
              (("age", range(20, 65)), ("salary", range(2000, 9000, 100)))),
        Table("department", "departments", "name", "city", CITIES,
              (("budget", range(100, 900, 20)),)),
    ),
    Schema(
        Table("student", "students", "name", "level", ("junior", "middle", "senior", "guest"),
              (("age", range(10, 40)), ("score", range(20, 100)))),
        Table("teacher", "teachers", "name", "subject", ("maths", "music", "biology", "art"),
              (("hours", range(4, 40)),)),
    ),
    Schema(
        Table("product", "products", "name", "colour", ("red", "green", "blue", "black"),
              (("price", range(5, 500, 5)), ("stock", range(0, 300, 5)))),
        Table("supplier", "suppliers", "name", "country", COUNTRIES,
              (("rating", range(10, 100, 2)),)),
    ),
    Schema(
        Table("player", "players", "name", "position", ("keeper", "defender", "winger", "striker"),
              (("age", range(16, 48)), ("goals", range(0, 90, 3)))),
        Table("club", "clubs", "name", "city", CITIES,
              (("founded", range(1880, 1990, 5)),)),
    ),
    Schema(
        Table("flight", "flights", "code", "status", ("late", "landed", "boarding", "cancelled"),
              (("distance", range(200, 9000, 200)), ("seats", range(40, 400, 10)))),
        Table("airline", "airlines", "name", "country", COUNTRIES,
              (("planes", range(3, 120, 3)),)),
    ),
    Schema(
        Table("river", "rivers", "name", "basin", ("north", "south", "east", "west"),
              (("length", range(100, 6000, 100)), ("depth", range(2, 90)))),
        Table("region", "regions", "name", "climate", ("dry", "humid", "mild", "cold"),
              (("area", range(100, 2000, 50)),)),
    ),
)  # fmt: skip

# Seen neither by the demo model nor in any training here: what is tested on them is whether the
# *schema shown* is read.
HELD_OUT = (
    Schema(
        Table("car", "cars", "model", "fuel", ("petrol", "diesel", "electric", "hybrid"),
              (("power", range(40, 600, 10)), ("mileage", range(0, 300, 5)))),
        Table("maker", "makers", "name", "country", ("Italy", "Korea", "Spain", "India"),
              (("workers", range(100, 9000, 100)),)),
    ),
    Schema(
        Table("film", "films", "title", "mood", ("sad", "funny", "tense", "calm"),
              (("minutes", range(60, 220, 2)), ("awards", range(0, 90, 2)))),
        Table("studio", "studios", "name", "city", ("Rome", "Cairo", "Delhi", "Quito"),
              (("opened", range(1900, 2010, 3)),)),
    ),
)  # fmt: skip

# Paraphrases of a question, and its SQL. `{t}` table, `{ts}` its plural, `{l}` label, `{c}`
# category, `{v}` a value of it, `{n}` a number column, `{k}` a threshold, `{p}` the parent.
TEMPLATES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("How many {ts} are there?", "Count the {ts}.", "What is the number of {ts}?"),
     "SELECT COUNT(*) FROM {t}"),
    (("List the {l} of every {t}.", "Show the {l} of all {ts}."),
     "SELECT {l} FROM {t}"),
    (("List the {c} of every {t} once.", "Which values of {c} do {ts} have?"),
     "SELECT DISTINCT {c} FROM {t}"),
    (("How many {ts} have {c} {v}?", "Count the {ts} with {c} {v}."),
     "SELECT COUNT(*) FROM {t} WHERE {c} = '{v}'"),
    (("Which {ts} have {c} {v}?", "List the {l} of {ts} with {c} {v}."),
     "SELECT {l} FROM {t} WHERE {c} = '{v}'"),
    (("Which {ts} have {n} above {k}?", "List the {l} of {ts} with {n} over {k}."),
     "SELECT {l} FROM {t} WHERE {n} > {k}"),
    (("Which {ts} have {n} below {k}?", "List the {l} of {ts} with {n} under {k}."),
     "SELECT {l} FROM {t} WHERE {n} < {k}"),
    (("How many {ts} have {n} above {k}?", "Count the {ts} with {n} over {k}."),
     "SELECT COUNT(*) FROM {t} WHERE {n} > {k}"),
    (("What is the {how} {n} of all {ts}?", "Find the {how} {n} of {ts}."),
     "SELECT {fn}({n}) FROM {t}"),
    (("What is the {how} {n} of {ts} with {c} {v}?", "For {c} {v}, find the {how} {n} of {ts}."),
     "SELECT {fn}({n}) FROM {t} WHERE {c} = '{v}'"),
    (("Which {t} has the {end} {n}?", "Give the {l} of the {t} with the {end} {n}."),
     "SELECT {l} FROM {t} ORDER BY {n} {dir} LIMIT 1"),
    (("How many {ts} are there for each {c}?", "Count the {ts} by {c}."),
     "SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}"),
    (("What is the {how} {n} of {ts} for each {c}?", "Find the {how} {n} of {ts} by {c}."),
     "SELECT {c}, {fn}({n}) FROM {t} GROUP BY {c}"),
)  # fmt: skip

JOINED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Which {ts} have a {p} with {c} {v}?", "List the {l} of {ts} whose {p} has {c} {v}."),
     "SELECT {t}.{l} FROM {t} JOIN {p} ON {t}.{p}_id = {p}.id WHERE {p}.{c} = '{v}'"),
    (("How many {ts} have a {p} with {c} {v}?", "Count the {ts} whose {p} has {c} {v}."),
     "SELECT COUNT(*) FROM {t} JOIN {p} ON {t}.{p}_id = {p}.id WHERE {p}.{c} = '{v}'"),
)  # fmt: skip

AGGREGATES = (("average", "AVG"), ("total", "SUM"), ("highest", "MAX"), ("lowest", "MIN"))
ENDS = (("highest", "DESC"), ("lowest", "ASC"))


def questions(seed: int | str, schemas: Sequence[Schema] = SCHEMAS) -> Iterator[Question]:
    """An endless stream of questions."""
    rng = random.Random(f"questions:{seed}")
    while True:
        yield make_question(rng, schemas)


def make_question(rng: random.Random, schemas: Sequence[Schema] = SCHEMAS) -> Question:
    schema = rng.choice(schemas)
    phrases, sql = rng.choice(TEMPLATES + JOINED)
    if (phrases, sql) in JOINED:
        slots = {"t": schema.main.name, "ts": schema.main.plural, "l": schema.main.label}
        slots |= {"p": schema.parent.name} | _filter(schema.parent, rng)
    else:
        slots = _slots(schema.main if rng.random() < 0.7 else schema.parent, rng)
    return Question(schema, rng.choice(phrases).format(**slots), sql.format(**slots))


def _filter(table: Table, rng: random.Random) -> dict[str, str]:
    return {"c": table.category, "v": rng.choice(table.categories)}


def _slots(table: Table, rng: random.Random) -> dict[str, str]:
    number, values = rng.choice(table.numbers)
    threshold = values[len(values) * rng.choice((1, 2, 3)) // 4]
    how, function = rng.choice(AGGREGATES)
    end, direction = rng.choice(ENDS)
    return {
        "t": table.name, "ts": table.plural, "l": table.label, "n": number, "k": str(threshold),
        "how": how, "fn": function, "end": end, "dir": direction, **_filter(table, rng),
    }  # fmt: skip


# --- the database and the reward ------------------------------------------------------------


@functools.cache
def database(schema: Schema) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """Statements that build a schema's tables, the same in every run. A numeric column has no
    value twice, so that the highest and the lowest are one row."""
    rng = random.Random(schema.description)
    parents = _rows(schema.parent, PARENT_ROWS, rng)
    owners = rng.sample([1 + i % PARENT_ROWS for i in range(ROWS)], ROWS)
    rows = zip(_rows(schema.main, ROWS, rng), owners, strict=True)
    return (
        *_table_statements(schema.parent.name, schema.parent.columns, parents),
        *_table_statements(
            schema.main.name,
            (*schema.main.columns, schema.key),
            tuple((*row, owner) for row, owner in rows),
        ),
    )


def _table_statements(
    name: str, columns: tuple[str, ...], rows: tuple[Row, ...]
) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    marks = ", ".join("?" * len(columns))
    return (
        (" ".join(("CREATE TABLE", name, f"({', '.join(columns)})")), ()),
        (" ".join(("INSERT INTO", name, f"VALUES ({marks})")), rows),
    )


def _rows(table: Table, count: int, rng: random.Random) -> tuple[Row, ...]:
    categories = _unevenly(table.categories, count, rng)
    numbers = [rng.sample(values, count) for _, values in table.numbers]
    return tuple(
        (i + 1, f"{table.name} {i + 1}", categories[i], *(drawn[i] for drawn in numbers))
        for i in range(count)
    )


def _unevenly(values: tuple[str, ...], count: int, rng: random.Random) -> list[str]:
    """Four values in the proportion 1 : 2 : 3 : 4, shuffled: none is missing, so no answer is
    empty, and no two are equally many, so counting the wrong one is found out."""
    rare_to_common = rng.sample(values, 4)
    drawn = [value for i, value in enumerate(rare_to_common, 1) for _ in range(count * i // 10)]
    return rng.sample(drawn, count)


def reward(question: Question, sql: str) -> float:
    """1.0 when `sql` gives the rows that the right query gives (in its order, when it sorts)."""
    try:
        rows = run_query(database(question.schema), sql)
    except Rejected:
        return 0.0
    return float(_comparable(rows, question.sql) == _comparable(_answer(question), question.sql))


@functools.lru_cache(maxsize=4096)
def _answer(question: Question) -> list[Row]:
    return run_query(database(question.schema), question.sql)


def _comparable(rows: list[Row], sql: str) -> object:
    rounded = [tuple(round(v, 6) if isinstance(v, float) else v for v in row) for row in rows]
    return rounded if " ORDER BY " in sql else Counter(rounded)


# --- wrong answers ----------------------------------------------------------------------------

CONFUSIONS = (("COUNT", "AVG", "SUM", "MAX", "MIN"), ("<", ">", "="), ("DESC", "ASC"))


def corrupt(question: Question, rng: random.Random) -> str:
    """The right query with about one plausible mistake in it: another column, function,
    comparison, direction or value."""
    words = re.findall(r"\w+|[^\w\s]|\s+", question.sql)
    places = [i for i, word in enumerate(words) if _alternatives(question, word)]
    for i in rng.sample(places, k=min(len(places), rng.choice((1, 1, 2)))):
        words[i] = rng.choice(_alternatives(question, words[i]))
    return "".join(words)


def _alternatives(question: Question, word: str) -> list[str]:
    tables = (question.schema.main, question.schema.parent)
    groups = [
        *CONFUSIONS,
        *(table.columns for table in tables),
        *(table.categories for table in tables),
        tuple(table.name for table in tables),
    ]
    found = next((group for group in groups if word in group), ())
    return [other for other in found if other != word]
