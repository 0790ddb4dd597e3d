"""A deterministic engine without files or accelerator, for tests, benchmarks and trying out.

It honours all of `engines.base`: atoms and scratches, versions, preemption, checkpoints on disk.
What it computes is a real, tiny model (`fake_model`); what it costs is made up, `token_seconds`
for each token. Token ids are code points, for stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from openrl.engines.base import (
    AdapterSource,
    AtomPiece,
    BaseModelInfo,
    Capacity,
    ControlPass,
    ControlReport,
    CreateAdapter,
    DecodePass,
    DecodeReport,
    DropAdapter,
    DropVersion,
    Executed,
    FinishSnapshots,
    LoadAdapter,
    LoadProgress,
    OptimPass,
    OptimPiece,
    OptimReport,
    PageOut,
    Pass,
    PinVersion,
    Report,
    RestoreAdapter,
    RowId,
    RowReport,
    RowStart,
    SaveAdapter,
    SnapshotAdapter,
    SnapshotVersion,
    TrainPass,
    TrainReport,
    WeightsKey,
)
from openrl.engines.fake_model import F64, FakeAdapter, datum_loss, read_bias, write_bias
from openrl.engines.fake_rows import Row, prompt_output
from openrl.engines.losses import LOSSES
from openrl.engines.snapshots import SnapshotWriter, check
from openrl.errors import Gone, InvalidDatum, NotFound, OpenRLError, ServerError, UserError
from openrl.types import (
    Array,
    Failed,
    ForwardBackwardOutput,
    ModelId,
    OptimStepDone,
    RequestId,
    SampleOutput,
    VersionId,
)


class FakeEngine:
    def __init__(
        self,
        names: Sequence[str],
        *,
        vocab_size: int = 512,
        context_length: int = 4096,
        kv_blocks: int = 4096,
        block_tokens: int = 16,
        max_rows: int = 256,
        token_seconds: float = 1e-5,
        sleep: Callable[[float], None] | None = None,
        before: Callable[[Pass], None] | None = None,
        unloadable: Mapping[str, str] | None = None,
    ) -> None:
        """`sleep` is called with each pass's cost; `before` with each pass, on the engine's
        thread: a test may wait or raise there. `unloadable` names base models, and says why."""
        self._names = tuple(names)
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._kv_blocks = kv_blocks
        self._block_tokens = block_tokens
        self._max_rows = max_rows
        self._token_seconds = token_seconds
        self._sleep = sleep
        self._before = before
        self._unloadable = unloadable or {}
        self._eos = (vocab_size - 1,)
        self._adapters: dict[ModelId, FakeAdapter] = {}
        self._versions: dict[VersionId, F64] = {}
        self._rows: dict[RowId, Row] = {}
        self._snapshots = SnapshotWriter()

    def describe(self) -> Sequence[BaseModelInfo]:
        return [
            BaseModelInfo(
                name=name,
                weights=WeightsKey(f"fake:{name}"),
                context_length=self._context_length,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos,
                tokenizer_id=name,
                max_lora_rank=256,
                architecture="fake",
            )
            for name in self._names
        ]

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        for info in self.describe():
            error = self._unloadable.get(info.name)
            progress(LoadProgress(info.weights, "making it up", 1.0, error))
        if set(self._names) <= self._unloadable.keys():
            raise UserError(f"nothing can be loaded: {self._unloadable}")
        return self._capacity()

    def close(self) -> None:
        self._snapshots.finish()
        self._rows.clear()

    def execute(self, work: Pass) -> Executed:
        if self._before is not None:
            self._before(work)
        report, tokens = self._report(work)
        seconds = self._token_seconds * max(1, tokens)
        if self._sleep is not None:
            self._sleep(seconds)
        return Executed(report, seconds, self._capacity(), self._snapshots.collect())

    def _report(self, work: Pass) -> tuple[Report, int]:
        """With the number of tokens that were computed."""
        match work:
            case TrainPass(pieces=pieces):
                report = TrainReport(tuple(map(self._atom, pieces)))
                return report, sum(len(d.tokens) for piece in pieces for d in piece.data)
            case OptimPass(pieces=steps):
                return OptimReport(tuple(map(self._step, steps))), len(steps)
            case ControlPass():
                return self._control(work), 1
            case DecodePass():
                return self._decode(work)

    def _capacity(self) -> Capacity:
        used = sum(self._blocks(row) for row in self._rows.values() if not row.preempted)
        return Capacity(
            kv_blocks_total=self._kv_blocks,
            kv_blocks_free=self._kv_blocks - used,
            block_tokens=self._block_tokens,
            max_rows=self._max_rows,
            slots_total=len(self._adapters),
            slots_used=len(self._adapters),
            headroom_bytes=1 << 30,
        )

    def _blocks(self, row: Row) -> int:
        return -(-row.length() // self._block_tokens)

    # --- training ---

    def _atom(self, piece: AtomPiece) -> ForwardBackwardOutput | Failed:
        try:
            adapter = self._adapter(piece.model_id)
            begun = adapter.take_scratch(piece)
            output, grad_V = self._forward_backward(piece, adapter)
        except OpenRLError as error:
            return Failed(error)
        if not piece.forward_only and begun is not None:
            adapter.add(piece, begun + grad_V)
        return output

    def _forward_backward(
        self, piece: AtomPiece, adapter: FakeAdapter
    ) -> tuple[ForwardBackwardOutput, F64]:
        config = LOSSES[piece.loss_fn].configured(piece.loss_fn_config)
        outputs: list[Mapping[str, Array]] = []
        grad_V, total = np.zeros(self._vocab_size), 0.0
        for index, datum in enumerate(piece.data, start=piece.start):
            loss = datum_loss(datum, piece.loss_fn, config, adapter.bias_V)
            with np.errstate(over="ignore"):  # answers are float32: refused when not finite there
                terms = loss.terms.astype(np.float32)
            if not (np.isfinite(terms).all() and np.isfinite(loss.grad_V).all()):
                raise InvalidDatum(index, piece.loss_fn, "its loss is not finite")
            grad_V, total = grad_V + loss.grad_V, total + float(loss.terms.sum())
            output = {"logprobs": loss.logprobs.astype(np.float32)}
            if piece.loss_fn == "cross_entropy":
                output["elementwise_loss"] = terms
            outputs.append(output)
        tokens = sum(len(datum.tokens) for datum in piece.data)
        metrics = {"loss:sum": total, "num_tokens:sum": float(tokens)}
        return ForwardBackwardOutput(tuple(outputs), metrics), grad_V

    def _step(self, piece: OptimPiece) -> OptimStepDone | Failed:
        try:
            adapter = self._adapter(piece.model_id)
            if adapter.grad_V is None:
                return OptimStepDone({"skipped_no_gradients": 1.0}, adapter.version)
            norm = adapter.step(piece.adam)
        except OpenRLError as error:
            return Failed(error)
        return OptimStepDone({"grad_norm": norm}, adapter.version)

    def _adapter(self, model_id: ModelId) -> FakeAdapter:
        if model_id not in self._adapters:
            raise NotFound(f"model {model_id!r} is not in the engine")
        return self._adapters[model_id]

    # --- adapters and versions ---

    def _control(self, work: ControlPass) -> ControlReport:
        try:
            self._obey(work)
        except OpenRLError as error:
            return ControlReport(error)
        except OSError as error:
            return ControlReport(ServerError(f"{type(error).__name__}: {error}"))
        return ControlReport()

    def _obey(self, work: ControlPass) -> None:
        match work.control:
            case CreateAdapter(model_id=model, lora=lora, source=source, with_optimizer=optimizer):
                fresh = FakeAdapter.fresh(lora.rank, self._vocab_size)
                self._adapters[model] = fresh.loaded(source, optimizer) if source else fresh
            case LoadAdapter(model_id=model, source=source, with_optimizer=optimizer):
                self._adapters[model] = self._adapter(model).loaded(source, optimizer)
            case SaveAdapter(model_id=model, directory=directory, with_optimizer=optimizer):
                self._adapter(model).save(directory, optimizer)
            case DropAdapter(model_id=model):
                self._adapters.pop(model, None)
            case PinVersion(model_id=model, version_id=version):
                self._versions[version] = self._adapter(model).bias_V
            case DropVersion(version_id=version):
                self._versions.pop(version, None)
            case RestoreAdapter(model_id=model, lora=lora, directory=directory):
                check(directory)
                self._adapters[model] = FakeAdapter.restored(lora.rank, directory)
            case SnapshotAdapter(model_id=model, directory=directory):
                self._snapshots.write(directory, self._adapter(model).snapshot)
            case SnapshotVersion(version_id=version, directory=directory):
                bias_V = self._bias_of(AdapterSource(version))
                self._snapshots.write_shared(directory, partial(write_bias, bias_V))
            case FinishSnapshots():
                self._snapshots.finish()
            case PageOut():
                pass  # there is nothing to save here

    def _bias_of(self, adapter: AdapterSource | None) -> F64:
        if adapter is None:
            return np.zeros(self._vocab_size)
        if adapter.version_id not in self._versions:
            if adapter.path is None or not adapter.path.is_dir():
                raise Gone(f"the weights of {adapter.version_id!r} are not there any more")
            self._versions[adapter.version_id] = read_bias(adapter.path)
        return self._versions[adapter.version_id]

    # --- sampling ---

    def _decode(self, work: DecodePass) -> tuple[DecodeReport, int]:
        for row_id in work.drop:
            self._rows.pop(row_id, None)
        for row_id in work.preempt:
            self._rows[row_id].preempted = True
        for row_id in work.resume:
            self._rows[row_id].preempted = False
        prompts: dict[RequestId, SampleOutput] = {}
        failed = [report for start in work.admit for report in self._admit(start, prompts)]
        prefilled = sum(len(start.sample.prompt) for start in work.admit)
        running = [(i, row) for i, row in self._rows.items() if not row.preempted]
        reports = [self._advance(row_id, row, work.steps) for row_id, row in running]
        made = sum(report.new_tokens for report in reports)
        return DecodeReport((*failed, *reports), prompts), prefilled + made

    def _admit(
        self, start: RowStart, prompts: dict[RequestId, SampleOutput]
    ) -> tuple[RowReport, ...]:
        """Reports of the rows that cannot start."""
        rows = [RowId(start.request_id, index) for index in start.indexes]
        try:
            bias_V = self._bias_of(start.adapter)
        except OpenRLError as error:
            return tuple(RowReport(row, 0, 0, Failed(error)) for row in rows)
        seed = (start.sample.params.seed or 0) % 2**64
        for row in rows:
            self._rows[row] = Row(start, bias_V, np.random.default_rng([seed, row.sample]))
        if 0 in start.indexes:
            prompts[start.request_id] = prompt_output(start, bias_V)
        return ()

    def _advance(self, row_id: RowId, row: Row, steps: int) -> RowReport:
        before = len(row.tokens)
        for _ in range(steps):
            row.grow()
            if reason := row.ended(self._eos):
                del self._rows[row_id]
                return RowReport(row_id, len(row.tokens) - before, 0, row.sequence(reason))
        return RowReport(row_id, len(row.tokens) - before, self._blocks(row))
