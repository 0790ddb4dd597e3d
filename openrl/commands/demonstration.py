"""`openrl demo`: a checkout's demonstration, by its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from openrl.errors import UserError

_SCRIPT = Path(__file__).parents[2] / "recipes" / "demo.py"


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small model by reinforcement on a server of its own, and watch; --help for more."""
    if not _SCRIPT.is_file():
        raise UserError(
            "the demo is part of a checkout, and this is an installed package: clone OpenRL and "
            "run `make demo` there"
        )
    os.execv(sys.executable, [sys.executable, str(_SCRIPT), *arguments])
