"""How commands say things: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 1000

json_option = click.option(
    "--json", "as_json", is_flag=True, help="For machines, on standard output."
)


def say_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def console() -> Console:
    """Whoever reads through a pipe gets a row in one line."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Cells are taken as they are: in markup, `:train:` of an id would be drawn."""
    made = Table(box=None, pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def say_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    console().print(table(titles, rows))


def size(count: float | None) -> str:
    """In bytes."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def when(text: str | None) -> str:
    """An RFC 3339 time, to the minute and in this machine's zone."""
    if not text:
        return ""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
