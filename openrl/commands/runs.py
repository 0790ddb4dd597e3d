"""`openrl runs` and `openrl models`: what is trained, and over which base models."""

from __future__ import annotations

from typing import Any

import click

from openrl.commands.remote import Remote, at, with_remote
from openrl.commands.saying import json_option, say_json, say_table, size, when

_TITLES = ("run", "base model", "rank", "last request", "newest checkpoint")


@click.group("runs")
def runs_group() -> None:
    """Look at training runs."""


@runs_group.command("list")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000))
@click.option("--offset", default=0, show_default=True, type=click.IntRange(0), help="Leave out.")
@click.option("--project", metavar="ID", help="Those of one project.")
@json_option
@with_remote
def list_runs(remote: Remote, limit: int, offset: int, project: str | None, as_json: bool) -> None:
    """Your runs, the newest first."""
    answer = remote.get("training_runs", limit=limit, offset=offset, project_id=project)
    runs = answer["training_runs"]
    if as_json:
        return say_json(runs)
    if not runs:
        return click.echo("no runs: create_model of a client makes one")
    say_table(_TITLES, [_row(run) for run in runs])
    total = answer["cursor"]["total_count"]
    if offset + len(runs) < total:
        click.echo(f"{len(runs)} of {total}: more with --offset {offset + len(runs)}", err=True)
    return None


@runs_group.command("show")
@click.argument("run")
@json_option
@with_remote
def show_run(remote: Remote, run: str, as_json: bool) -> None:
    """One run and its checkpoints."""
    answer = remote.get(at(run))
    saved = remote.get(at(run, "checkpoints"))["checkpoints"]
    if as_json:
        return say_json({**answer, "checkpoints": saved})
    say_table(_TITLES, [_row(answer)])
    for name, value in (answer.get("user_metadata") or {}).items():
        click.echo(f"{name}: {value}")
    if saved:
        click.echo()
        rows = [
            (each["tinker_path"], size(each["size_bytes"]), when(each["time"])) for each in saved
        ]
        say_table(("checkpoint", "size", "made"), rows)
    return None


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    newest = run["last_checkpoint"] or run["last_sampler_checkpoint"] or {}
    return (
        run["training_run_id"],
        run["base_model"],
        str(run["lora_rank"]),
        when(run["last_request_time"]),
        newest.get("checkpoint_id", ""),
    )


@click.command("models")
@json_option
@with_remote
def models(remote: Remote, as_json: bool) -> None:
    """The base models that are served, and how far each is loaded."""
    states = remote.readiness()["models"]
    listed = [
        {"name": one["model_name"], "context": one["max_context_length"]}
        | states.get(one["model_name"], {"state": "unknown"})
        for one in remote.get("get_server_capabilities")["supported_models"]
    ]
    if as_json:
        return say_json(listed)
    say_table(
        ("model", "context", "state"),
        [(one["name"], f"{one['context']:,}", _state(one)) for one in listed],
    )
    return None


def _state(model: dict[str, Any]) -> str:
    if model.get("error"):
        return f"{model['state']}: {model['error']}"
    if model["state"] == "loading":
        return f"{model.get('stage') or 'loading'} {100 * (model.get('fraction') or 0.0):.0f}%"
    return str(model["state"])
