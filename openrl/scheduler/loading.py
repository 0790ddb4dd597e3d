"""How far the base models are: what readiness answers and waiting requests are told.

`failure` is the engine's, and everyone's. Weights that could not be loaded beside others are the
matter of their own models alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from openrl.engines.base import BaseModelInfo, LoadProgress, WeightsKey
from openrl.errors import OpenRLError, ServerError

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Of one public name; `fraction` is in [0, 1], `error` is set when the state is failed."""

    name: str
    state: Literal["loading", "ready", "failed"]
    stage: str
    fraction: float
    error: str | None = None


class Loading:
    def __init__(self, on_progress: Callable[[LoadProgress], None] = lambda _: None) -> None:
        self._on_progress = on_progress
        self._progress: dict[WeightsKey, LoadProgress] = {}
        self._missing: dict[WeightsKey, ServerError] = {}
        self.ready = False
        self.failure: OpenRLError | None = None
        self.over = asyncio.Event()  # the engine is ready, or never will be
        self.broken = asyncio.Event()  # `failure` is set

    def progressed(self, progress: LoadProgress) -> None:
        """Called on the engine's thread; single assignments, so that no lock is needed."""
        if progress.error is not None:
            log.error("%s: %s", progress.stage, progress.error)
            error = ServerError(f"its base model could not be loaded: {progress.error}")
            self._missing[progress.weights] = error
        self._progress[progress.weights] = progress
        self._on_progress(progress)

    def succeed(self) -> None:
        self.ready = True
        self.over.set()

    def fail(self, error: OpenRLError) -> None:
        self.failure = error
        self.broken.set()
        self.over.set()

    def failure_of(self, weights: WeightsKey) -> OpenRLError | None:
        """Why nothing runs on these weights, and won't in this process."""
        return self.failure or self._missing.get(weights)

    def status(self, bases: Mapping[str, BaseModelInfo]) -> tuple[ModelStatus, ...]:
        return tuple(self._status(info) for info in bases.values())

    def _status(self, info: BaseModelInfo) -> ModelStatus:
        default = LoadProgress(info.weights, "waiting for the engine", 0.0)
        progress = self._progress.get(info.weights, default)
        if (failure := self.failure_of(info.weights)) is not None:
            error = progress.error or failure.message
            return ModelStatus(info.name, "failed", progress.stage, progress.fraction, error)
        if self.ready:
            return ModelStatus(info.name, "ready", "ready", 1.0)
        return ModelStatus(info.name, "loading", progress.stage, progress.fraction)
