"""`openrl doctor`: what is missing before a server is started."""

from __future__ import annotations

from dataclasses import asdict

import click

from openrl.commands.checks import all_checks
from openrl.commands.saying import json_option, say_json
from openrl.commands.serving import Source, configured
from openrl.config import build


@click.command("doctor")
@json_option
@configured
def doctor(source: Source, as_json: bool) -> None:
    """Look at what a server with these flags would need, and say what to do.

    Starts and changes nothing. Exit status 1: something is missing.
    """
    checks = list(all_checks(build(source.resolved())))
    if as_json:
        say_json([asdict(check) for check in checks])
    else:
        for check in checks:
            mark = click.style("✓", fg="green") if check.good else click.style("✗", fg="red")
            todo = "" if check.good else f". {check.todo[:1].upper()}{check.todo[1:]}"
            click.echo(f"{mark} {check.name}: {check.found}{todo}")
    if not all(check.good for check in checks):
        raise SystemExit(1)
