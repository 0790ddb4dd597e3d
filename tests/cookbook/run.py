"""Recipes of tinker-cookbook, unmodified, against this checkout's server: `make cookbook`.

    python tests/cookbook/run.py [--cache DIR] [--version 0.5.8] [--page] [NAME ...]

See README.md beside this file. Ends with a table, and with 1 when a sign did not come.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
from bench import NEWER, OLDER, SDK, TORCH, Bench, Cache, Missing, serving
from rich.console import Console
from rich.table import Table

from recipes import RECIPES, Recipe

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- recipes: written by tests/cookbook/run.py -->\n", "<!-- /recipes -->\n"
DEFAULT_CACHE = Path.home() / ".cache" / "openrl-cookbook"

console = Console()


@dataclass(frozen=True)
class Result:
    name: str
    works: bool
    seen: str
    seconds: float
    day: str


def tried(recipe: Recipe, bench: Bench) -> Result:
    started = time.monotonic()
    day = datetime.now(UTC).date().isoformat()
    try:
        works, seen = True, recipe.seen(bench)
    except Missing as missing:
        works, seen = False, str(missing)
    return Result(recipe.name, works, seen, time.monotonic() - started, day)


def of_version(version: str, names: tuple[str, ...], cache: Cache) -> list[Result]:
    runs = cache.root / f"runs-{version}"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    models = dict.fromkeys(cache.model_names(), cache.hub / "tiny")
    wanted = [
        each for each in RECIPES if version in each.versions and (not names or each.name in names)
    ]
    results = []
    with serving(models, runs / "data", runs / "server.log") as url:
        for recipe in wanted:
            result = tried(recipe, Bench(cache, version, url, runs))
            results.append(result)
            keep(cache, version, result)
            mark = "[green]yes[/]" if result.works else "[red]no[/]"
            console.print(f"{version} {recipe.name}: {mark} {result.seen} {result.seconds:.0f} s")
    return results


# --- what is kept and shown -----------------------------------------------------------------------


def keep(cache: Cache, version: str, result: Result) -> None:
    """Beside what other recipes gave, now or in earlier runs."""
    kept = {each.name: each for each in kept_results(cache, version)} | {result.name: result}
    file = cache.root / f"results-{version}.json"
    file.write_text(json.dumps([asdict(each) for each in kept.values()], indent=1))


def kept_results(cache: Cache, version: str) -> list[Result]:
    file = cache.root / f"results-{version}.json"
    return [Result(**each) for each in json.loads(file.read_text())] if file.exists() else []


def shown(results: Mapping[str, list[Result]]) -> Table:
    table = Table("recipe", "cookbook", "works", "seen", "s", title="Unmodified recipes")
    for version, found in results.items():
        for each in found:
            works = "[green]yes[/]" if each.works else "[red]no[/]"
            table.add_row(each.name, version, works, each.seen, f"{each.seconds:.0f}")
    return table


def page_block(cache: Cache) -> str:
    found = {
        version: {each.name: each for each in kept_results(cache, version)}
        for version in (OLDER, NEWER)
    }
    days = sorted({each.day for results in found.values() for each in results.values()})
    lines = [
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, with {SDK.replace('==', ' ')} and "
        f"tinker-cookbook {OLDER} and {NEWER}, on a CPU.",
        "",
        f"| recipe | sign | {OLDER} | {NEWER} |",
        "|---|---|---|---|",
    ]
    for recipe in RECIPES:
        cells = [_cell(recipe, version, found[version]) for version in (OLDER, NEWER)]
        lines.append(f"| `{recipe.command}` | {recipe.sign} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _cell(recipe: Recipe, version: str, results: Mapping[str, Result]) -> str:
    if version not in recipe.versions:
        return "–"
    if recipe.name not in results:
        return "not run"
    result = results[recipe.name]
    return (result.seen if result.works else f"**no**: {result.seen}").replace("|", "\\|")


def write_page(cache: Cache) -> None:
    text = PAGE.read_text(encoding="utf-8")
    block = page_block(cache)
    new = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{block}{END}", text, flags=re.DOTALL)
    PAGE.write_text(new, encoding="utf-8")


@click.command()
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    envvar="OPENRL_COOKBOOK_CACHE",
    default=DEFAULT_CACHE,
    show_default=True,
    help="Where what is made once is kept.",
)
@click.option(
    "--version",
    "versions",
    multiple=True,
    type=click.Choice([OLDER, NEWER]),
    default=[OLDER, NEWER],
    help="Of the cookbook; both unless one is named.",
)
@click.option("--torch", default=TORCH, show_default=True, help="What pip installs as torch.")
@click.option("--page", is_flag=True, help="Write the table into docs/compatibility.md.")
@click.argument("names", nargs=-1)
def main(
    cache: Path, versions: tuple[str, ...], torch: str, page: bool, names: tuple[str, ...]
) -> None:
    """Run all recipes, or those NAMEd."""
    if unknown := set(names) - {each.name for each in RECIPES}:
        raise click.UsageError(
            f"no recipe {', '.join(sorted(unknown))}; there are "
            + ", ".join(each.name for each in RECIPES)
        )
    made = Cache(cache.expanduser().absolute())
    made.make(torch)
    results = {}
    for version in versions:
        results[version] = of_version(version, names, made)
    console.print(shown(results))
    if page:
        write_page(made)
    sys.exit(not all(each.works for found in results.values() for each in found))


if __name__ == "__main__":
    main()
