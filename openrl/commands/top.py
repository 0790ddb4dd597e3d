"""`openrl top`: the engine, and who has it, live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from http.client import HTTPException

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from openrl.commands.board import CLOCK, WINDOW, Board, Picture, events
from openrl.commands.remote import Remote, with_remote
from openrl.commands.saying import console, json_option, say_json, table
from openrl.errors import Unavailable

PAUSE_SECONDS = 2.0
_TITLES = ("job", "owner", "name", "models", "share", "engine s", "tokens", "waits", "for what")


@click.command("top")
@click.option("--once", is_flag=True, help="Show the present and end.")
@json_option
@with_remote
def top(remote: Remote, once: bool, as_json: bool) -> None:
    """Jobs, what each waits for, and how busy the engine is, over the last seconds.

    With --json: one line a second, or one at all with --once.
    """
    if once:
        _say(next(pictures(remote)), as_json)
    elif as_json:
        for picture in pictures(remote):
            _say(picture, as_json)
    else:
        with Live(Text(f"{remote.url} …"), screen=console().is_terminal) as screen:
            _watch(remote, screen)


def _say(picture: Picture, as_json: bool) -> None:
    if as_json:
        say_json(asdict(picture))
    else:
        console().print(_shown(picture))


def pictures(remote: Remote) -> Iterator[Picture]:
    """One a second, until the server ends. Raises `Unavailable` when it cannot be reached."""
    board = Board()
    with closing(remote.stream("openrl/live")) as stream:
        try:
            for event, value in events(stream):
                board.take(event, value)
                if event == CLOCK:
                    yield board.picture()
        except (OSError, HTTPException, ValueError) as error:
            raise Unavailable(f"{remote.url} has broken off: {error}") from error
    raise Unavailable(f"{remote.url} has ended the stream")


def _watch(remote: Remote, screen: Live) -> None:
    """Until Ctrl-C: a server that is away may come back."""
    while True:
        try:
            for picture in pictures(remote):
                screen.update(_shown(picture))
        except Unavailable as error:
            screen.update(Text(f"{error.message}\nTrying again; Ctrl-C ends this.", style="red"))
        time.sleep(PAUSE_SECONDS)


def _shown(picture: Picture) -> RenderableType:
    busy = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(picture.busy.items()))
    total = sum(picture.busy.values())
    head = (
        f"engine busy {total:.0%}{f' ({busy})' if busy else ''}, "
        f"{picture.tokens_per_second:,.0f} tokens/s in the last {WINDOW:.0f} s; "
        f"{picture.waiting} requests wait, {picture.running} run"
    )
    lines = [Text(head), Text("models: " + ", ".join(picture.models))]
    if picture.trouble:
        lines.append(Text(picture.trouble, style="bold red"))
    rows = [
        (
            row.job, row.owner, row.name, ", ".join(row.models), f"{row.share:.0%}",
            f"{row.seconds:.1f}", "" if row.tokens is None else f"{row.tokens:,}",
            str(row.waiting or ""), row.why,
        )
        for row in picture.rows
    ]  # fmt: skip
    shown = table(_TITLES, rows) if rows else Text("no jobs")
    return Group(*lines, Text(), shown)
