"""The torch engine before torch is there.

Importing torch and transformers takes seconds, and the door opens before that: `describe` reads
configuration files alone, `load` imports, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from openrl.config import EngineConfig, ModelSource
from openrl.engines.base import BaseModelInfo, Capacity, Engine, Executed, LoadProgress, Pass
from openrl.engines.pytorch.model_files import read_info


class DeferredTorchEngine:
    """`openrl.engines.base.Engine`."""

    def __init__(
        self, config: EngineConfig, sources: Sequence[ModelSource], pages: Path | None = None
    ) -> None:
        """`pages` as in `TorchEngine`."""
        self._config = config
        self._sources = tuple(sources)
        self._pages = pages
        self._engine: Engine | None = None

    def describe(self) -> Sequence[BaseModelInfo]:
        return [read_info(source, self._config.max_lora_rank) for source in self._sources]

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        for info in self.describe():
            progress(LoadProgress(info.weights, "starting torch", 0.0))
        implementation = import_module("openrl.engines.pytorch.engine")
        engine: Engine = implementation.TorchEngine(self._config, self._sources, self._pages)
        self._engine = engine
        return engine.load(progress)

    def execute(self, work: Pass) -> Executed:
        assert self._engine is not None, "load comes first"
        return self._engine.execute(work)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
