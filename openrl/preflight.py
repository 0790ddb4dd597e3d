"""What can be known to be wrong before anything is started, said in words that help."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from openrl.config import Config, ModelSource
from openrl.errors import UserError
from openrl.key_files import read_keys
from openrl.keys import checks_keys
from openrl.tls import server_context

_WEIGHTS = ("*.safetensors", "*.bin")
_LEAST_FREE = 64 << 20  # bytes: less than any adapter's checkpoint with its optimizer


def check(config: Config) -> None:
    """Raises `UserError` with every problem, one a line. Touches nothing."""
    problems = [*model_problems(config), *data_problems(config.data), *trust_problems(config)]
    if problems:
        raise UserError("\n".join(problems))


def model_problems(config: Config) -> Iterator[str]:
    if not config.models:
        yield "no model to serve: say --model NAME=PATH, or --model NAME for one of the hub's"
    if config.engine.kind == "torch":
        for package in ("torch", "transformers", "safetensors"):
            if find_spec(package) is None:  # looks without importing
                yield f'the torch engine needs {package}: pip install -e ".[server]" in your clone'
        for model in config.models:
            yield from _files(model)


def _files(model: ModelSource) -> Iterator[str]:
    path = model.path
    if path is None:
        return
    if not path.is_dir():
        yield f"model {model.name}: no directory {path}"
    elif not (path / "config.json").is_file():
        yield f"model {model.name}: {path} holds no config.json; is it a model's directory?"
    elif not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        yield f"model {model.name}: {path} holds no weights (*.safetensors); copy the whole model"


def data_problems(data: Path) -> Iterator[str]:
    standing = next(p for p in (data.absolute(), *data.absolute().parents) if p.exists())
    if not standing.is_dir():
        yield f"data directory {data}: {standing} is a file; choose another with --data"
    elif not os.access(standing, os.W_OK | os.X_OK):
        yield f"data directory {data}: {standing} is not writable; choose another with --data"
    elif (free := shutil.disk_usage(standing).free) < _LEAST_FREE:
        yield f"data directory {data}: {free >> 20} MiB free; make room or choose another (--data)"


def trust_problems(config: Config) -> Iterator[str]:
    for works in (checks_keys, read_keys, server_context):
        try:
            works(config)
        except UserError as error:
            yield error.message


def explain(error: OSError, config: Config) -> str | None:
    """What to do about an error of the operating system while serving; None if unknown."""
    at = f"{config.host}:{config.port}"
    if isinstance(error, socket.gaierror):
        return f"{config.host} is not known here; see --host"
    known = {
        errno.EADDRINUSE: f"{at} is taken, perhaps by another server; choose a port with --port",
        errno.EADDRNOTAVAIL: f"{config.host} is no address of this machine; see --host",
        errno.EACCES: f"not allowed: {error.filename or at}; see --port and --data",
        errno.ENOSPC: f"no space left for {config.data}; choose another with --data",
    }
    return known.get(error.errno or 0)
