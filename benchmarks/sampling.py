"""Sampling for several jobs at once: this engine against transformers.

    OMP_NUM_THREADS=1 python benchmarks/sampling.py [--quick] [--json F] [--png F]
    OMP_NUM_THREADS=1 python benchmarks/sampling.py --model DIR --tokens 8 --rounds 2 \\
        --shapes "8 of one" "4 x 4"          (a model of 135 million parameters: some minutes)

Every contender samples the same work on the same model: jobs of some shape, each with a LoRA of its
own, exactly `tokens` tokens for each sequence at temperature 1. The contenders take turns within
one process, so that a busy machine harms all alike, and what counts is CPU time:

    company     all jobs in one batch of this engine
    in turn     this engine, one job after another
    per job     generate() over all prompts of a job, num_return_sequences = samples
    per request generate() for each prompt, num_return_sequences = samples
    continuous  transformers' continuous batching (generate_batch), one job after another
    vllm        all jobs in one batch of vLLM, with `--vllm PYTHON`; see sampling_vllm.py
    vllm bare   the same without the adapters: what its handling of LoRA costs on a CPU

"per request" and "continuous" do their work piece by piece whatever the number of jobs and prompts:
to save time they do a part of it (four prompts of each job; the first job), which counts alone.

The shapes: 8 samples of one prompt; 4 prompts of 4 samples; 64 prompts with a common prefix of one
sample each. Then the time of one decode step by the number of rows, beside the time that
reading the weights, adapters, keys and values once takes at this machine's measured bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from facts import facts
from peft import PeftModel
from random_qwen3 import save_random_qwen3
from sampling_peers import Vllm, continuous, generate
from sampling_work import SHAPES, draw_prompts
from transformers import AutoModelForCausalLM

from openrl.engines.base import AdapterSource, DecodePass, RowStart, WeightsKey
from openrl.engines.pytorch.checkpoint import read_adapter, write_adapter
from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.lora import Adapter, fresh_adapter
from openrl.engines.pytorch.sampler import Sampler
from openrl.types import LoraConfig, RequestId, Sample, SamplingParams, Stop, VersionId

CPU = torch.device("cpu")
PROMPTS = 4


@dataclass(frozen=True)
class Job:
    adapter: Adapter
    prompts: list[np.ndarray]
    samples: int


@dataclass(frozen=True)
class Bench:
    """`models` are the adapters' through peft, which lie in `directories`."""

    base: Any
    sampler: Sampler
    adapters: list[Adapter]
    models: list[Any]
    directories: list[Path]
    prompt: int
    tokens: int
    vllm: Vllm | None = None

    def jobs(self, shape: str, count: int) -> list[Job]:
        drawn = draw_prompts(shape, count, self.base.vocab_size, self.prompt)
        pairs = zip(self.adapters, drawn, strict=False)
        return [Job(adapter, prompts, SHAPES[shape][1]) for adapter, prompts in pairs]


def make_adapters(base: Any, root: Path, count: int) -> tuple[list[Adapter], list[Path]]:
    """Without the head, whose adapter peft does not know by our key."""
    made, directories = [], []
    for i in range(count):
        config = LoraConfig(rank=16, seed=i, train_unembed=False)
        adapter = fresh_adapter(base.linears, config, base.device, base.dtype)
        for factor in adapter.weights.by_linear:
            if factor is not None:
                factor.b_NR.normal_(std=0.02)
        directory = root / f"job{i}"
        directory.mkdir()
        write_adapter(adapter, directory, "base")
        made.append(adapter)
        directories.append(directory)
    return made, directories


def ours(sampler: Sampler, jobs: list[Job], tokens: int) -> None:
    """On versions that are new, as after a training step: no prompt is cached."""
    for i, job in enumerate(jobs):
        sampler.pin(VersionId(f"v{i}"), job.adapter)
    starts = tuple(
        RowStart(
            RequestId(f"job{i}:{k}"),
            Sample(prompt, SamplingParams(seed=k, stop=Stop(eos=False)), job.samples),
            AdapterSource(VersionId(f"v{i}")),
            tuple(range(job.samples)),
            tokens,
        )
        for i, job in enumerate(jobs)
        for k, prompt in enumerate(job.prompts)
    )
    sampler.run(DecodePass(WeightsKey("w"), admit=starts, steps=100 * tokens))
    assert sampler.rows == 0
    for i in range(len(jobs)):
        sampler.drop_version(VersionId(f"v{i}"))


def prepare(root: Path, directory: Path, count: int, args: argparse.Namespace) -> Bench:
    base = load_base_model(directory, CPU, torch.float32)
    made, directories = make_adapters(base, root, count)
    reader = partial(read_adapter, linears=base.linears, device=base.device, dtype=base.dtype)
    sampler = Sampler(
        base, kv_cache_bytes=1 << 30, eos_token_ids=(), detokenizer=_NoText(), read_adapter=reader
    )
    models = [
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), one
        ).eval()
        for one in directories
    ]
    return Bench(base, sampler, made, models, directories, args.prompt, args.tokens)


class _NoText:
    def decode(self, ids: list[int]) -> str:
        raise AssertionError(ids)


@dataclass(frozen=True)
class Contender:
    """`tokens` are what one run samples; `clock` is in CPU seconds."""

    run: Callable[[], None]
    tokens: int
    clock: Callable[[], float] = time.process_time


def contenders(bench: Bench, shape: str, count: int, peers: set[str]) -> dict[str, Contender]:
    jobs, tokens = bench.jobs(shape, count), bench.tokens
    pairs = list(zip(bench.models, jobs, strict=False))
    whole = sum(len(job.prompts) * job.samples for job in jobs) * tokens

    def in_turn() -> None:
        for job in jobs:
            ours(bench.sampler, [job], tokens)

    def per_job() -> None:
        for model, job in pairs:
            generate(model, np.stack(job.prompts), job.samples, tokens)

    def per_request() -> None:
        for model, job in pairs:
            for prompt in job.prompts[:PROMPTS]:
                generate(model, prompt[None], job.samples, tokens)

    def batched() -> None:
        model, job = pairs[0]
        inputs = [prompt.tolist() for prompt in job.prompts for _ in range(job.samples)]
        continuous(model, inputs, tokens)

    some = sum(len(job.prompts[:PROMPTS]) * job.samples for job in jobs) * tokens
    everyone = {
        "company": Contender(lambda: ours(bench.sampler, jobs, tokens), whole),
        "in turn": Contender(in_turn, whole),
        "per job": Contender(per_job, whole),
        "per request": Contender(per_request, some),
        "continuous": Contender(batched, whole // len(jobs)),
    }
    if bench.vllm:
        vllm = bench.vllm
        run = partial(vllm.run, shape=shape, jobs=count, tokens=tokens, length=bench.prompt)
        for name, bare in (("vllm", False), ("vllm bare", True)):
            everyone[name] = Contender(partial(run, bare=bare), whole, lambda: vllm.seconds)
    return {name: one for name, one in everyone.items() if name in peers}


def measure(runs: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contender, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, contender in runs.items():
            begun = contender.clock()
            contender.run()
            seconds[name].append(contender.clock() - begun)
    return seconds


def compare(bench: Bench, peers: set[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    table = []
    warm = contenders(replace(bench, tokens=2), "4 x 4", max(args.jobs), peers)
    measure(warm, 1)
    print(f"{'':20}{'tokens per CPU-second; company is faster by'}")
    for shape in args.shapes:
        for count in args.jobs:
            runs = contenders(bench, shape, count, peers)
            seconds = measure(runs, args.rounds)
            rates = {n: runs[n].tokens / statistics.median(s) for n, s in seconds.items()}
            table.append({"shape": shape, "jobs": count, "rates": rates, "cpu_seconds": seconds})
            cells = [f"{n} {r:.0f} ({rates['company'] / r:.2f}x)" for n, r in rates.items()]
            print(f"{count} jobs, {shape:12}", "  ".join(cells), flush=True)
    return table


def steps(bench: Bench) -> list[dict[str, float]]:
    """Milliseconds of CPU time of one decode step, and of reading all that it reads once."""
    bandwidth = _bandwidth()
    weights = sum(p.numel() * p.element_size() for p in bench.base.decoder.parameters())
    found = []
    for rows in (8, 16, 32, 64):
        (job,) = bench.jobs("8 of one", 1)
        wide = Job(job.adapter, job.prompts, rows)

        def seconds(tokens: int, wide: Job = wide) -> float:
            begun = time.process_time()
            ours(bench.sampler, [wide], tokens)
            return time.process_time() - begun

        seconds(16)
        spent = [(seconds(40) - seconds(8)) / 32 for _ in range(5)]
        kv = rows * (bench.prompt + 24) * bench.sampler.memory.shape.token_bytes
        limit = (weights + kv) / bandwidth
        found.append(
            {
                "rows": rows,
                "step_ms": statistics.median(spent) * 1e3,
                "bandwidth_limit_ms": limit * 1e3,
            }
        )
    for one in found:
        ratio = one["step_ms"] / one["bandwidth_limit_ms"]
        print(f"{one['rows']:3.0f} rows: {one['step_ms']:7.2f} ms a step, {ratio:.1f}x the limit")
    print(f"8 to 64 rows: {found[-1]['step_ms'] / found[0]['step_ms']:.2f}x")
    return found


def _bandwidth() -> float:
    """Bytes per CPU-second of reading a large tensor."""
    large = torch.ones(1 << 26)
    large.sum()
    begun = time.process_time()
    for _ in range(8):
        large.sum()
    return 8 * large.nbytes / (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model's directory; default: a tiny Qwen3")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 3, 4])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--quick", action="store_true", help="one round of four jobs, 8 tokens")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--png", type=Path, help="also draw them here")
    args = parser.parse_args()
    if args.quick:
        args.jobs, args.tokens, args.rounds = [4], 8, 1
    peers = {"company", "in turn", "per job", "per request", "continuous", "vllm", "vllm bare"}
    peers -= set(args.without)
    torch.set_num_threads(1)  # waiting threads would burn CPU time, which is what is measured
    head = facts()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        directory = args.model or root / "model"
        if args.model is None:
            shape = {"vocab": 704, "hidden": 128, "layers": 4, "heads": 4}
            save_random_qwen3(directory, **shape, context=1024)
        bench = prepare(root, directory, max(args.jobs), args)
        vllm = Vllm(args.vllm, directory, bench.directories) if args.vllm else nullcontext()
        with vllm as peer:
            table = compare(replace(bench, vllm=peer), peers, args)
        decode = steps(bench)
    if args.json:
        hidden = ("json", "png", "model", "vllm")
        settings = {k: str(v) for k, v in vars(args).items() if k not in hidden}
        settings["model"] = args.model.name if args.model else "qwen3-1m"
        for path, name in ((args.model, "DIR"), (args.vllm, "PYTHON")):
            if path:  # where things lie on one machine says nothing on another
                head["command"] = head["command"].replace(str(path), name)
        report = head | {"settings": settings, "table": table, "decode_steps": decode}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.png:
        from sampling_peers import draw

        draw(table, args.png)


if __name__ == "__main__":
    main()
