"""Mixed load for half an hour, with kills, and nothing that grows.

OMP_NUM_THREADS=1 python benchmarks/soak.py [--minutes 30] [--every 120] [--engine fake|torch]

A real server is killed every two minutes in the first half and started again on the same data
while jobs come and go (`soak_load.py`). In the second half it is left alone: a straight line
through what each measure shows then must not rise by more than a tenth of it in that time, and
not by less than what is noise (see `NOISE`). Disk counts over kills, so its line is laid through
the whole run without its first quarter. Errors that a client meets fail the run too. Writes
`results/soak.json` and `.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import matplotlib as mpl
import numpy as np
from soak_node import MODELS

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "soak.json"
EVERY_SECONDS = 2.0
MIB = float(1 << 20)
NOISE = {
    "rss_mib": 8.0,
    "engine_rss_mib": 8.0,
    "fds": 8,
    "tasks": 16,
    "threads": 4,
    "journal_mib": 4.0,
    "snapshots_mib": 4.0,
    "versions_mib": 4.0,
    "checkpoints_mib": 4.0,
}
"""What is measured, and the rise that says nothing."""
ON_DISK = ("journal", "snapshots", "versions", "checkpoints")
REPORTED = ("catalogue_mib", "blocks")
"""Without a bound: the catalogue keeps a row of every session and run."""

Sample = dict[str, float]


@dataclass
class Server:
    data: Path
    engine: str
    port: int
    kills: int = 0
    starts: list[float] = field(default_factory=list)  # seconds until the door was open
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gauges(self) -> Path:
        return self.data.with_suffix(".gauges")

    def start(self) -> None:
        arguments = [str(self.data), str(self.port), self.engine, str(self.gauges)]
        self.gauges.unlink(missing_ok=True)
        with self.data.with_suffix(".log").open("ab") as log:
            node = [sys.executable, str(HERE / "soak_node.py"), *arguments]
            self.process = subprocess.Popen(node, stderr=log)
        began = time.monotonic()
        while not self._open():
            if self.process.poll() is not None or time.monotonic() - began > 60:
                raise SystemExit(f"the server did not start: {self.said()}")
            time.sleep(0.02)
        self.starts.append(time.monotonic() - began)

    def _open(self) -> bool:
        try:
            with urlopen(f"{self.url}/api/v1/healthz", timeout=5):
                return True
        except (URLError, OSError):
            return False

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        if self.process.wait() != -signal.SIGKILL:
            raise SystemExit(f"the server had ended by itself: {self.said()}")
        self.kills += 1

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        if self.process.wait(60) != 0:
            raise SystemExit(f"the server did not end well: {self.said()}")

    def said(self) -> str:
        return self.data.with_suffix(".log").read_text()[-3000:]

    def sample(self) -> Sample | None:
        """None before its first gauges are there."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise SystemExit(f"the server ended by itself: {self.said()}")
        if not self.gauges.exists():
            return None
        pid = self.process.pid
        return {
            **json.loads(self.gauges.read_text()),
            "rss_mib": rss(pid),
            "engine_rss_mib": sum(map(rss, children(pid))),
            "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "catalogue_mib": sum(map(size, self.data.glob("catalogue.sqlite*"))) / MIB,
            **{f"{name}_mib": disk(self.data / name) / MIB for name in ON_DISK},
        }


def rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def children(pid: int) -> list[int]:
    lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(lists).split()]


def disk(directory: Path) -> int:
    """`os.walk` passes over folders that go meanwhile; `rglob` does not."""
    return sum(size(Path(where) / name) for where, _, names in os.walk(directory) for name in names)


def size(path: Path) -> int:
    """0 for what goes meanwhile."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def run(
    server: Server, seconds: float, every: float, load: subprocess.Popen[bytes]
) -> list[Sample]:
    samples: list[Sample] = []
    began = killed = time.monotonic()
    while (at := time.monotonic() - began) < seconds:
        if load.poll() is not None:
            raise SystemExit("the load ended by itself")
        if at < seconds / 2 and time.monotonic() - killed >= every:
            server.kill()
            server.start()
            killed = time.monotonic()
        if (sample := server.sample()) is not None:
            samples.append({"at": at, "kills": server.kills, **sample})
        time.sleep(EVERY_SECONDS)
    return samples


def judged(samples: list[Sample], seconds: float) -> dict[str, dict[str, float | bool]]:
    """By how much each measure rises over the time that is looked at, by a straight line."""
    verdicts: dict[str, dict[str, float | bool]] = {}
    for name, noise in NOISE.items():
        since = 0.25 if name.removesuffix("_mib") in ON_DISK else 0.6
        points = [(s["at"], s[name]) for s in samples if s["at"] >= since * seconds]
        at, values = np.array(points).T
        slope = float(np.polyfit(at, values, 1)[0])
        rise, mean = slope * float(at[-1] - at[0]), float(values.mean())
        grows = rise > max(noise, 0.1 * mean)
        verdicts[name] = {"mean": mean, "rise": rise, "per_hour": slope * 3600, "grows": grows}
    return verdicts


def plot(samples: list[Sample], file: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    names = [*NOISE, *REPORTED]
    figure, axes = pyplot.subplots(4, 3, figsize=(13, 10), sharex=True)
    kills = [b["at"] for a, b in pairwise(samples) if b["kills"] > a["kills"]]
    for axis, name in zip(axes.flat, names, strict=False):
        axis.plot([s["at"] / 60 for s in samples], [s[name] for s in samples], linewidth=1)
        for at in kills:
            axis.axvline(at / 60, color="tab:red", alpha=0.3, linewidth=0.8)
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("minutes; red: SIGKILL")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def soak(root: Path, minutes: float, every: float, engine: str) -> dict[str, object]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    server = Server(root / "data", engine, port)
    server.start()
    out = root / "load.json"
    arguments = [str(HERE / "soak_load.py"), server.url, MODELS[engine], str(out)]
    with (root / "load.log").open("wb") as log:
        load = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    try:
        samples = run(server, minutes * 60, every, load)
        load.communicate(timeout=420)
        server.stop()
    finally:
        for process in (load, server.process):
            if process is not None and process.poll() is None:
                process.kill()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": engine,
        "minutes": minutes,
        "cpus": os.cpu_count(),
        "kills": server.kills,
        "longest_start_seconds": max(server.starts),
        **json.loads(out.read_text()),
        "measures": judged(samples, minutes * 60),
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two kills")
    parser.add_argument("--engine", default="fake", choices=list(MODELS))
    parser.add_argument("--directory", type=Path, help="where data and logs stay; a temporary one")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = given.directory or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        result = soak(root, given.minutes, given.every, given.engine)
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    samples = result.pop("samples")
    assert isinstance(samples, list)
    plot(samples, given.json.with_suffix(".png"))
    print(json.dumps(result, indent=1))
    measures = result["measures"]
    assert isinstance(measures, dict)
    growing = [name for name, verdict in measures.items() if verdict["grows"]]
    if growing or result["errors"]:
        raise SystemExit(f"growing: {growing}; errors: {len(result['errors'])}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
