"""`openrl demo` and `openrl research`: a checkout's scripts, by their names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from openrl.errors import UserError

_CHECKOUT = Path(__file__).parents[2]
# Not by -m: the checkout is not on the path, and the output belongs where the user is.
_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_AS_GIVEN = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_AS_GIVEN, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small model by reinforcement on a server of its own, and watch; --help for more."""
    _run("the demo", "recipes.demo", arguments)


@click.command(context_settings=_AS_GIVEN, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def research(arguments: tuple[str, ...]) -> None:
    """Search for better settings, or a better script, of a recipe; --help for more."""
    _run("research", "recipes.autoresearch.main", arguments)


def _run(what: str, module: str, arguments: tuple[str, ...]) -> NoReturn:
    if not (_CHECKOUT / "recipes" / "demo.py").is_file():
        raise UserError(
            f"{what} is part of a checkout, and this is an installed package: clone OpenRL and "
            f"run `make demo` there"
        )
    os.execv(sys.executable, [sys.executable, "-c", _RUN, str(_CHECKOUT), module, *arguments])
