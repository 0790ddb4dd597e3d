"""`openrl plan`: what a model needs of a GPU, before one is bought or booked."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from openrl.commands.saying import json_option, say_json, say_table, size
from openrl.config import ModelSource
from openrl.errors import UserError
from openrl.model_sources import named
from openrl.planning import ACCELERATORS, Plan, Shape, Wish
from openrl.planning import plan as plan_for

_count = click.IntRange(1)


@click.command("plan")
@click.argument("model")
@click.option(
    "--gpu", default="H100", show_default=True, metavar="NAME", help=", ".join(ACCELERATORS)
)
@click.option("--jobs", default=1, show_default=True, type=_count, help="Adapters in training.")
@click.option("--rank", default=32, show_default=True, type=_count, help="Of each adapter.")
@click.option(
    "--context", default=8192, show_default=True, type=_count, help="Tokens of a sequence."
)
@click.option(
    "--rows", default=64, show_default=True, type=_count, help="Sequences sampled at once."
)
@click.option(
    "--pass-tokens", default=4096, show_default=True, type=_count, help="Trained at once."
)
@json_option
def plan(
    model: str,
    gpu: str,
    jobs: int,
    rank: int,
    context: int,
    rows: int,
    pass_tokens: int,
    as_json: bool,
) -> None:
    """What MODEL needs of a GPU, how many jobs fit, and the speed to expect at best.

    MODEL is a directory or a hub name; only its configuration is read. Exit status 1: no room.
    """
    accelerator = {name.lower(): each for name, each in ACCELERATORS.items()}.get(gpu.lower())
    if accelerator is None:
        raise UserError(f"no figures for a {gpu}: known are {', '.join(ACCELERATORS)}")
    found = plan_for(shape_of(model), accelerator, Wish(jobs, rank, context, rows, pass_tokens))
    if as_json:
        say_json(
            {**asdict(found), "gpu": accelerator.name, "total": found.total, "fits": found.fits}
        )
    else:
        _say(found, accelerator.name)
    if not found.fits:
        raise SystemExit(1)


def shape_of(model: str) -> Shape:
    """Raises `UserError` for a model that is not there or is no decoder."""
    from openrl.engines.pytorch.model_files import configuration_directory  # and the hub's client

    source = ModelSource(model, Path(model)) if Path(model).is_dir() else named(model)
    file = configuration_directory(source) / "config.json"
    try:
        return Shape.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def _say(found: Plan, gpu: str) -> None:
    rows = [(part.name, size(part.size), part.why) for part in found.parts]
    rows.append(("together", size(found.total), f"of {size(found.memory)} that the {gpu} can give"))
    say_table(("memory", "", ""), rows)
    click.echo()
    rates = (
        ("train", found.train_rate),
        ("decode", found.decode_rate),
        ("prefill", found.prefill_rate),
    )
    say_table(("at best", "tokens/s"), [(name, f"{rate:,.0f}") for name, rate in rates])
    click.echo()
    click.echo(f"jobs that fit with so many sequences: {found.jobs_at_once}")
    click.echo(f"sequences that fit with so many jobs: {found.rows_at_once}")
    if not found.fits:
        click.echo(
            "It does not fit: lower --rows, --context, --jobs or --rank, or take a larger --gpu.",
            err=True,
        )
