"""Where recipes run: an environment of their own, a hub of toy data, and this checkout's server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OLDER, NEWER = "0.5.8", "0.6.1"
TORCH = "torch==2.13.0"
SDK = "tinker==0.38.0"
OTHERS = ("textarena==0.7.4", "marimo==0.25.2", "matplotlib==3.11.2")  # games; tutorials
KEY = "tml-local-cookbook"
SECONDS = 600.0
"""For one recipe."""


class Missing(Exception):
    """A sign that did not come."""


def expect(holds: object, said: str) -> None:
    if not holds:
        raise Missing(said)


# --- what is made once ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """A directory with everything that is made once and kept."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def hub(self) -> Path:
        return self.root / "hub"

    @property
    def newer(self) -> Path:
        return self.root / NEWER

    @property
    def tutorials(self) -> Path:
        return self.root / "sdist" / f"tinker_cookbook-{NEWER}" / "tutorials"

    def model_names(self) -> list[str]:
        """All are one model in the hub."""
        links = [path for path in self.hub.glob("*/*") if path.is_symlink()]
        return sorted(str(path.relative_to(self.hub)) for path in links)

    def make(self, torch: str) -> None:
        """Raises `CalledProcessError` with the words of pip on the screen. pip resolves the older
        cookbook: the newer one wants a package that isn't there, and does without it."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not (self.root / ".installed").exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.root / "venv")], check=True)
            self._pip("install", *torch.split())
            self._pip("install", SDK, f"tinker-cookbook[math-rl]=={OLDER}", *OTHERS)
            (self.root / ".installed").touch()
        if not self.newer.is_dir():
            wanted = ["--no-deps", f"tinker-cookbook=={NEWER}"]
            self._pip("install", "--target", str(self.newer), *wanted)
        if not self.tutorials.is_dir():
            self._unpack_tutorials()
        if not (self.hub / "tiny" / "config.json").exists():
            maker = [str(self.python), str(HERE / "hub.py"), str(self.hub)]
            subprocess.run(maker, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def _pip(self, *arguments: str) -> None:
        subprocess.run([str(self.python), "-m", "pip", "--quiet", *arguments], check=True)

    def _unpack_tutorials(self) -> None:
        """They are in the source distribution alone."""
        directory = self.root / "sdist"
        source = ["--no-deps", "--no-binary", ":all:", f"tinker-cookbook=={NEWER}"]
        self._pip("download", "--dest", str(directory), *source)
        for file in directory.glob("*.tar.gz"):
            with tarfile.open(file) as tar:
                tar.extractall(directory, filter="data")


# --- the server -----------------------------------------------------------------------------------


@contextmanager
def serving(models: Mapping[str, Path], data: Path, log: Path) -> Iterator[str]:
    """This checkout's server in a process of its own, with many names for one directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = [word for name, path in models.items() for word in ("--model", f"{name}={path}")]
    command = [sys.executable, "-c", "from openrl.cli import main; main()", "serve", *named]
    with log.open("w") as said:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--data", str(data)],
            stdout=said, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_open(url, server, log)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _wait_until_open(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server does not answer: see {log}")


# --- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a recipe left behind."""

    directory: Path
    said: str

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of its metrics, by step; where a step was done again, the later one."""
        return list({row.get("step", i): row for i, row in enumerate(self._lines())}.values())

    def _lines(self) -> Iterator[dict[str, Any]]:
        file = self.directory / "metrics.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            yield json.loads(line)

    def column(self, key: str) -> list[float]:
        """Raises `Missing`."""
        found = [row[key] for row in self.rows if key in row]
        expect(found, f"no {key} among the metrics")
        return found

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        file = self.directory / "checkpoints.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]


@dataclass(frozen=True)
class Bench:
    """One version of the cookbook against one server. `runs` holds what recipes write."""

    cache: Cache
    version: str
    url: str
    runs: Path

    def environment(self) -> dict[str, str]:
        path = {"PYTHONPATH": str(self.cache.newer)} if self.version == NEWER else {}
        return path | {
            "PATH": os.environ["PATH"],
            "HOME": str(self.runs / "home"),
            "TINKER_COOKBOOK_RUNS_DIR": str(self.runs),
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": KEY,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def recipe(self, name: str, module: str, *arguments: str) -> Run:
        directory = self.runs / name
        command = ["-m", f"tinker_cookbook.recipes.{module}", *arguments, f"log_path={directory}"]
        return self.python(name, *command)

    def python(self, name: str, *command: str) -> Run:
        """Runs it to its end. Raises `Missing` with its last line when it fails."""
        return self._ended(name, self._started(name, command))

    def killed(self, name: str, module: str, *arguments: str, when: Callable[[Run], bool]) -> Run:
        """Ends a recipe by SIGKILL as soon as what it has written is `when`. Raises `Missing` when
        it was done before."""
        directory = self.runs / name
        command = ["-m", f"tinker_cookbook.recipes.{module}", *arguments, f"log_path={directory}"]
        process = self._started(name, command)
        while process.poll() is None:
            if when(Run(directory, "")):
                process.send_signal(signal.SIGKILL)
                process.wait()
                return Run(directory, "")
            time.sleep(0.002)
        raise Missing("it ended before it could be killed")

    def _started(self, name: str, command: tuple[str, ...] | list[str]) -> subprocess.Popen[bytes]:
        (self.runs / "home").mkdir(parents=True, exist_ok=True)
        with self._log(name).open("w") as said:
            return subprocess.Popen(
                [str(self.cache.python), *command],
                cwd=self.cache.hub, env=self.environment(), stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _ended(self, name: str, process: subprocess.Popen[bytes]) -> Run:
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Missing(f"not done after {SECONDS:.0f} s: see {self._log(name)}") from None
        said = self._log(name).read_text(errors="replace")
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        expect(code == 0, f"{last[:200]} (see {self._log(name)})")
        return Run(self.runs / name, said)

    def _log(self, name: str) -> Path:
        return self.runs / f"{name}.log"
