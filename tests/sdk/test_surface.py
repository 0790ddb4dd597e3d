"""Every public method of the SDK's clients works, or is refused with the reason on the page."""

import pytest

from . import surface, table


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return table.outcomes()


def test_every_method_was_called(found: dict[str, str]) -> None:
    assert list(found) == [f"{client.__name__}.{name}" for client, name in surface.methods()]


def test_every_method_works_or_says_why_not(found: dict[str, str]) -> None:
    assert table.undocumented(found) == []


def test_the_page_is_current(found: dict[str, str]) -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.page_with(table.table(found)), "run python tests/sdk/table.py"
