"""The commands of `openrl`, one file per group.

serving       serve, config: from flags to a configuration
keys          keys: who may come in
doctor        doctor, from what `checks` and `device_checks` find
planning      plan: what a model needs of a GPU
top, board    top: what the engine does and for whom, from the stream of a dashboard
runs          runs, models
checkpoints   checkpoints
remote        one server, over HTTP
demonstration demo and research, of a checkout
saying        tables, JSON, times and sizes

Exit status: 0 it is done, 1 it was refused or failed, 2 it was not understood.
"""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Any

import click

from openrl.commands.checkpoints import checkpoints_group
from openrl.commands.demonstration import demo, research
from openrl.commands.doctor import doctor
from openrl.commands.keys import keys_group
from openrl.commands.planning import plan
from openrl.commands.runs import models, runs_group
from openrl.commands.serving import config_group, serve
from openrl.commands.top import top
from openrl.errors import OpenRLError


class _Commands(click.Group):
    """Says our own errors as one line or a few, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OpenRLError as error:
            raise click.ClickException(error.message) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """OpenRL: a post-training service for language models on your own machine.

    Exit status: 0 it is done, 1 it was refused or failed, 2 the command was not understood.
    """


@cli.command()
def version() -> None:
    """Print OpenRL's version."""
    click.echo(f"openrl {version_of('openrl-node')}")


for command in (
    serve, demo, research, config_group, keys_group, doctor, plan, top, runs_group,
    checkpoints_group, models,
):  # fmt: skip
    cli.add_command(command)
