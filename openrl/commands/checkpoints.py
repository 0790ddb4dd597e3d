"""`openrl checkpoints`: what has been saved, and what may be done with it."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from openrl.commands.remote import Remote, at, find, where, with_remote
from openrl.commands.saying import json_option, say_json, say_table, size, when
from openrl.config import ModelSource
from openrl.errors import NotFound, OpenRLError, Unavailable, UserError
from openrl.paths import ParsedPath, parse_tinker_path

_MARK = "checkpoint_complete"  # in archives, for another program
_TITLES = ("checkpoint", "kind", "base model", "size", "made", "until", "")


@click.group("checkpoints")
def checkpoints_group() -> None:
    """List, export, merge, share and delete checkpoints. PATH is tinker://RUN/KIND/NAME."""


@checkpoints_group.command("list")
@click.option("--run", metavar="RUN", help="Those of one run.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1000))
@click.option("--offset", default=0, show_default=True, type=click.IntRange(0), help="Leave out.")
@json_option
@with_remote
def list_checkpoints(
    remote: Remote, run: str | None, limit: int, offset: int, as_json: bool
) -> None:
    """Your checkpoints, the newest first."""
    if run is None:
        answer = remote.get("checkpoints", limit=limit, offset=offset)
    else:
        answer = remote.get(at(run, "checkpoints"))
    found, cursor = answer["checkpoints"], answer["cursor"]
    if as_json:
        return say_json(found)
    if not found:
        return click.echo("no checkpoints: save_state and save_sampler of a model make them")
    say_table(_TITLES, [_row(each) for each in found])
    if cursor is not None and offset + len(found) < cursor["total_count"]:
        more = f"{len(found)} of {cursor['total_count']}: more with --offset {offset + len(found)}"
        click.echo(more, err=True)
    return None


@checkpoints_group.command("show")
@click.argument("path")
@json_option
@with_remote
def show(remote: Remote, path: str, as_json: bool) -> None:
    """One checkpoint, and the adapter that it holds."""
    parsed = parse_tinker_path(path)
    saved = remote.get(at(parsed.model_id, "checkpoints"))["checkpoints"]
    found = next((each for each in saved if each["tinker_path"] == path), None)
    if found is None:
        raise NotFound(f"no checkpoint {path!r}: see openrl checkpoints list")
    facts = {**found, **remote.post("weights_info", {"tinker_path": path})}
    if as_json:
        return say_json(facts)
    say_table(("", ""), [(name, _plain(value)) for name, value in facts.items()])
    return None


@checkpoints_group.command("export")
@click.argument("path")
@click.argument("directory", type=click.Path(path_type=Path))
@json_option
@with_remote
def export(remote: Remote, path: str, directory: Path, as_json: bool) -> None:
    """Download an adapter into a new DIRECTORY, as PEFT, vLLM and others read it."""
    with _new(directory) as making:
        _download(remote, parse_tinker_path(path), making)
        files = sorted(file.name for file in making.iterdir())
    if as_json:
        return say_json({"path": path, "directory": str(directory), "files": files})
    return click.echo(f"{directory}: {', '.join(files)}")


@checkpoints_group.command("merge")
@click.argument("path")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--model", required=True, metavar="MODEL", help="The base model: a directory or a hub name."
)
@json_option
@where
def merge(
    path: str, directory: Path, model: str, as_json: bool, url: str | None, api_key: str | None
) -> None:
    """Write a full model into a new DIRECTORY: the base with an adapter added to its weights.

    PATH is a checkpoint or the directory of an exported one; that needs no server.
    """
    try:
        from openrl.engines.pytorch.merging import merge_adapter
    except ModuleNotFoundError as error:
        raise UserError(
            f'merging needs {error.name}: pip install -e ".[server]" in your clone'
        ) from error
    from openrl.engines.pytorch.model_files import weights_directory

    base = weights_directory(_source(model))
    with tempfile.TemporaryDirectory() as scratch, _new(directory) as making:
        adapter = Path(path)
        if path.startswith("tinker://"):
            adapter = Path(scratch)
            _download(find(url, api_key), parse_tinker_path(path), adapter)
        merged = merge_adapter(base, adapter, making)
    if as_json:
        return say_json({"directory": str(directory), "merged": merged})
    return click.echo(f"{directory}: {merged} weights of {model} with the adapter in them")


@checkpoints_group.command("delete")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
@with_remote
def delete(remote: Remote, paths: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete checkpoints, for good. Stops at the first that cannot be."""
    routes = {path: _one(path) for path in paths}
    if not yes:
        named = "\n".join(f"  {path}" for path in paths)
        click.confirm(f"Delete for good?\n{named}\n", abort=True, err=True)
    for path, route in routes.items():
        remote.delete(route)
        if not as_json:
            click.echo(f"deleted {path}")
    if as_json:
        say_json({"deleted": list(paths)})


@checkpoints_group.command("publish")
@click.argument("path")
@json_option
@with_remote
def publish(remote: Remote, path: str, as_json: bool) -> None:
    """Let every owner of this server read a checkpoint."""
    remote.post(f"{_one(path)}/publish")
    _changed(as_json, path, {"public": True}, "everybody here can read it now")


@checkpoints_group.command("unpublish")
@click.argument("path")
@json_option
@with_remote
def unpublish(remote: Remote, path: str, as_json: bool) -> None:
    """Take that back."""
    remote.delete(f"{_one(path)}/publish")
    _changed(as_json, path, {"public": False}, "yours alone again")


@checkpoints_group.command("ttl")
@click.argument("path")
@click.argument("seconds", metavar="SECONDS|never")
@json_option
@with_remote
def ttl(remote: Remote, path: str, seconds: str, as_json: bool) -> None:
    """Have a checkpoint deleted SECONDS from now, or never."""
    if seconds != "never" and not (seconds.isdecimal() and int(seconds) > 0):
        raise click.BadParameter("say a number of seconds, or never", param_hint="SECONDS")
    kept = None if seconds == "never" else int(seconds)
    remote.put(f"{_one(path)}/ttl", {"ttl_seconds": kept})
    told = "it stays" if kept is None else f"it is deleted in {kept} s"
    _changed(as_json, path, {"ttl_seconds": kept}, told)


def _changed(as_json: bool, path: str, values: dict[str, Any], told: str) -> None:
    if as_json:
        say_json({"path": path, **values})
    else:
        click.echo(f"{path}: {told}")


def _one(path: str) -> str:
    parsed = parse_tinker_path(path)
    return at(parsed.model_id, "checkpoints", parsed.kind, parsed.name)


def _source(model: str) -> ModelSource:
    return ModelSource(model, Path(model) if Path(model).is_dir() else None)


# --- files ----------------------------------------------------------------------------------


@contextmanager
def _new(directory: Path) -> Iterator[Path]:
    """A directory beside it that takes its name when all is well, and is gone otherwise. Raises
    `UserError` for a place that is taken."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} is there already: choose a new directory")
    try:
        directory.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=directory.absolute().parent, prefix=".openrl-", ignore_cleanup_errors=True
        ) as making:
            made = Path(making) / "made"
            made.mkdir()
            yield made
            made.replace(directory)
    except OSError as error:
        raise OpenRLError(f"{directory} cannot be written: {error}") from error


def _download(remote: Remote, path: ParsedPath, into: Path) -> None:
    if path.kind == "external_weights":
        return _download_files(remote, path, into)
    route = at(path.model_id, "checkpoints", path.kind, path.name, "archive")
    try:
        with (
            remote.open_link(remote.get(route)["url"]) as source,
            tarfile.open(fileobj=source, mode="r|") as archive,
        ):
            archive.extractall(into, filter="data")
    except tarfile.TarError as error:
        raise Unavailable(f"the archive came in pieces: {error}. Try again") from error
    (into / _MARK).unlink(missing_ok=True)
    return None


def _download_files(remote: Remote, path: ParsedPath, into: Path) -> None:
    route = at(path.model_id, "checkpoints", path.kind, path.name, "external_weights_urls")
    for name, url in remote.get(route)["urls"].items():
        remote.fetch(url, into / Path(name).name)


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    return (
        each["tinker_path"],
        each["checkpoint_type"],
        each["base_model"],
        size(each["size_bytes"]),
        when(each["time"]),
        when(each["expires_at"]),
        "public" if each["public"] else "",
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    return "" if value is None else str(value)
