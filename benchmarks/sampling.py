"""Sampling for several jobs at once: this engine against transformers' `generate()`.

    OMP_NUM_THREADS=1 python benchmarks/sampling.py [--jobs 4] [--samples 8] [--tokens 32]

Every contender samples the same work on the same random model: `jobs` prompts, each with its own
LoRA, `samples` sequences of exactly `tokens` tokens at temperature 1. The contenders take turns
within one process, so that a busy machine harms all alike, and what counts is CPU time:

    company     all jobs in one batch of this engine
    in turn     this engine, one job after another
    per job     generate() with num_return_sequences, one job after another
    per request generate() for each sequence by itself
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from openrl.engines.base import AdapterSource, DecodePass, RowStart, WeightsKey
from openrl.engines.pytorch.checkpoint import read_adapter, write_adapter
from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.lora import fresh_adapter
from openrl.engines.pytorch.sampler import Sampler
from openrl.engines.pytorch.stops import LazyDetokenizer
from openrl.types import LoraConfig, RequestId, Sample, SamplingParams, Stop, VersionId

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    prompt: np.ndarray
    directory: Path
    source: AdapterSource


def tiny_qwen3(directory: Path) -> None:
    """About one million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=704,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def make_jobs(base: Any, root: Path, count: int, prompt_tokens: int, vocab: int) -> list[Job]:
    rng = np.random.default_rng(0)
    jobs = []
    for i in range(count):
        config = LoraConfig(rank=16, seed=i, train_unembed=False)  # peft knows no such head
        adapter = fresh_adapter(base.linears, config, base.device, base.dtype)
        for factor in adapter.weights.by_linear:
            if factor is not None:
                factor.b_NR.normal_(std=0.02)
        directory = root / f"job{i}"
        directory.mkdir()
        write_adapter(adapter, directory, "base")
        prompt = rng.integers(3, vocab, prompt_tokens).astype(np.int32)
        jobs.append(Job(prompt, directory, AdapterSource(VersionId(f"v{i}"), directory)))
    return jobs


def ours(sampler: Sampler, jobs: list[Job], samples: int, tokens: int) -> None:
    starts = tuple(
        RowStart(
            RequestId(f"job{i}"),
            Sample(job.prompt, SamplingParams(seed=i, stop=Stop(eos=False)), samples),
            job.source,
            tuple(range(samples)),
            tokens,
        )
        for i, job in enumerate(jobs)
    )
    sampler.run(DecodePass(WeightsKey("w"), admit=starts, steps=tokens + 64))
    assert sampler.rows == 0


def generate(model: Any, job: Job, sequences: int, tokens: int) -> None:
    ids = torch.from_numpy(job.prompt).long()[None]
    with torch.no_grad():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=sequences,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )


def contenders(
    root: Path, model_directory: Path, args: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    base = load_base_model(model_directory, CPU, torch.float32)
    jobs = make_jobs(base, root, args.jobs, args.prompt, base.vocab_size)
    reader = partial(read_adapter, linears=base.linears, device=base.device, dtype=base.dtype)
    sampler = Sampler(
        base,
        kv_cache_bytes=1 << 28,
        eos_token_ids=(),
        detokenizer=LazyDetokenizer(str(model_directory)),
        read_adapter=reader,
    )
    models = [
        PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32),
            job.directory,
        ).eval()
        for job in jobs
    ]

    def in_turn() -> None:
        for job in jobs:
            ours(sampler, [job], args.samples, args.tokens)

    def per_job() -> None:
        for model, job in zip(models, jobs, strict=True):
            generate(model, job, args.samples, args.tokens)

    def per_request() -> None:
        for model, job in zip(models, jobs, strict=True):
            for _ in range(args.samples):
                generate(model, job, 1, args.tokens)

    return {
        "company": lambda: ours(sampler, jobs, args.samples, args.tokens),
        "in turn": in_turn,
        "per job": per_job,
        "per request": per_request,
    }


def measure(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contender, round by round; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - begun)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model's directory; default: a tiny Qwen3")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        directory = args.model or root / "model"
        if args.model is None:
            tiny_qwen3(directory)
        seconds = measure(contenders(root, directory, args), args.rounds)
    made = args.jobs * args.samples * args.tokens
    rates = {name: made / statistics.median(values) for name, values in seconds.items()}
    print(f"{'':12} tokens per CPU-second   company is faster by")
    for name, rate in rates.items():
        print(f"{name:12} {rate:21.0f}   {rates['company'] / rate:18.2f}x")
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items()}
        report = {"settings": settings, "cpu_seconds": seconds, "tokens_per_cpu_second": rates}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
