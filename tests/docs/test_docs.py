"""The pages are true to the code where that can be checked: configuration, losses, links, code."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from openrl.config import known_keys
from openrl.engines.losses import LOSSES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert spec is not None
assert spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_configuration_page_is_current() -> None:
    assert generate.PAGE.read_text() == generate.page(), "run python docs/generate.py"


def test_the_table_of_routes_is_current() -> None:
    page = generate.HTTP_PAGE.read_text()
    assert "| `POST` | `create_model` |" in page
    assert page == generate.http_page(page), "run python docs/generate.py"


def test_no_meaning_is_left_of_a_route_that_is_gone() -> None:
    there = {f"{method} {path}" for method, path, _ in generate.routes()}
    assert generate.ROUTES.keys() <= there


def test_every_setting_has_a_meaning_and_every_meaning_a_setting() -> None:
    assert generate.MEANINGS.keys() == known_keys().keys()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda spec: spec.name)
def test_the_losses_page_names_every_input_and_default(loss) -> None:  # type: ignore[no-untyped-def]
    row = next(
        line
        for line in (ROOT / "docs" / "losses.md").read_text().splitlines()
        if line.startswith(f"| `{loss.name}`")
    )
    for needed in loss.inputs:
        assert f"`{needed.name}`" in row
    for key, default in loss.config.items():
        assert f"`{key}` {default:g}" in row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_are_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nobody_is_sent_to_the_other_openrl(page: Path) -> None:
    """The registry's `openrl` is another project."""
    assert not re.search(r"pip install (-\S+ )*[\"']?openrl(?!-node)\b", page.read_text())


def test_pictures_are_small() -> None:
    sizes = {page.name: page.stat().st_size for page in (ROOT / "docs").glob("*.png")}
    assert sizes
    assert max(sizes.values()) < 100_000


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in nav] == []
