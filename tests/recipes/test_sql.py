import random
from itertools import islice

import pytest

from recipes.tasks.sql import SCHEMAS, Question, corrupt, database, make_question, questions, reward

BOOKS = SCHEMAS[0]


def ask(sql):
    return Question(BOOKS, "…", sql)


def test_the_same_seed_asks_the_same():
    assert list(islice(questions(3), 50)) == list(islice(questions(3), 50))
    assert list(islice(questions(3), 50)) != list(islice(questions(4), 50))


def test_the_right_query_is_always_right():
    for question in islice(questions("right"), 300):
        assert reward(question, question.sql) == 1.0, question.sql


def test_a_wrong_query_is_seldom_right_by_chance():
    rng = random.Random(0)
    wrong = [
        reward(question, sql)
        for question in islice(questions("wrong"), 500)
        if (sql := corrupt(question, rng)) != question.sql
    ]
    assert len(wrong) > 450
    assert sum(wrong) / len(wrong) < 0.03


def test_another_way_to_say_the_same_counts():
    question = ask("SELECT title FROM book WHERE genre = 'crime'")
    assert reward(question, "select b.title from book b where 'crime' = b.genre order by 1") == 1.0


def test_order_counts_only_where_the_question_sorts():
    up, down = "SELECT id FROM book ORDER BY id ASC", "SELECT id FROM book ORDER BY id DESC"
    assert reward(ask(up), down) == 0.0
    assert reward(ask("SELECT id FROM book"), down) == 1.0


def test_repeated_rows_count():
    assert reward(ask("SELECT genre FROM book"), "SELECT DISTINCT genre FROM book") == 0.0


@pytest.mark.parametrize("sql", ["", "SELECT", "SELECT title", "DROP TABLE book", "SELECT NULL"])
def test_broken_and_hostile_queries_are_worth_nothing(sql):
    assert reward(ask("SELECT title FROM book"), sql) == 0.0


def test_no_answer_is_empty():
    from recipes.tasks.sandbox import run_query

    rng = random.Random(1)
    for _ in range(300):
        question = make_question(rng)
        assert run_query(database(question.schema), question.sql), question.sql


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.main.name)
def test_numbers_do_not_repeat_and_categories_differ_in_size(schema):
    for table, statement in ((schema.parent, 1), (schema.main, 3)):
        columns = list(zip(*database(schema)[statement][1], strict=True))
        numbers = columns[3 : 3 + len(table.numbers)]
        assert all(len(set(column)) == len(column) for column in numbers)
        sizes = [columns[2].count(value) for value in table.categories]
        assert len(set(sizes)) == len(sizes)
        assert min(sizes) > 0
