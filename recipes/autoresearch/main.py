"""Research on a recipe: experiments side by side, judged by a harness that they can't reach.

openrl research text_to_sql --budget 2h --parallel 3
openrl research text_to_sql --agent "my-agent --prompt-file RESEARCH.md"
openrl research text_to_sql --reproduce       # the best run, once more
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from recipes.autoresearch import report
from recipes.autoresearch.harness import Harness, Node
from recipes.autoresearch.ledger import Ledger
from recipes.autoresearch.proposing import Agent, Proposal, Proposer, Settings
from recipes.autoresearch.study import Sources, Study
from recipes.autoresearch.working import Failed, Limits, Refused, Unmetered
from recipes.kit.running import Model
from recipes.kit.server import ServerDied, local_server, stop_at_sigterm


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="openrl research", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help="a recipe with a research.toml")
    parser.add_argument("--budget", type=seconds, default=seconds("30m"),
                        help="of engine time, for all experiments: 90s, 30m, 2h")  # fmt: skip
    parser.add_argument("--each", type=seconds, default=seconds("10m"),
                        help="of engine time, for one experiment")  # fmt: skip
    parser.add_argument("--patience", type=seconds, default=seconds("1h"),
                        help="how long one experiment may take on the clock")  # fmt: skip
    parser.add_argument("--parallel", type=int, default=3, help="experiments side by side")
    parser.add_argument("--alpha", type=float, default=0.05,
                        help="the chance that anything no better is ever kept")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="openrl/sql-demo", help="or NAME=DIRECTORY")
    parser.add_argument("--base-url", help="a node of one's own, which takes any key")
    parser.add_argument("--agent", help="a command that edits the recipe's file; else Optuna")
    parser.add_argument("--directory", type=Path, help="default: research-output/RECIPE")
    parser.add_argument("--reproduce", action="store_true", help="run the best once more")
    options = parser.parse_args(argv)
    options.directory = options.directory or Path("research-output") / options.recipe
    return options


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: say 90s, 30m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


async def research(options: argparse.Namespace) -> None:
    stop_at_sigterm()
    study, sources = Study.read(options.recipe), Sources.read()
    options.directory.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(options.directory / "ledger.sqlite")
    check_same(ledger, options, sources)
    model = Model.parse(options.model)
    try:
        async with _serving(options, model) as url:
            harness = Harness(
                study, Node(url, model.served), model.tokenizer, ledger, sources,
                Limits(options.each, options.patience), options.budget, options.alpha, options.seed,
            )  # fmt: skip
            if options.reproduce:
                return await reproduce(harness)
            await harness.run(proposer(options, study, sources, harness), options.parallel)
            await harness.test()
        return None
    finally:
        again = f"openrl research {options.recipe} --directory {options.directory} --reproduce"
        print(report.write(ledger, options.directory, again))
        print(f"In {options.directory}/: report.md, report.png, ledger.sqlite")
        ledger.close()


def check_same(ledger: Ledger, options: argparse.Namespace, sources: Sources) -> None:
    """A study that goes on is the same study. Raises `ValueError`."""
    now = {
        "recipe": options.recipe, "model": options.model, "seed": str(options.seed),
        "alpha": str(options.alpha), "sources": sources.digest(),
    }  # fmt: skip
    for name, value in now.items():
        if (before := ledger.fact(name, value)) != value:
            raise ValueError(
                f"{options.directory} holds research with another {name}: {before}, not {value}; "
                f"choose another --directory"
            )


def proposer(
    options: argparse.Namespace, study: Study, sources: Sources, harness: Harness
) -> Proposer:
    if options.agent:
        file = study.file.relative_to(study.file.parents[2])
        return Agent(study, shlex.split(options.agent), file, sources, options.patience)
    return Settings(study, options.directory, harness.defaults().source, options.seed)


async def reproduce(harness: Harness) -> None:
    best = harness.ledger.best()
    if best is None:
        raise ValueError("there is no research in this directory yet")
    found = await harness.again(Proposal(best.change, best.settings, best.source), "validation")
    same = "the same scores" if list(best.validation) == found else "other scores"
    mean = sum(found) / len(found)
    print(f"experiment {best.number} again: validation {mean:.4f}, was {best.mean:.4f}: {same}")


@contextlib.asynccontextmanager
async def _serving(options: argparse.Namespace, model: Model) -> AsyncIterator[str]:
    if options.base_url:
        yield options.base_url
        return
    directory = options.directory / "server"
    directory.mkdir(exist_ok=True)
    async with local_server(directory, "--model", model.served) as server:
        yield server.url


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        asyncio.run(research(options))
    except (ValueError, OSError, ServerDied, Failed, Refused, Unmetered) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; the same command goes on")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
