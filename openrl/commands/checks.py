"""What a machine and a configuration lack to serve: one `Check` for each thing looked at."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path

from openrl.commands.saying import size
from openrl.config import Config, ModelSource
from openrl.errors import UserError
from openrl.keys import checks_keys
from openrl.preflight import data_problems, explain, model_problems, trust_problems

OLDEST_PYTHON = (3, 11)
FEWEST_FILES = 1024
"""Each poll that is held open is a file."""
LOW_DISK = 4 << 30  # bytes: below it, a warning
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "uvloop")


@dataclass(frozen=True, slots=True)
class Check:
    """`found` when it is `good`; `todo` says what to do when it is not."""

    name: str
    good: bool
    found: str
    todo: str = ""


def all_checks(config: Config) -> Iterator[Check]:
    yield _python()
    yield from _packages(config)
    yield from _device(config)
    yield _memory()
    yield from _model_files(config)
    yield from _data(config)
    yield _port(config)
    yield _trust(config)
    yield _open_files()


def _python() -> Check:
    found = platform.python_version()
    return Check("python", sys.version_info >= OLDEST_PYTHON, found, "use Python 3.11 or later")


def _packages(config: Config) -> Iterator[Check]:
    """The engine without weights needs none of them."""
    needed = config.engine.kind == "torch"
    for name in _PACKAGES:
        try:
            yield Check(name, True, version_of(name))
        except PackageNotFoundError:
            todo = 'pip install -e ".[server]" in your clone'
            yield Check(name, not needed, "not installed", todo)


def _device(config: Config) -> Iterator[Check]:
    if find_spec("torch") is None:  # looks without importing
        found = "unknown without torch"
        yield Check("device", config.engine.kind != "torch", found, "install torch first")
        return
    from openrl.engines.pytorch.devices import device_facts

    try:
        facts = device_facts(config.engine.device, config.engine.dtype)
    except UserError as error:
        yield Check("device", False, error.message, "choose another with --device")
        return
    if facts.total is None:
        yield Check("device", True, facts.name)
    else:
        room = f"{size(facts.free)} of {size(facts.total)} free"
        yield Check("device", True, f"{facts.name}, {room}")
    yield Check("numbers", True, facts.policy)


def _memory() -> Check:
    """Of the machine: a container may have less."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found = f"{size(pages * page)}, {os.cpu_count()} cores"
    return Check("memory", pages * page >= 2 << 30, found, "a server needs 2 GiB at the least")


def _model_files(config: Config) -> Iterator[Check]:
    if not config.models:
        yield Check("models", False, "none", "name one with --model NAME=PATH")
    problems = "\n".join(model_problems(config))
    for model in config.models:
        name = f"model {model.name}"
        mine = [line for line in problems.splitlines() if line.startswith(f"{name}:")]
        if mine:
            yield Check(name, False, mine[0].removeprefix(f"{name}: "), "see --model")
        elif model.path is None:
            yield Check(name, True, "of the hub, or of its cache: fetched at start")
        else:
            yield _readable(name, model)


def _readable(name: str, model: ModelSource) -> Check:
    assert model.path is not None
    files = [file for file in model.path.iterdir() if file.is_file()]
    closed = [file.name for file in files if not os.access(file, os.R_OK)]
    if closed:
        return Check(name, False, f"{closed[0]} cannot be read", f"chmod it in {model.path}")
    return Check(name, True, f"{model.path}, {size(sum(f.stat().st_size for f in files))}")


def _data(config: Config) -> Iterator[Check]:
    problems = list(data_problems(config.data))
    yield Check(
        "data directory",
        not problems,
        "; ".join(problems) or f"{config.data.absolute()} is writable",
        "choose another with --data",
    )
    standing = next(
        p for p in (config.data.absolute(), *config.data.absolute().parents) if p.exists()
    )
    free = shutil.disk_usage(standing).free
    yield Check(
        "disk", free >= LOW_DISK, f"{size(free)} free", "make room, or choose another --data"
    )
    if config.journal.enabled:
        yield _journal(config.data / "journal")


def _journal(directory: Path) -> Check:
    if not directory.exists():
        return Check("journal", True, "none yet")
    good = os.access(directory, os.R_OK | os.W_OK | os.X_OK)
    files = [file for file in directory.rglob("*") if file.is_file()] if good else []
    found = f"{size(sum(f.stat().st_size for f in files))} in {len(files)} files"
    todo = "run the server as the user who owns it"
    return Check("journal", good, found if good else f"{directory} is closed", todo)


def _port(config: Config) -> Check:
    at = f"{config.host}:{config.port}"
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.host, config.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            found, todo = f"{at} is taken, perhaps by another server", "choose a port with --port"
        else:
            todo = explain(error, config) or "choose another with --host and --port"
            found = f"{at}: {error}"
        return Check("port", False, found, todo)
    return Check("port", True, f"{at} is free")


def _trust(config: Config) -> Check:
    problems = list(trust_problems(config))
    if problems:
        return Check(
            "keys and TLS", False, "; ".join(problems), "see openrl keys, and docs/keys.md"
        )
    keys = "keys are checked" if checks_keys(config) else "any key is let in, from this machine"
    return Check("keys and TLS", True, f"{keys}; {'HTTPS' if config.tls_cert else 'plain HTTP'}")


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FEWEST_FILES
    return Check("open files", enough, f"up to {soft}", f"ulimit -n {8 * FEWEST_FILES}")
