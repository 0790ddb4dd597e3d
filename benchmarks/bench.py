"""Runs every benchmark of the project, one after the other, and renders the table of results.

    OMP_NUM_THREADS=1 python benchmarks/bench.py [--only NAME ...] [--render] [--vllm PYTHON]

`make bench` is the same. Under 20 minutes on two quiet cores. `--render` only writes the table of
`benchmarks/README.md` anew, from what lies in `benchmarks/results/`. `sampling_vllm`, which is
`sampling` beside vLLM, needs the Python of an environment that has vLLM: see `sampling_vllm.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facts import HERE, RESULTS, facts

README = HERE / "README.md"
Report = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """`headline` puts the newest results into a few words; `writes` is false for one that only
    prints: its lines are kept then. `script` is another's than the one of its name."""

    name: str
    arguments: tuple[str, ...]
    headline: Callable[[Report], str]
    writes: bool = True
    script: str = ""

    @property
    def results(self) -> Path:
        return RESULTS / f"{self.name}.json"


# --- headlines --------------------------------------------------------------------------------


def utilization(report: Report) -> str:
    signs = {True: "reached", False: "missed"}
    return "; ".join(
        f"{one['what']}: {one['measured']:.3g} ({signs[one['met']]}: {one['target']:g})"
        for one in report["targets"]
    )


def training(report: Report) -> str:
    most = max(row["jobs"] for row in report["rows"])
    rows = [row for row in report["rows"] if row["jobs"] == most]
    row = next((row for row in rows if "peft padded" in row["ratios"]), rows[0])
    ratios = ", ".join(f"{k} {v:.2f}" for k, v in row["ratios"].items() if k != "fused")
    return f"{most} jobs, {row['model']}, {row['shape']}: times the fused pass: {ratios}"


def training_server(report: Report) -> str:
    rates = [
        f"{r['clients']} x {r['shape']}: {r['steps_per_second']:.1f} steps/s"
        for r in report["medians"]
    ]
    return ", ".join(rates)


def sampling(report: Report) -> str:
    most = max(row["jobs"] for row in report["table"])
    row = next(row for row in report["table"] if row["jobs"] == most)
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["rates"].items())
    return f"{most} jobs, {row['shape']}: tokens per CPU-second: {rates}"


def sampling_server(report: Report) -> str:
    kinds = ("clients", "singles")
    rates = [f"{kind} {report[kind]['tokens_per_server_cpu_second']:.0f}" for kind in kinds]
    return "tokens per server CPU-second: " + ", ".join(rates)


def api(report: Report) -> str:
    costs = [
        f"{row['encoding']} {row['shape']}: {row['cpu_ms_per_turn']:.2f} ms"
        for row in report["cost"]
    ]
    return "server CPU of a training step: " + ", ".join(costs)


def client(report: Report) -> str:
    """The client's CPU as a part of the SDK's."""
    cpu = {(row["what"], row.get("client")): row.get("client_cpu_ms") for row in report["rows"]}
    parts = [f"{w} {cpu[w, 'openrl'] / cpu[w, 'tinker']:.2f}" for w in ("train", "sample")]
    return "CPU of our client beside the SDK's: " + ", ".join(parts)


def fairness(report: Report) -> str:
    found = [re.search(r"^(.*?) +owners.*Jain +([\d.]+)", line) for line in report["lines"]]
    return "Jain index: " + ", ".join(f"{one[1]} {one[2]}" for one in found if one)


BENCHMARKS = (
    Benchmark("utilization", (), utilization),
    Benchmark("training", ("--quick",), training),
    Benchmark("training_server", (), training_server),
    Benchmark("sampling", ("--jobs", "1", "4", "--rounds", "1"), sampling),
    Benchmark(
        "sampling_vllm",
        ("--jobs", "4", "--rounds", "3", "--without", "continuous"),
        sampling,
        script="sampling",
    ),
    Benchmark("sampling_server", ("--rounds", "3", "--singles", "512"), sampling_server),
    Benchmark("api", ("--seconds", "10"), api),
    Benchmark("client", (), client),
    Benchmark("fairness", ("--seconds", "60", "--owners", "500"), fairness, writes=False),
)


# --- running and rendering --------------------------------------------------------------------


def run(one: Benchmark, vllm: Path | None) -> bool:
    """Whether it went well. The head that it does not write itself is put into its results."""
    arguments = list(one.arguments)
    if one.name.startswith("sampling"):
        arguments += ["--json", str(one.results.relative_to(HERE.parent))]
    if one.name == "sampling_vllm":
        arguments += ["--vllm", str(vllm)]
    command = ["python", f"benchmarks/{one.script or one.name}.py", *arguments]
    print(f"--- {' '.join(command)}", flush=True)
    head, begin = facts(), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command[1:]], cwd=HERE.parent, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        print(line, end="", flush=True)
    if process.wait():
        print(f"!!! {one.name} ended with status {process.returncode}")
        return False
    report = json.loads(one.results.read_text()) if one.writes else {"lines": lines}
    head |= {"command": " ".join(command), "seconds": round(time.monotonic() - begin)}
    machine = report.pop("machine", {}) | head["machine"]
    report = head | report | {"machine": machine}
    one.results.write_text(json.dumps(report, indent=1) + "\n")
    return True


def render() -> None:
    """Between the two marks of the page."""
    begin, end = "<!-- results: made by benchmarks/bench.py -->\n", "<!-- end of results -->"
    page = README.read_text()
    before, rest = page.split(begin)
    rows = ["| benchmark | newest result | date | commit | command | machine |", "|" + "---|" * 6]
    rows += [_row(one) for one in BENCHMARKS]
    README.write_text(before + begin + "\n".join(rows) + "\n" + end + rest.split(end)[1])


def _row(one: Benchmark) -> str:
    if not one.results.exists():
        return f"| `{one.name}` | none yet | | | | |"
    report = json.loads(one.results.read_text())
    machine = report.get("machine", {})
    where = f"{machine['cores']} cores, {machine['cpu']}" if "cores" in machine else "not recorded"
    date = report.get("date", "")[:10] or "not recorded"
    load = report.get("load_at_start")
    words = one.headline(report)
    if load is not None and load > 1.0:
        words += f" (on a busy machine: load {load:.1f})"
    command = f"`{report['command']}`" if "command" in report else "not recorded"
    return f"| `{one.name}` | {words} | {date} | {report.get('commit', '')} | {command} | {where} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [one.name for one in BENCHMARKS]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--render", action="store_true", help="run nothing")
    options = parser.parse_args()
    wanted = [] if options.render else [one for one in BENCHMARKS if one.name in options.only]
    if options.vllm is None:
        wanted = [one for one in wanted if one.name != "sampling_vllm"]
    failed = [one.name for one in wanted if not run(one, options.vllm)]
    render()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
