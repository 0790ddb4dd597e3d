"""A sampler over a tiny model, and a driver that behaves as the scheduler does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.base import (
    AdapterSource,
    DecodePass,
    DecodeReport,
    RowId,
    RowStart,
    WeightsKey,
)
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.checkpoint import read_adapter
from openrl.engines.pytorch.lora import Adapter, fresh_adapter
from openrl.engines.pytorch.sampler import Sampler
from openrl.types import (
    Failed,
    LoraConfig,
    RequestId,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    Stop,
)

EOS = 2
Start = Callable[..., RowStart]


@dataclass
class Drive:
    """Collects what passes report."""

    sampler: Sampler
    ended: dict[RowId, SampledSequence | Failed] = field(default_factory=dict)
    prompts: dict[RequestId, SampleOutput] = field(default_factory=dict)
    steps: int = 4

    def turn(self, **decisions: Any) -> DecodeReport:
        decisions.setdefault("steps", self.steps)
        report = self.sampler.run(DecodePass(WeightsKey("w"), **decisions))
        for row in report.rows:
            if row.ended is not None:
                assert row.row not in self.ended, "a row ends once"
                self.ended[row.row] = row.ended
        self.prompts.update(report.prompts)
        memory = self.sampler.memory
        assert 0 <= memory.allocated <= memory.total
        return report

    def finish(self) -> None:
        for _ in range(2000):
            if not self.sampler.rows:
                return
            self.turn()
        raise AssertionError("the rows never end")

    def all(self, *starts: RowStart) -> dict[RowId, SampledSequence]:
        """Admits everything at once and runs it to the end."""
        self.turn(admit=starts)
        self.finish()
        wanted = [RowId(start.request_id, i) for start in starts for i in start.indexes]
        for row in wanted:
            assert isinstance(self.ended[row], SampledSequence), self.ended[row]
        return {row: self.ended[row] for row in wanted}  # type: ignore[misc]


@pytest.fixture
def drive(base_model: Callable[[str], BaseModel]) -> Callable[..., Drive]:
    """`drive("qwen3", kv_tokens=4096)`: a fresh sampler that holds so many tokens."""

    def make(
        family: str = "qwen3", *, kv_tokens: int = 16384, steps: int = 4, **more: Any
    ) -> Drive:
        base = base_model(family)
        token_bytes = 2 * base.num_layers * base.num_kv_heads * base.head_dim * 4
        reader = partial(read_adapter, linears=base.linears, device=base.device, dtype=base.dtype)
        more.setdefault("detokenizer", None)
        sampler = Sampler(
            base,
            kv_cache_bytes=kv_tokens * token_bytes,
            eos_token_ids=(EOS,),
            read_adapter=reader,
            **more,
        )
        return Drive(sampler, steps=steps)

    return make


@pytest.fixture
def start() -> Start:
    """`start("name", prompt, n=4, max_tokens=8, temperature=…, version=…)`; `asked` are the
    sample's further fields."""

    def make(
        name: str,
        prompt: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = 8,
        version: AdapterSource | None = None,
        stop: Stop = Stop(eos=False),  # noqa: B008 - frozen
        seed: int | None = 1,
        indexes: tuple[int, ...] | None = None,
        asked: Mapping[str, Any] = MappingProxyType({}),
        **params: Any,
    ) -> RowStart:
        sample = Sample(
            np.asarray(prompt, dtype=np.int32),
            SamplingParams(max_tokens=max_tokens, seed=seed, stop=stop, **params),
            num_samples=n,
            **asked,
        )
        chosen = tuple(range(n)) if indexes is None else indexes
        return RowStart(RequestId(name), sample, version, chosen, max_tokens)

    return make


@pytest.fixture
def prompt() -> Callable[[int, int], list[int]]:
    """`prompt(seed, length)`: random tokens without EOS."""

    def make(seed: int, length: int) -> list[int]:
        return np.random.default_rng(seed).integers(3, 101, length).tolist()

    return make


@pytest.fixture
def trained() -> Callable[..., Adapter]:
    """`trained(base, seed, rank)`: an adapter whose B is not zero."""

    def make(base: BaseModel, seed: int, rank: int = 4, **targets: bool) -> Adapter:
        config = LoraConfig(rank=rank, seed=seed, **targets)
        adapter = fresh_adapter(base.linears, config, base.device, base.dtype)
        generator = torch.Generator().manual_seed(seed)
        for factor in adapter.weights.by_linear:
            if factor is not None:
                factor.b_NR.normal_(std=0.05, generator=generator)
        adapter.refresh()
        return adapter

    return make
