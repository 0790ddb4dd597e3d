"""The torch engine: one trainer and one sampler for each set of base weights.

Driven by one thread. Public names that share a directory share weights.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

import torch
import transformers

from openrl.config import EngineConfig, ModelSource
from openrl.engines.base import (
    BaseModelInfo,
    Capacity,
    Control,
    ControlPass,
    ControlReport,
    CreateAdapter,
    DecodePass,
    DropAdapter,
    DropVersion,
    Executed,
    FinishSnapshots,
    LoadAdapter,
    LoadProgress,
    OptimPass,
    PageOut,
    Pass,
    PinVersion,
    Report,
    RestoreAdapter,
    SaveAdapter,
    SnapshotAdapter,
    SnapshotVersion,
    TrainPass,
    WeightsKey,
)
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.checkpoint import read_adapter
from openrl.engines.pytorch.devices import choose_device, choose_dtype
from openrl.engines.pytorch.heap import keep_freed_memory
from openrl.engines.pytorch.kvcache import BLOCK_TOKENS
from openrl.engines.pytorch.loading import load_base_model, why_not_loaded
from openrl.engines.pytorch.logprobs import chunk_bytes
from openrl.engines.pytorch.model_files import read_info, weights_directory
from openrl.engines.pytorch.numerics import Numerics, examine
from openrl.engines.pytorch.paging import AdapterBudget
from openrl.engines.pytorch.plan import Needs, Plan, free_bytes, make_plan
from openrl.engines.pytorch.sampler import Sampler
from openrl.engines.pytorch.snapshots import files_of_job, files_of_version
from openrl.engines.pytorch.stops import LazyDetokenizer
from openrl.engines.pytorch.trainer import Trainer
from openrl.engines.snapshots import SnapshotWriter
from openrl.errors import OpenRLError, ServerError

log = logging.getLogger("openrl")

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    name: str
    base: BaseModel
    trainer: Trainer
    sampler: Sampler
    numerics: Numerics


class TorchEngine:
    """`openrl.engines.base.Engine` on CPU, CUDA or MPS. `sources` are the models it serves."""

    def __init__(
        self, config: EngineConfig, sources: Sequence[ModelSource], pages: Path | None = None
    ) -> None:
        """`pages` is a directory for adapters and sampler weights that idle; what an earlier
        process left in it is deleted."""
        self._config = config
        self._sources = tuple(sources)
        self._pages = pages
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        self._served: dict[WeightsKey, _Served] = {}
        self._snapshots = SnapshotWriter()

    def describe(self) -> Sequence[BaseModelInfo]:
        return [read_info(source, self._config.max_lora_rank) for source in self._sources]

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        """Raises `UserError` when no model can be served."""
        self._settle_torch()
        if self._pages is not None:
            shutil.rmtree(self._pages, ignore_errors=True)
        infos = self.describe()
        firsts = {
            info.weights: (source, info)
            for source, info in reversed([*zip(self._sources, infos, strict=True)])
        }
        bases = self._load_bases(
            [firsts[key] for key in dict.fromkeys(i.weights for i in infos)], progress
        )
        plan = self._plan(list(bases.values()))
        for weights, base in bases.items():
            self._served[weights] = self._serve(*firsts[weights], base, plan, len(bases))
        return self._capacity()

    def execute(self, work: Pass) -> Executed:
        started = time.perf_counter()
        report = self._report(work)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        return Executed(report, seconds, self._capacity(), self._snapshots.collect())

    def close(self) -> None:
        self._snapshots.finish()
        for served in self._served.values():
            served.trainer.close()
        self._served.clear()

    # --- loading ----------------------------------------------------------------------------

    def _settle_torch(self) -> None:
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        transformers.utils.logging.disable_progress_bar()
        log.info(
            "torch %s on %s, %s, %d threads",
            torch.__version__,
            self.device,
            self.dtype,
            torch.get_num_threads(),
        )

    def _load_bases(
        self,
        models: Sequence[tuple[ModelSource, BaseModelInfo]],
        progress: Callable[[LoadProgress], None],
    ) -> dict[WeightsKey, BaseModel]:
        """Those that can be. Raises what the first one raised when none can."""
        bases: dict[WeightsKey, BaseModel] = {}
        errors: list[OpenRLError] = []
        where = f"on {self.device} in {str(self.dtype).removeprefix('torch.')}"
        for source, info in models:
            progress(LoadProgress(info.weights, f"loading {info.name} {where}", 0.0))
            try:
                directory = weights_directory(source)
                bases[info.weights] = load_base_model(directory, self.device, self.dtype)
            except Exception as error:  # whatever it is, the others are served
                stage = f"{info.name} is not loaded"
                log.warning(stage, exc_info=None if isinstance(error, OpenRLError) else error)
                errors.append(why_not_loaded(error))
                progress(LoadProgress(info.weights, stage, 0.0, errors[-1].message))
            else:
                progress(LoadProgress(info.weights, f"{info.name} is loaded {where}", 1.0))
        if errors and not bases:
            raise errors[0]
        return bases

    def _plan(self, bases: Sequence[BaseModel]) -> Plan:
        config = self._config
        free = free_bytes(self.device)
        plan = make_plan(free, config.adapter_bytes, config.kv_cache_bytes, _needs(bases))
        log.info(
            "memory in GiB: free %s, adapters %s, KV cache %s, activations %s",
            *(
                "unbounded" if size is None else f"{size / _GIB:.1f}"
                for size in (plan.free, plan.adapters, plan.kv_cache, plan.activations)
            ),
        )
        return plan

    def _serve(
        self, source: ModelSource, info: BaseModelInfo, base: BaseModel, plan: Plan, sharing: int
    ) -> _Served:
        pages = self._pages / str(len(self._served)) if self._pages else None
        sampler = Sampler(
            base,
            kv_cache_bytes=plan.kv_cache // sharing,
            eos_token_ids=info.eos_token_ids,
            detokenizer=LazyDetokenizer(str(weights_directory(source))),
            read_adapter=partial(
                read_adapter, linears=base.linears, device=base.device, dtype=base.dtype
            ),
            raw_logprobs=self._config.sampled_logprobs == "raw",
            pages=pages / "versions" if pages else None,
            idle_versions=self._config.idle_versions,
        )
        budget = AdapterBudget(
            plan.adapters_of(sharing),
            self._config.adapter_host_bytes // sharing,
            pages / "adapters" if pages else None,
        )
        trainer = Trainer(base, info.name, budget, plan.kept(_needs([base])[0]))
        numerics = examine(base)
        log.info("%s: %s, %s", info.name, numerics.fingerprint, _exactness(numerics))
        return _Served(info.name, base, trainer, sampler, numerics)

    @property
    def numerics(self) -> Mapping[WeightsKey, Numerics]:
        """What the numbers of each set of weights depend on; known once it is loaded."""
        return {key: served.numerics for key, served in self._served.items()}

    # --- passes -----------------------------------------------------------------------------

    def _report(self, work: Pass) -> Report:
        served = self._served.get(work.weights)
        if served is None:
            raise ServerError(f"weights {work.weights} are not loaded")
        match work:
            case TrainPass():
                return served.trainer.train(work)
            case OptimPass():
                return served.trainer.optimize(work)
            case DecodePass():
                return served.sampler.run(work)
            case ControlPass():
                return self._control(served, work.control)
            case _:
                assert_never(work)

    def _control(self, served: _Served, control: Control) -> ControlReport:
        try:
            return ControlReport(size_bytes=self._obey(served, control) or 0)
        except OpenRLError as error:
            return ControlReport(error)
        except OSError as error:
            return ControlReport(ServerError(f"the checkpoint cannot be written or read: {error}"))

    def _obey(self, served: _Served, control: Control) -> int | None:
        """The size in bytes of a version that was pinned."""
        trainer, sampler = served.trainer, served.sampler
        match control:
            case CreateAdapter():
                trainer.create(control)
            case DropAdapter(model_id):
                trainer.drop(model_id)
            case SaveAdapter():
                trainer.save(control)
            case LoadAdapter():
                trainer.load(control)
            case PinVersion(model_id, version_id):
                return sampler.pin(version_id, trainer.job(model_id).adapter)
            case DropVersion(version_id):
                sampler.drop_version(version_id)
            case SnapshotAdapter(model_id, directory):
                job, fingerprint = trainer.job(model_id), served.numerics.fingerprint
                self._snapshots.write(directory, partial(files_of_job, job, fingerprint))
            case SnapshotVersion(version_id, directory):
                adapter = sampler.versions.read(version_id)
                self._snapshots.write_shared(directory, files_of_version(adapter, served.name))
            case FinishSnapshots():
                self._snapshots.finish()
            case RestoreAdapter():
                trainer.restore(control, served.numerics.fingerprint)
            case PageOut(model_id):
                trainer.page_out(model_id)
            case _:
                assert_never(control)
        return None

    # --- capacity ---------------------------------------------------------------------------

    def _capacity(self) -> Capacity:
        pools = {key: served.sampler.kv_pool for key, served in self._served.items()}
        return Capacity(
            kv_blocks_total=sum(pool.total for pool in pools.values()),
            kv_blocks_free=sum(pool.free for pool in pools.values()),
            block_tokens=BLOCK_TOKENS,
            max_rows=self._config.max_rows,
            slots_total=sum(served.trainer.count for served in self._served.values()),
            slots_used=sum(served.trainer.resident for served in self._served.values()),
            headroom_bytes=free_bytes(self.device) or 0,
            kv_pools=pools,
        )


def _needs(bases: Sequence[BaseModel]) -> list[Needs]:
    return [Needs(b.row_bytes, b.num_layers, chunk_bytes(b.vocab_size)) for b in bases]


def _exactness(numerics: Numerics) -> str:
    if numerics.exact:
        return "jobs in company equal jobs alone to the bit"
    return f"jobs in company differ from jobs alone by up to {numerics.gap:.1e}"
