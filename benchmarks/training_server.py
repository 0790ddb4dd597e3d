"""Training through the real SDK and a real server: what a client's step costs the server.

    OMP_NUM_THREADS=1 python benchmarks/training_server.py [--steps 12]

A step is one `forward_backward` and one `optim_step`, sent together as training loops do, of
a rank-8 adapter on a Qwen3 of 4.2 million parameters (hidden 256, 4 layers, vocabulary 4096, one
math thread). Clients run at once, each in a thread of its own with the unmodified `tinker` SDK;
the server is `openrl serve`, its CPU time that of both its processes by the kernel's account. The
bare loop is peft on transformers in this process, padded, with torch's fused AdamW.
Writes `benchmarks/results/training_server.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import tinker
import torch
from tinker import types
from training_peers import Peft, Shape, job_data, small_qwen3

from openrl.types import Datum

RESULTS = Path(__file__).parent / "results"
MODEL, HIDDEN, VOCABULARY = "benchmark/qwen3-4m", 256, 4096
WARM = 2
ROUNDS = 4


@dataclass(frozen=True)
class Row:
    clients: int
    shape: str
    steps: int
    server_cpu_seconds_per_step: float
    steps_per_second: float


@contextmanager
def serving(directory: Path, data: Path) -> Iterator[tuple[str, int]]:
    """The address and the process id."""
    script = str(Path(sys.executable).with_name("openrl"))
    command = [script, "serve", "--port", "0", "--threads", "1"]
    command += ["--device", "cpu", "--model", f"{MODEL}={directory}", "--data", str(data)]
    process = subprocess.Popen(
        [*command, "--log-format", "json"], stderr=subprocess.STDOUT, stdout=subprocess.PIPE
    )
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    stream = process.stdout
    threading.Thread(
        target=lambda: [lines.put(line.decode()) for line in stream], daemon=True
    ).start()
    try:
        yield _address(lines), process.pid
    finally:
        process.terminate()
        process.wait(60)


def _address(lines: queue.Queue[str]) -> str:
    """The first address that the server's log names."""
    seen = []
    while True:
        seen.append(lines.get(timeout=120))
        words = [word.strip('",') for word in seen[-1].split()]
        if found := [word for word in words if word.startswith("http://")]:
            return found[0]


def cpu_seconds(pid: int) -> float:
    """Of the server and its engine's process, by the kernel's account."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended meanwhile
            continue
        if pid in (int(stat.parent.name), int(fields[1])):
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def sdk_datum(datum: Datum) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
        loss_fn_inputs={
            name: types.TensorData.from_numpy(np.asarray(value))
            for name, value in datum.loss_inputs.items()
        },
    )


class Clients:
    """Training clients that step at the same time, each on its own adapter."""

    def __init__(self, url: str, count: int) -> None:
        self.training = []
        for seed in range(count):
            service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
            self.training.append(
                service.create_lora_training_client(base_model=MODEL, rank=8, seed=seed)
            )

    def run(self, count: int, shape: Shape, steps: int) -> None:
        threads = [
            threading.Thread(target=self._loop, args=(self.training[job], job, shape, steps))
            for job in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _loop(training: tinker.TrainingClient, job: int, shape: Shape, steps: int) -> None:
        data = [sdk_datum(datum) for datum in job_data(job, shape, VOCABULARY)]
        for _ in range(steps):
            gradient = training.forward_backward(data, "cross_entropy")
            step = training.optim_step(types.AdamParams(learning_rate=1e-4))
            assert np.isfinite(gradient.result().metrics["loss:sum"])
            step.result()


def measure(clients: Clients, pid: int, count: int, shape: Shape, steps: int) -> Row:
    clients.run(count, shape, WARM)
    cpu, began = cpu_seconds(pid), time.perf_counter()
    clients.run(count, shape, steps)
    made = count * steps
    spent, took = cpu_seconds(pid) - cpu, time.perf_counter() - began
    return Row(count, str(shape), steps, spent / made, made / took)


def summarised(rows: Sequence[Row]) -> Iterator[Row]:
    """The median of each kind of row."""
    for clients, shape in dict.fromkeys((row.clients, row.shape) for row in rows):
        mine = [row for row in rows if (row.clients, row.shape) == (clients, shape)]
        yield Row(
            clients,
            shape,
            sum(row.steps for row in mine),
            median(row.server_cpu_seconds_per_step for row in mine),
            median(row.steps_per_second for row in mine),
        )


def bare_loop(directory: Path, shape: Shape, steps: int) -> float:
    """CPU seconds of a step of one job."""
    torch.set_num_threads(1)
    peft = Peft(directory, 1)
    trained = [p for p in peft.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    data = [job_data(0, shape, VOCABULARY)]
    began = 0.0
    for step in range(WARM + steps):
        if step == WARM:
            began = time.process_time()
        peft.padded(data, forget=False)
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = small_qwen3(Path(scratch) / "model", HIDDEN, VOCABULARY)
        with serving(directory, Path(scratch) / "data") as (url, pid):
            clients = Clients(url, 4)
            for shape in (Shape(8, 64, 64), Shape(4, 32, 32)):
                # Interleaved, so that a busy machine harms both alike.
                rows += [measure(clients, pid, n, shape, steps) for n in (1, 4) * ROUNDS]
        bare = bare_loop(directory, Shape(8, 64, 64), steps)
    summary = list(summarised(rows))
    print(f"{'clients':>8}{'shape':>8}{'server CPU s / step':>22}{'steps / s':>12}  (medians)")
    for row in summary:
        print(
            f"{row.clients:8}{row.shape:>8}{row.server_cpu_seconds_per_step:22.3f}"
            f"{row.steps_per_second:12.2f}"
        )
    print(f"bare peft loop, 8x64: {bare:.3f} CPU s / step; load {os.getloadavg()}")
    RESULTS.mkdir(exist_ok=True)
    report = {
        "load": os.getloadavg(),
        "medians": [asdict(row) for row in summary],
        "rows": [asdict(row) for row in rows],
        "bare_peft_loop_8x64_cpu_seconds": bare,
    }
    (RESULTS / "training_server.json").write_text(json.dumps(report, indent=1) + "\n")
    os._exit(0)  # the SDK's threads have no end


if __name__ == "__main__":
    main()
