"""The servers that are measured, and what can be read of them from outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utilization_timeline import Pass, pass_of

ADMIN = "tml-administrator-of-a-benchmark"
PAGE = 1000


@contextmanager
def serving(data: Path, sharing: str, *arguments: str) -> Iterator[str]:
    """`openrl serve` with that `scheduler.sharing`; gives its address."""
    command = [sys.executable, "-c", "from openrl.cli import main; main()", "serve"]
    command += ["--port", "0", "--data", str(data), "--log-format", "json", *arguments]
    ours = {"OPENRL_SCHEDULER__SHARING": sharing, "OPENRL_SERVER__ADMIN_KEY": ADMIN}
    log = data / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=os.environ | ours)
    try:
        yield _address(process, log)
    except BaseException as error:
        (*_, last) = ("", *log.read_text().splitlines())
        error.add_note(f"the {sharing} server's log ends: {last[-1000:]}")
        raise
    finally:
        process.terminate()
        process.wait(60)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The first address that the server's log names."""
    while process.poll() is None:
        if found := re.search(r"http://[0-9.]+:\d+", log.read_text()):
            return found[0]
        time.sleep(0.05)
    raise RuntimeError("the server ended")


@dataclass
class Timeline:
    """The passes of a server that tells them, read on from the last one seen. `offset` is its
    clock less this process's."""

    url: str
    key: str
    offset: float = 0.0
    _seen: int = 0

    def is_told(self) -> bool:
        try:
            before = time.monotonic()
            clock = self._ask()["clock"]
        except (urllib.error.URLError, KeyError, ValueError):
            return False
        self.offset = clock - (before + time.monotonic()) / 2
        return True

    def counters(self) -> dict[str, Any]:
        return self._ask(limit=1)["engine"]

    def read(self) -> list[Pass]:
        """What has ended since the last call, on this process's clock. The server keeps 4,096."""
        found: list[dict[str, Any]] = []
        while page := self._ask(after=self._seen, limit=PAGE)["timeline"]:
            found += page
            self._seen = page[-1]["pass_id"]
        for one in found:
            one["start"] -= self.offset
            one["end"] -= self.offset
        return [pass_of(one) for one in found]

    def _ask(self, **query: int) -> dict[str, Any]:
        words = "&".join(f"{name}={value}" for name, value in query.items())
        request = urllib.request.Request(
            f"{self.url}/api/v1/openrl/statistics?{words}",
            headers={"X-API-Key": self.key, "Accept": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


NVML = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
GPU = {
    "nvml": ["nvidia-smi", *NVML],
    "sm_active": ["dcgmi", "dmon", "-e", "1002", "-d", "200"],
}
"""In percent and as a part of 1: NVML's "a kernel ran", and DCGM's active multiprocessors."""


@dataclass
class Gpu:
    """What NVIDIA's tools say, where there are any, sample by sample. All GPUs together."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Gpu:
        for name, command in GPU.items():
            if shutil.which(command[0]):
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                self._running.append(process)
                self.samples[name] = []
                threading.Thread(target=self._follow, args=(name, process), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
            process.wait(10)

    def _follow(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word = (line.split() or [""])[-1]
            if word.replace(".", "", 1).isdecimal():
                value = float(word) / (100.0 if name == "nvml" else 1.0)
                self.samples[name].append((time.monotonic(), value))

    def means(self, begin: float, end: float) -> dict[str, float]:
        """Of each figure in that stretch of time, from 0 to 1."""
        found = {}
        for name, samples in self.samples.items():
            inside = [value for when, value in samples if begin <= when < end]
            if inside:
                found[name] = sum(inside) / len(inside)
        return found
