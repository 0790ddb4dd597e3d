"""Training several LoRA jobs at once: this engine fused, in turn, and three ways of peft.

    OMP_NUM_THREADS=1 python benchmarks/training.py [--quick] [--smollm2 DIR]

The contenders take turns within one process, so that a busy machine harms all alike, and what
counts is CPU time: the median over the rounds. Longer shapes get fewer rounds, and peft only the
smaller numbers of jobs there. `--smollm2` adds SmolLM2-135M from its directory. Prints a table
and writes `benchmarks/results/training.json` and `.png`; five minutes at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from training_peers import Contender, Shape, contenders, job_data, small_qwen3

from openrl.engines.pytorch.heap import keep_freed_memory

RESULTS = Path(__file__).parent / "results"
SHORT, MIDDLE, LONG = Shape(4, 16, 64), Shape(8, 64, 64), Shape(16, 64, 256)
MODELS = {"qwen3 1M": (128, 2048), "qwen3 4M": (256, 4096)}
PROFILED = {
    "products": ("mm", "linear"),
    "low-rank products that add": ("addmm_", "addmm"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "index_select",
        "index_copy_",
        "_Gather",
        "_GatherBackward",
    ),
    "our own Python": ("_AdaptedLinears", "_AdaptedLinearsBackward"),
    "norms, rotary, gates": ("mul", "add", "pow", "mean", "rsqrt", "neg", "cat", "sum", "div"),
    "activation": ("silu", "silu_backward"),
    "head": ("exp_", "sub_", "amax", "gather", "scatter_add_", "mul_"),
}
VOCABULARY, ROWS, HIDDEN = 150_000, 1024, 256


@dataclass(frozen=True)
class Case:
    """`seconds` of CPU are spent on the rounds, at least one; `peers` false leaves peft out."""

    model: str
    shape: Shape
    jobs: int
    seconds: float
    peers: bool = True


@dataclass(frozen=True)
class Row:
    """CPU milliseconds by contender, medians; `ratios` to fused are of the medians."""

    model: str
    shape: str
    jobs: int
    tokens: int
    rounds: int
    milliseconds: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        fused = self.milliseconds["fused"]
        return {name: value / fused for name, value in self.milliseconds.items()}


def cases(quick: bool) -> Iterator[Case]:
    for model in MODELS:
        for jobs in (1, 2, 4, 8):
            yield Case(model, SHORT, jobs, 2.0 if quick else 4.0)
        if not quick:
            for jobs in (1, 2, 4, 8):
                yield Case(model, MIDDLE, jobs, 2.0, peers=jobs < 8)
            for jobs in (1, 2, 4, 8):
                yield Case(model, LONG, jobs, 2.0, peers=jobs < 2)


def smollm2_cases(quick: bool) -> Iterator[Case]:
    yield Case("SmolLM2-135M", Shape(4, 16, 48), 2, 1.0)
    if not quick:
        yield Case("SmolLM2-135M", Shape(4, 16, 48), 4, 1.0)
        yield Case("SmolLM2-135M", Shape(4, 64, 192), 1, 1.0)


def measure(case: Case, ways: dict[str, Contender], vocab: int) -> Row:
    data = [job_data(job, case.shape, vocab) for job in range(case.jobs)]
    chosen = {n: way for n, way in ways.items() if case.peers or not n.startswith("peft")}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for way in chosen.values():
        way(data[:1])  # warm
    began = time.process_time()
    while not times["fused"] or time.process_time() - began < case.seconds:
        for name, way in chosen.items():
            start = time.process_time()
            way(data)
            times[name].append(time.process_time() - start)
    return Row(
        case.model,
        str(case.shape),
        case.jobs,
        sum(len(datum.tokens) for datums in data for datum in datums),
        len(times["fused"]),
        {name: 1e3 * statistics.median(values) for name, values in times.items()},
    )


def profile(fused: Contender, vocab: int, jobs: int) -> dict[str, float]:
    """Where a fused pass of the shortest shape spends its time, in percent; `other` is the
    interpreter and hundreds of small operations."""
    data = [job_data(job, SHORT, vocab) for job in range(jobs)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            fused(data)
    spent = {e.key.removeprefix("aten::"): e.self_cpu_time_total for e in found.key_averages()}
    total = sum(spent.values())
    shares = {
        label: sum(spent.get(name, 0.0) for name in names) / total * 100
        for label, names in PROFILED.items()
    }
    return shares | {"other": 100 - sum(shares.values())}


# --- memory of the log-probability step -----------------------------------------------------


def head_memory() -> dict[str, float]:
    """MiB that the log-probabilities and their gradient take at a large vocabulary, each in a
    process of its own."""
    full = ROWS * VOCABULARY * 4 / (1 << 20)
    found = {"full logits": full}
    for way in ("ours", "cross_entropy"):
        command = [sys.executable, __file__, "--memory", way]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        found[way] = float(answer.stdout)
    return found


def peak_of(way: str) -> float:
    """MiB beyond what was there before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from openrl.engines.pytorch.base_model import BaseModel
    from openrl.engines.pytorch.logprobs import Task, Wanted, sweep
    from openrl.engines.pytorch.lora import fresh_adapter
    from openrl.engines.pytorch.packing import Span
    from openrl.types import LoraConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    base = BaseModel(LlamaForCausalLM(config))
    adapter = fresh_adapter(base.linears, LoraConfig(rank=8, seed=0), base.device, base.dtype)
    gradient = adapter.layout.zeros(base.device)
    hidden_SD = torch.randn(ROWS, HIDDEN)
    targets_S1 = torch.randint(VOCABULARY, (ROWS, 1))
    grad_SD = torch.zeros_like(hidden_SD)
    torch.nn.functional.linear(hidden_SD[:16], base.head_weight_VD)  # what the library keeps
    before = reset_peak()
    if way == "ours":
        inputs = {"weights": torch.ones(ROWS, 1)}
        span = (Span(0, ROWS),)
        task = Task(hidden_SD, targets_S1, span, "cross_entropy", inputs, {}, adapter)
        sweep(base, task, Wanted(gradient, grad_SD))
    else:
        hidden_SD.requires_grad_()
        logits = torch.nn.functional.linear(hidden_SD, base.head_weight_VD)
        torch.nn.functional.cross_entropy(logits, targets_S1[:, 0], reduction="sum").backward()
    return (status_kib("VmHWM") - before) / 1024


def reset_peak() -> int:
    """KiB in use now, from which on Linux counts the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("VmRSS")


def status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


# --- results --------------------------------------------------------------------------------


def show(rows: Sequence[Row], memory: dict[str, float]) -> None:
    others = [name for name in rows[0].milliseconds if name != "fused"]
    print(f"{'model':14}{'shape':>11}{'jobs':>5}{'tokens':>7}{'fused ms':>10}", end="")
    print("".join(f"{name:>20}" for name in others), " (times fused)")
    for row in rows:
        fused = row.milliseconds["fused"]
        print(f"{row.model:14}{row.shape:>11}{row.jobs:5}{row.tokens:7}{fused:10.1f}", end="")
        print("".join(f"{row.ratios[n]:20.2f}" if n in row.ratios else f"{'':20}" for n in others))
    print(
        f"\nlog-probabilities and their gradient, {ROWS} rows, vocabulary {VOCABULARY:,}: "
        + ", ".join(f"{name} {size:.0f} MiB" for name, size in memory.items())
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = list(dict.fromkeys((row.model, row.shape) for row in rows))
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 3 * lines), squeeze=False)
    for axis, (model, shape) in zip(axes.flat, groups, strict=False):
        mine = [row for row in rows if (row.model, row.shape) == (model, shape)]
        for name in mine[0].milliseconds:
            points = [(r.jobs, r.ratios[name]) for r in mine if name in r.ratios]
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(title=f"{model}, {shape}", xlabel="jobs", ylabel="CPU time / fused")
        axis.set_ylim(bottom=0)
    axes.flat[0].legend(fontsize=7)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the shortest shape alone")
    parser.add_argument("--smollm2", type=Path, help="directory of SmolLM2-135M")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--memory", choices=("ours", "cross_entropy"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(peak_of(arguments.memory))
        return
    keep_freed_memory()
    wanted = list(cases(arguments.quick))
    if arguments.smollm2:
        wanted += smollm2_cases(arguments.quick)
    wanted = [case for case in wanted if (arguments.only or "") in case.model]
    rows = []
    shares: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in dict.fromkeys(case.model for case in wanted):
            directory = arguments.smollm2
            if model in MODELS:
                directory = small_qwen3(Path(scratch) / model, *MODELS[model])
            mine = [case for case in wanted if case.model == model]
            ways, vocab = contenders(directory, max(case.jobs for case in mine))
            for case in mine:
                rows.append(measure(case, ways, vocab))
                print(".", end="", flush=True, file=sys.stderr)
            if model in MODELS:
                shares[model] = profile(ways["fused"], vocab, 8)
            del ways
    memory = head_memory()
    print(file=sys.stderr)
    show(rows, memory)
    for model, parts in shares.items():
        words = ", ".join(f"{name} {share:.0f} %" for name, share in parts.items())
        print(f"{model}, {SHORT}, 8 jobs fused: {words}")
    RESULTS.mkdir(exist_ok=True)
    report = {
        "machine": machine(),
        "rows": [asdict(row) | {"ratios": row.ratios} for row in rows],
        "head_memory_mib": memory,
        "profile_percent": shares,
    }
    (RESULTS / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(rows, RESULTS / "training.png")


if __name__ == "__main__":
    main()
