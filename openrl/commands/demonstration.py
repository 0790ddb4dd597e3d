"""`openrl demo`: a checkout's demonstration, by its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from openrl.errors import UserError

_CHECKOUT = Path(__file__).parents[2]
# Not by -m: the checkout is not on the path, and the output belongs where the user is.
_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module('recipes.demo', run_name='__main__', alter_sys=True)"
)


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small model by reinforcement on a server of its own, and watch; --help for more."""
    if not (_CHECKOUT / "recipes" / "demo.py").is_file():
        raise UserError(
            "the demo is part of a checkout, and this is an installed package: clone OpenRL and "
            "run `make demo` there"
        )
    os.execv(sys.executable, [sys.executable, "-c", _RUN, str(_CHECKOUT), *arguments])
