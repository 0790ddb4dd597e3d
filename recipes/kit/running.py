"""The beginning and the end of every recipe: flags, a server, runs side by side, what is left."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

# Before tinker is imported, which reads them.
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tinker
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openrl import demo
from recipes.kit.record import Record
from recipes.kit.server import ServerDied, local_server, stop_at_sigterm, together

Metrics = Mapping[str, float]
P = TypeVar("P")
Train = Callable[[tinker.ServiceClient, PreTrainedTokenizerBase, P], AsyncIterator[Metrics]]
"""Gives a line of numbers for each step. The plan has at least `model` and `seed`."""


@dataclass(frozen=True)
class Model:
    """`directory` is None for a model of the hub."""

    name: str
    directory: Path | None

    @classmethod
    def parse(cls, text: str) -> Model:
        name, _, directory = text.partition("=")
        if directory:
            return cls(name, Path(directory))
        return cls(name, demo.model_directory() if name == demo.NAME else None)

    @property
    def served(self) -> str:
        return f"{self.name}={self.directory}" if self.directory else self.name

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.directory or self.name)


def main(train: Train[P], plan: type[P], script: str) -> int:
    """Runs the recipe in `script` as the command line says. The plan's defaults are in the
    `config.toml` beside it, under the script's name."""
    file = Path(script)
    name = f"{file.parent.name}.{file.stem}"
    defaults = tomllib.loads(file.with_name("config.toml").read_text())[file.stem]
    options = vars(_parser(name, defaults).parse_args())
    model = Model.parse(options["model"])
    given = {each.name: options[each.name] for each in fields(plan) if each.name in options}
    plans = [plan(**given | {"model": model.name, "seed": seed}) for seed in options["seeds"]]
    record = Record(f"recipes.{name}", options["output"], sys.argv[1:], model.name)
    try:
        asyncio.run(_run(train, plans, model, options["base_url"], record))
    except (OSError, tinker.TinkerError, ServerDied) as error:
        print(f"{name} failed: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped")
    finally:
        record.conclude()
    return 0


def _parser(name: str, defaults: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m recipes.{name}")
    parser.add_argument("--base-url", help="a running server; left out, one is started")
    parser.add_argument(
        "--model", default=demo.NAME, help="a name that the server knows, or NAME=DIRECTORY"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each, at once")
    parser.add_argument("--output", type=Path, default=Path("recipe-output") / name)
    for field, value in defaults.items():
        flag = "--" + field.replace("_", "-")
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    return parser


async def _run(
    train: Train[P], plans: list[P], model: Model, url: str | None, record: Record
) -> None:
    stop_at_sigterm()
    async with _serving(model, url, record.directory) as address:
        service = tinker.ServiceClient(base_url=address)
        tokenizer = model.tokenizer
        async with together() as group:
            for plan in plans:
                group.create_task(_follow(train(service, tokenizer, plan), plan, record))
        await service.close("success")


@contextlib.asynccontextmanager
async def _serving(model: Model, url: str | None, directory: Path) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    async with local_server(directory, "--model", model.served) as server:
        print(f"a server of our own at {server.url}; its log is {server.log}")
        yield server.url


async def _follow(steps: AsyncIterator[Metrics], plan: Any, record: Record) -> None:
    started = time.perf_counter()
    async for metrics in steps:
        record.add(plan.seed, time.perf_counter() - started, metrics)
