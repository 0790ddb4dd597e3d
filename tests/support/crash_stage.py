"""Servers that are killed and started again, and the loop that goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
from safetensors.numpy import load_file

LOOP = Path(__file__).parents[1] / "crash" / "loop.py"
SERVER = Path(__file__).with_name("crash_server.py")
ALARMS = (
    "could not be written",
    "could not be recovered",
    "does not count",
    "came out otherwise",
    "the journal has lost",
    "Traceback",
)
"""What no server says in its log, whenever it is killed."""
MODELS = {"fake": "fake/tiny", "torch": "openrl/sql-demo"}


@dataclass(frozen=True)
class Kill:
    """At the `count`-th time that `point` is reached; or from outside, after `seconds`."""

    point: str = "never"
    count: int = 0
    seconds: float | None = None


@dataclass
class Stage:
    """One data directory and one address; servers come and go."""

    data: Path
    engine: str = "fake"
    port: int = field(default_factory=lambda: free_port())
    starts: list[float] = field(default_factory=list)  # seconds until the door was open
    deaths: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.data.with_suffix(".log")

    def start(self, kill: Kill) -> subprocess.Popen[bytes]:
        arguments = [str(self.data), str(self.port), self.engine, kill.point, str(kill.count)]
        with self.log.open("ab") as log:
            server = subprocess.Popen([sys.executable, str(SERVER), *arguments], stderr=log)
        self._wait_for_the_door(server)
        return server

    def _wait_for_the_door(self, server: subprocess.Popen[bytes]) -> None:
        """Or for its end: some points are reached before the door opens."""
        began = time.monotonic()
        while server.poll() is None:
            try:
                with urlopen(f"{self.url}/api/v1/healthz", timeout=1):
                    self.starts.append(time.monotonic() - began)
                    return
            except (URLError, OSError):
                assert time.monotonic() - began < 30, self.log.read_text()[-4000:]
                time.sleep(0.01)

    def undisturbed(self, steps: int, seconds: float) -> dict[str, Any]:
        """What the loop comes to when nothing happens."""
        out = self.data.with_suffix(".json")
        server = self.start(Kill())
        loop = self._loop(steps, out, jobs=1)
        try:
            assert loop.wait(seconds) == 0, self._why(loop)
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0, self.log.read_text()[-4000:]
            (only,) = json.loads(out.read_text())
            return dict(only)
        finally:
            loop.kill()
            server.kill()

    def survive(
        self, kills: Iterable[Kill], steps: int, seconds: float, jobs: int = 2
    ) -> list[dict[str, Any]]:
        """What the loops came to while servers were killed, one after another. The last one is
        left alone. Points that the loops do not reach any more are not counted."""
        out = self.data.with_suffix(".json")
        deadline = time.monotonic() + seconds
        server = self.start(Kill())
        loop = self._loop(steps, out, jobs)
        try:
            for kill in (*kills, Kill()):
                end(server)
                self.deaths += 1
                server = self.start(kill)
                self._wait(loop, server, kill, deadline)
                if loop.poll() is not None:
                    break
            assert loop.wait(max(1.0, deadline - time.monotonic())) == 0, self._why(loop)
            said = self.log.read_text()
            assert [words for words in ALARMS if words in said] == [], said[-8000:]
            return list(json.loads(out.read_text()))
        finally:
            loop.kill()
            end(server)

    def _wait(
        self,
        loop: subprocess.Popen[str],
        server: subprocess.Popen[bytes],
        kill: Kill,
        deadline: float,
    ) -> None:
        until = deadline if kill.seconds is None else time.monotonic() + kill.seconds
        while loop.poll() is None and server.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert server.poll() in (None, -signal.SIGKILL), self._why(loop)
        assert time.monotonic() < deadline, f"{kill}: {self._why(loop)}"

    def _loop(self, steps: int, out: Path, jobs: int) -> subprocess.Popen[str]:
        arguments = [str(LOOP), self.url, MODELS[self.engine], str(steps), str(out), str(jobs)]
        with self.data.with_suffix(".loop").open("w") as log:
            return subprocess.Popen([sys.executable, *arguments], stderr=log, stdout=log, text=True)

    def _why(self, loop: subprocess.Popen[str]) -> str:
        said = self.data.with_suffix(".loop").read_text()
        return f"the loop: {said[-3000:]}\nthe server: {self.log.read_text()[-3000:]}"

    def weights(self, result: dict[str, Any]) -> list[dict[str, np.ndarray]]:
        """Of each checkpoint that was saved, optimizer and all."""
        return [self._read(path) for path in result["paths"]]

    def _read(self, path: str) -> dict[str, np.ndarray]:
        model_id, kind, name = path.removeprefix("tinker://").split("/")
        (directory,) = (self.data / "checkpoints" / model_id / kind / name).iterdir()
        tensors = {}
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= {f"{file.name}:{k}": v for k, v in load_file(file).items()}
        return tensors


def end(server: subprocess.Popen[bytes]) -> None:
    """As nobody would wish for."""
    if server.poll() is None:
        os.kill(server.pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL, "it ended otherwise than by a kill"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def equal(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def compare(calm: dict[str, Any], storm: dict[str, Any]) -> None:
    """Every number that a user sees. Paths have the session's id in them."""
    for name in ("tokens", "losses", "norms"):
        assert storm[name] == calm[name], name
    assert len(storm["paths"]) == len(calm["paths"])


def at_random(seed: int, count: int, longest: float) -> list[Kill]:
    draw = random.Random(seed)
    return [Kill(seconds=draw.uniform(0.05, longest)) for _ in range(count)]
