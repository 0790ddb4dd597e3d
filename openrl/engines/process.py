"""An engine in a process of its own, so that its Python never keeps the event loop waiting.

`ProcessEngine` is an `Engine` whose calls travel over a pipe to `engines.worker`. The worker
ends with this process, ignores the signals that end it, and when it dies itself the call that
finds out raises `EngineDied`.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, cast

from openrl.engines import frames
from openrl.engines.base import BaseModelInfo, Capacity, Executed, LoadProgress, Pass
from openrl.engines.frames import Call, Hello, Raised
from openrl.errors import EngineDied

CLOSE_SECONDS = 5.0


class ProcessEngine:
    def __init__(self, engine: str, *arguments: object) -> None:
        """`engine` is "module:class", made in the child with `arguments`, which are values that
        `frames` knows. The process starts with the first call."""
        self._hello = Hello(engine, arguments, logging.getLogger("openrl").getEffectiveLevel())
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    def describe(self) -> Sequence[BaseModelInfo]:
        return cast(Sequence[BaseModelInfo], self._call(Call("describe")))

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        return cast(Capacity, self._call(Call("load"), progress))

    def execute(self, work: Pass) -> Executed:
        return cast(Executed, self._call(Call("execute", work)))

    def close(self) -> None:
        """Also when it has died already, or never lived, and more than once."""
        if self._child is None:
            return
        try:
            self._call(Call("close"))
            self._child.wait(CLOSE_SECONDS)
        except (EngineDied, subprocess.TimeoutExpired):
            self._child.kill()
        self._close_pipes()
        self._child = None

    # --- the child ---

    def _call(
        self, call: Call, progress: Callable[[LoadProgress], None] = lambda _: None
    ) -> object:
        """Raises what the engine raised, and `EngineDied` when the process is no more."""
        try:
            if self._child is None:
                self._child = self._start()
                frames.send(self._orders, self._hello)
            frames.send(self._orders, call)
            while isinstance(answer := frames.receive(self._answers), LoadProgress):
                progress(answer)
        except (EOFError, OSError) as error:
            raise EngineDied(self._how_it_ended()) from error
        if isinstance(answer, Raised):
            raise answer.error
        return answer.value

    def _start(self) -> subprocess.Popen[bytes]:
        """A process group of its own keeps the terminal's Ctrl-C from it. A session of its own
        would too, and give it as much of a busy machine as all the rest of the server has
        (autogroups)."""
        return subprocess.Popen(
            [sys.executable, "-m", "openrl.engines.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )

    @property
    def _orders(self) -> BinaryIO:
        return cast(BinaryIO, self._pipe("stdin"))

    @property
    def _answers(self) -> BinaryIO:
        return cast(BinaryIO, self._pipe("stdout"))

    def _pipe(self, name: str) -> Any:
        return getattr(self._child, name)

    def _how_it_ended(self) -> str:
        if self._child is None:
            return "the engine's process could not be started"
        try:
            code = self._child.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return "the engine's process closed its pipe"
        if code >= 0:
            return f"the engine's process ended with status {code}: its log says why"
        name = signal.Signals(-code).name
        hint = ": was memory short?" if name == "SIGKILL" else ""
        return f"the engine's process was ended by {name}{hint}"

    def _close_pipes(self) -> None:
        for pipe in (self._orders, self._answers):
            with suppress(OSError):  # what it still held is for nobody
                pipe.close()
