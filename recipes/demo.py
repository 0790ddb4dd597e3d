"""A small model learns to write SQL, through the `tinker` SDK, in some minutes on two cores.

    python -m recipes.demo                 # starts a server of its own
    python -m recipes.demo --jobs 3        # three learning rates side by side on one server
    python -m recipes.demo --base-url http://127.0.0.1:8000

Leaves the reward curve (PNG), `metrics.jsonl` and sampled queries in `demo-output/`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import time
from itertools import islice
from pathlib import Path

# Before tinker is imported, which reads them: nothing about a demo leaves this machine.
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if __name__ == "__main__":
    print("importing the tinker SDK, transformers and matplotlib", flush=True)  # takes seconds

import aiohttp
import tinker
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openrl import demo
from recipes.demo_loop import Plan, answers, grpo
from recipes.demo_view import Job, Meter, View, append_metrics, plot, print_samples, write_samples
from recipes.kit.groups import Answer
from recipes.kit.server import ServerDied, local_server, stop_at_sigterm, together
from recipes.tasks.sql import Question, questions

SHOWN = 12
INTERRUPTED = 130
FILES = ("reward.png", "metrics.jsonl", "samples.md")
PROMPT = aiohttp.ClientTimeout(total=5)


def parse() -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(description="Watch a small model learn to write SQL.")
    parser.add_argument("--base-url", help="a running server; left out, one is started")
    parser.add_argument("--model", default=demo.NAME, help="of the server at --base-url")
    parser.add_argument("--jobs", type=int, default=1, help="training runs side by side")
    parser.add_argument("--steps", type=int, default=plan.steps, help=f"default {plan.steps}")
    parser.add_argument("--seed", type=int, default=plan.seed, help=f"default {plan.seed}")
    parser.add_argument("--learning-rate", type=float, default=plan.learning_rate)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    if options.jobs < 1 or options.steps < 1:
        parser.error("--jobs and --steps are at least 1")
    if options.base_url is None and options.model != demo.NAME:
        parser.error(f"--model goes with --base-url: the server that is started has {demo.NAME}")
    return options


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """Learning rates a factor of two apart, around the one asked for."""
    middle = (options.jobs - 1) // 2
    rates = [options.learning_rate * 2.0 ** (i - middle) for i in range(options.jobs)]
    return [
        Job(f"lr {rate:g}", Plan(learning_rate=rate, steps=options.steps, seed=options.seed))
        for rate in rates
    ]


async def run(options: argparse.Namespace, view: View) -> None:
    stop_at_sigterm()
    if options.base_url is not None:
        view.status(f"connecting to {options.base_url}")
        await reachable(options.base_url)
        await train_all(options.base_url, options, view)
        return
    view.status("starting a server")
    directory = fresh(options.output / "server")
    model = f"{demo.NAME}={demo.model_directory()}"
    async with local_server(directory, "--model", model) as server:
        await server.during(train_all(server.url, options, view))


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


async def reachable(url: str) -> None:
    """Asked first, since the SDK keeps trying for minutes. Raises `ConnectionError`."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/healthz", timeout=PROMPT):
            pass
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(f"no server answers at {url}: {error}") from error


async def train_all(url: str, options: argparse.Namespace, view: View) -> None:
    view.status(f"{options.model} on {url}, GRPO by the tinker SDK {tinker.__version__}")
    tokenizer = AutoTokenizer.from_pretrained(demo.model_directory())
    service = tinker.ServiceClient(base_url=url)
    async with together() as background:
        metering = background.create_task(read_meter(url, view.meter))
        async with together() as training:
            for job in view.jobs:
                training.create_task(train_one(service, tokenizer, options, job, view))
        metering.cancel()
    await service.close("success")
    view.status("done")


async def train_one(
    service: tinker.ServiceClient,
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
    job: Job,
    view: View,
) -> None:
    model = await service.create_lora_training_client(
        options.model, rank=job.plan.rank, seed=job.plan.seed
    )
    job.before = await sampled(model, tokenizer)
    async for step in grpo(model, tokenizer, job.plan):
        job.history.append(step)
        append_metrics(options.output / "metrics.jsonl", job, view.elapsed)
        view.stepped(job)
    job.after = await sampled(model, tokenizer)


async def sampled(model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """One answer to each of the questions that are shown before and after."""
    sampler = await model.save_weights_and_get_sampling_client()
    groups = await answers(sampler, tokenizer, shown_questions(), 1, seed=7)
    return [group[0] for group in groups]


def shown_questions() -> list[Question]:
    return list(islice(questions("shown"), SHOWN))


async def read_meter(url: str, meter: Meter) -> None:
    """Every second. A server that is not OpenRL's may not tell."""
    started = time.monotonic()
    async with aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
                async with http.get(f"{url}/readyz", timeout=PROMPT) as answer:
                    meter.read(time.monotonic() - started, (await answer.json())["engine_seconds"])
            await asyncio.sleep(1.0)


def conclude(output: Path, view: View, console: Console) -> None:
    """What there is, also after a run that was stopped."""
    plot(output / "reward.png", view.jobs, view.meter)
    for job in view.jobs:
        first, last = job.first_and_last
        steps = "step" if job.ends == 1 else f"{job.ends} steps"
        console.print(
            f"{job.name}: mean reward of the first {steps} {first:.3f}, "
            f"of the last {steps} {last:.3f} ({last - first:+.3f})",
            highlight=False,
            soft_wrap=True,
        )
    finished = [job for job in view.jobs if job.after]
    if finished:
        write_samples(output / "samples.md", shown_questions(), finished)
        best = max(finished, key=lambda job: job.first_and_last[1])
        print_samples(console, shown_questions(), best)
    left = ", ".join(name for name in FILES if (output / name).exists())
    console.print(f"\nIn {output}/: {left}", highlight=False)


def main() -> int:
    options = parse()
    console = Console(emoji=False)  # ids hold ":train:"
    options.output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (options.output / name).unlink(missing_ok=True)
    view = View(make_jobs(options), console)
    status = 0
    try:
        with view:
            asyncio.run(run(options, view))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped")
        status = INTERRUPTED
    except (ServerDied, OSError, tinker.TinkerError) as error:  # TimeoutError is an OSError
        console.print(f"The demo failed: {error}", style="red", markup=False, soft_wrap=True)
        status = 1
    if any(job.history for job in view.jobs):
        conclude(options.output, view, console)
    return status


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # The SDK's threads may still be waiting for a server that is gone; they end here with us.
    os._exit(code)
