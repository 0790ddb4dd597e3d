"""`openrl keys`: who may come in. A server that runs follows the file within a second."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from openrl.commands.saying import json_option, say_json, say_table
from openrl.config import Config, build, environ, resolve
from openrl.errors import UserError
from openrl.key_files import KeysFile
from openrl.keys import (
    KeyEntry,
    check_owner,
    file_of,
    from_settings,
    unlisted_owner,
)
from openrl.settings import Setting

_data = click.option("--data", metavar="DIR", help="The server's data directory.")
_config = click.option("--config", "file", type=click.Path(path_type=Path), help="A TOML file.")


def _configuration(data: str | None, file: Path | None) -> Config:
    flags = [] if data is None else [Setting("server.data", data, "--data", text=True)]
    return build(resolve(flags, environ, file))


@click.group("keys")
def keys_group() -> None:
    """Make, list and revoke API keys. Each belongs to an owner; an owner may hold several."""


@keys_group.command("add")
@click.option("--owner", metavar="NAME", help="Whose it is; new names make new owners.")
@click.option("--was", metavar="KEY", help="Instead of a name: a key used while any was let in.")
@click.option("--admin", is_flag=True, help="It may see and change what is everybody's.")
@json_option
@_data
@_config
def add(
    owner: str | None,
    was: str | None,
    admin: bool,
    as_json: bool,
    data: str | None,
    file: Path | None,
) -> None:
    """Make a key and show it, this once."""
    if (owner is None) == (was is None):
        raise UserError("say whose the key is: --owner NAME, or --was KEY")
    keys = KeysFile(file_of(_configuration(data, file)))
    new = not keys.path.exists()
    holder = unlisted_owner(was) if was is not None else check_owner(owner or "")
    key, entry = keys.add(holder, admin, datetime.now(UTC).isoformat(timespec="seconds"))
    if as_json:
        say_json({"key": key, **_plain(entry, str(keys.path))})
        return
    click.echo(key)
    click.echo(
        f"That is the key of {entry.owner}; it is not shown again. Its hash is in {keys.path}; "
        f"`openrl keys revoke {entry.key_id}` takes it back.",
        err=True,
    )
    if new:
        click.echo(
            "It is the first key: a server that let every key in does so until it is started anew.",
            err=True,
        )


@keys_group.command("list")
@json_option
@_data
@_config
def list_keys(as_json: bool, data: str | None, file: Path | None) -> None:
    """Show who holds keys, without the keys."""
    config = _configuration(data, file)
    path = file_of(config)
    listed = [(entry, str(path)) for entry in KeysFile(path).entries()]
    listed += [(entry, "auth.keys") for entry in from_settings(config.auth.keys)]
    if as_json:
        say_json([_plain(entry, place) for entry, place in listed])
    elif listed:
        say_table(("id", "owner", "role", "since", "where"), [_row(*each) for each in listed])
    else:
        click.echo(f"no keys in {path}: make one with openrl keys add --owner NAME")


@keys_group.command("revoke")
@click.argument("key_id", metavar="[ID]", required=False)
@click.option("--owner", metavar="NAME", help="Instead of one key: all of this owner's.")
@json_option
@_data
@_config
def revoke(
    key_id: str | None, owner: str | None, as_json: bool, data: str | None, file: Path | None
) -> None:
    """Take keys back, by what `list` calls them. What the owner has made stays."""
    if (key_id is None) == (owner is None):
        raise UserError("say which keys: an ID of `openrl keys list`, or --owner NAME")
    config = _configuration(data, file)
    keys = KeysFile(file_of(config))

    def goes(entry: KeyEntry) -> bool:
        return key_id in (None, entry.key_id) and owner in (None, entry.owner)

    gone = keys.revoke(goes)
    if any(map(goes, from_settings(config.auth.keys))):
        raise UserError(
            "a key of auth.keys is revoked where it is set (in the environment or the file of the "
            "configuration), with a new start of the server"
        )
    if not gone:
        raise UserError(f"no such key in {keys.path}: see openrl keys list")
    if as_json:
        say_json([_plain(entry, str(keys.path)) for entry in gone])
    else:
        names = ", ".join(entry.key_id for entry in gone)
        click.echo(f"revoked: {names}. A running server lets them in for at most a second more.")


def _plain(entry: KeyEntry, place: str) -> dict[str, str | bool]:
    return {
        "id": entry.key_id,
        "owner": entry.owner,
        "admin": entry.admin,
        "since": entry.since,
        "place": place,
    }


def _row(entry: KeyEntry, place: str) -> tuple[str, ...]:
    return (entry.key_id, entry.owner, "admin" if entry.admin else "", entry.since, place)
