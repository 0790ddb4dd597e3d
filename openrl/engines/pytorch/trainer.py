"""All jobs over one set of base weights: their passes, their steps, their coming and going."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from openrl.engines.base import (
    AtomPiece,
    CreateAdapter,
    LoadAdapter,
    OptimPass,
    OptimPiece,
    OptimReport,
    RestoreAdapter,
    SaveAdapter,
    TrainPass,
    TrainReport,
)
from openrl.engines.pytorch import checkpoint
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.datums import (
    atom_inputs,
)
from openrl.engines.pytorch.full import FullWeights, Skeleton, copy_of_base, layout_of
from openrl.engines.pytorch.full_files import read_weights, write_weights
from openrl.engines.pytorch.job import Job
from openrl.engines.pytorch.lora import Adapter, check_config, fresh_adapter
from openrl.engines.pytorch.optim import Done, Step, step_all
from openrl.engines.pytorch.paging import UNBOUNDED, AdapterBudget, Jobs, job_bytes
from openrl.engines.pytorch.snapshots import restored_job
from openrl.engines.pytorch.train_run import Atom, TrainRun, runs_of
from openrl.errors import (
    Diverged,
    NotFound,
    OpenRLError,
    ServerError,
    UserError,
    blamed_on_engine,
)
from openrl.types import Failed, LoraConfig, ModelId, OptimStepDone

log = logging.getLogger("openrl")


class Trainer:
    """All jobs over one base model. `name` is the base model's public name."""

    def __init__(
        self,
        base: BaseModel,
        name: str,
        budget: AdapterBudget = UNBOUNDED,
        activation_bytes: int | None = None,
    ) -> None:
        """`activation_bytes` is what a run may keep for its backward pass; a run that needs more
        computes its layers twice. None: no bound."""
        self._base = base
        self._name = name
        self._jobs = Jobs(budget, base.device, base.dtype)
        self._activation_bytes = activation_bytes
        self._slots = 0
        self._skeleton = Skeleton(base)

    @property
    def count(self) -> int:
        return len(self._jobs)

    @property
    def resident(self) -> int:
        """Jobs in the device's memory."""
        return self._jobs.resident

    def job(self, model_id: ModelId) -> Job:
        """In the device's memory, until other work needs the room."""
        self._seat([model_id])
        return self._seated(model_id)

    def _seated(self, model_id: ModelId) -> Job:
        if model_id not in self._jobs:
            raise NotFound(f"model {model_id} has no weights in this engine")
        return self._jobs.get(model_id)

    def _size(self, model_id: ModelId) -> int:
        return self._jobs.bytes_of(model_id)

    def close(self) -> None:
        self._jobs.close()

    # --- forward and backward ---------------------------------------------------------------

    def train(self, work: TrainPass) -> TrainReport:
        """Raises only before anything is booked: each model's part is run alone then."""
        run = TrainRun(self._base, self._activation_bytes, self._skeleton)
        try:
            for places in self._seatings([piece.model_id for piece in work.pieces]):
                self._train([(place, work.pieces[place]) for place in places], run)
        except Exception as error:
            if not run.outcomes:
                raise
            log.exception("a pass of training was cut short")
            for place in set(range(len(work.pieces))) - run.outcomes.keys():
                run.fail(place, work.pieces[place].request_id, blamed_on_engine(error))
        return TrainReport(tuple(run.outcomes[place] for place in range(len(work.pieces))))

    def _train(self, pieces: Sequence[tuple[int, AtomPiece]], run: TrainRun) -> None:
        """Pieces whose jobs fit on the device together."""
        atoms = self._prepare(pieces, run)
        running = {piece.request_id for _, piece in pieces}
        for job in {id(atom.job): atom.job for atom in atoms}.values():
            job.discard_all_but(running)
        limit = self._base.fused_rows
        # Rows that want no gradient would only make the backward pass longer.
        for forward_only in (False, True):
            for some in runs_of([a for a in atoms if a.piece.forward_only == forward_only], limit):
                run.atoms(some)

    def _seatings(self, models: Sequence[ModelId]) -> Iterator[list[int]]:
        """Cuts a pass, given the model of each piece, into places whose models fit on the device
        together, and makes room for them. A model's pieces stay together and in order."""
        places: dict[ModelId, list[int]] = {}
        for place, model_id in enumerate(models):
            places.setdefault(model_id, []).append(place)
        seated: list[ModelId] = []
        for model_id in places:
            if seated and not self._jobs.fits(sum(map(self._size, [*seated, model_id]))):
                self._seat(seated)
                yield [place for seat in seated for place in places[seat]]
                seated = []
            seated.append(model_id)
        if seated:
            self._seat(seated)
            yield [place for seat in seated for place in places[seat]]

    def _seat(self, models: Sequence[ModelId]) -> None:
        """Makes room for models that run together; none of them leaves before they have."""
        coming = [model_id for model_id in models if not self._jobs.on_device(model_id)]
        self._jobs.make_room(sum(map(self._size, coming)), frozenset(models))

    def _prepare(self, pieces: Sequence[tuple[int, AtomPiece]], run: TrainRun) -> list[Atom]:
        """In slot order; the atoms of one request stay in theirs."""
        atoms = []
        for place, piece in pieces:
            try:
                job = self._seated(piece.model_id)
                atoms.append(Atom(place, piece, job, atom_inputs(piece, self._base.device)))
            except Exception as error:  # the other atoms need not know
                if not isinstance(error, OpenRLError):
                    log.exception("an atom of %s cannot be read", piece.request_id)
                run.fail(place, piece.request_id, blamed_on_engine(error))
        return sorted(atoms, key=lambda atom: atom.job.slot)

    # --- optimizer --------------------------------------------------------------------------

    def optimize(self, work: OptimPass) -> OptimReport:
        """Raises only before any step is made, as `train` does."""
        outcomes: dict[int, OptimStepDone | Failed] = {}
        try:
            for places in self._seatings([piece.model_id for piece in work.pieces]):
                self._optimize([(place, work.pieces[place]) for place in places], outcomes)
        except Exception as error:
            if not outcomes:
                raise
            log.exception("a pass of steps was cut short")
            failed = Failed(blamed_on_engine(error))
            outcomes = {place: outcomes.get(place, failed) for place in range(len(work.pieces))}
        return OptimReport(tuple(outcomes[place] for place in range(len(work.pieces))))

    def _optimize(
        self,
        pieces: Sequence[tuple[int, OptimPiece]],
        outcomes: dict[int, OptimStepDone | Failed],
    ) -> None:
        """Steps of different models are one kernel call where their settings are equal."""
        steps: dict[int, tuple[Job, Step]] = {}
        for place, piece in pieces:
            try:
                job = self._seated(piece.model_id)
            except OpenRLError as error:
                outcomes[place] = Failed(error)
                continue
            if job.gradient is None:
                outcomes[place] = OptimStepDone({"skipped_no_gradients": 1.0}, job.version)
            else:
                steps[place] = job, Step(job.optimizer, job.gradient.flat, piece.adam)
        for place in steps:
            outcomes[place] = Failed(ServerError("the step was cut short"))
        done = step_all([step for _, step in steps.values()])
        for (place, (job, _)), result in zip(steps.items(), done, strict=True):
            outcomes[place] = self._stepped(job, result)

    @staticmethod
    def _stepped(job: Job, done: Done) -> OptimStepDone | Failed:
        """A step that fails leaves weights and moments, but not the gradients that it could not
        use: they would make every later step fail too."""
        if isinstance(done, Diverged):
            job.clear_gradient()
        if isinstance(done, OpenRLError):
            return Failed(done)
        job.adapter.refresh()
        job.discard_all_but(set())
        job.clear_gradient()
        job.version += 1
        return OptimStepDone(done, job.version)

    # --- adapters ---------------------------------------------------------------------------

    def create(self, order: CreateAdapter) -> None:
        self._make_room_for(order)
        if order.source is None:
            job = Job(self._slots, self._fresh(order.lora))
        else:
            adapter = self._read(order.source, order.lora)
            job = Job(self._slots, adapter)
            if order.with_optimizer:
                job = self._with_optimizer(job, order)
        self._jobs.add(order.model_id, job)
        self._slots += 1

    def _fresh(self, lora: LoraConfig) -> Adapter:
        base = self._base
        if lora.full:
            return copy_of_base(base, lora)
        return fresh_adapter(base.linears, lora, base.device, base.dtype)

    def _read(self, source: Path, lora: LoraConfig) -> Adapter:
        """Raises `UserError` for a checkpoint of another kind or shape than `lora` says."""
        base = self._base
        if lora.full:
            return read_weights(source, base, lora)
        adapter = checkpoint.read_adapter(source, base.linears, base.device, base.dtype)
        checkpoint.require_same(adapter.config, lora)
        return adapter

    def restore(self, order: RestoreAdapter, fingerprint: str) -> None:
        """Raises `ServerError` for a snapshot that is not whole; then nothing is there."""
        self._make_room_for(order)
        self._jobs.add(order.model_id, restored_job(order, self._slots, self._base, fingerprint))
        self._slots += 1

    def _make_room_for(self, order: CreateAdapter | RestoreAdapter) -> None:
        if order.model_id in self._jobs:
            raise UserError(f"model {order.model_id} exists already")
        if not order.lora.full:
            check_config(order.lora)
        layout = layout_of(self._base, order.lora)
        self._jobs.require_room(layout)
        self._jobs.make_room(job_bytes(layout, self._base.dtype))

    def _with_optimizer(self, job: Job, order: CreateAdapter) -> Job:
        assert order.source is not None
        size = job.adapter.layout.size
        state = checkpoint.read_optimizer(order.source, size, self._base.device)
        restored = Job(job.slot, job.adapter, state.moments, state.version)
        if state.gradient is not None:
            restored.gradient = job.adapter.layout.view(state.gradient)
        return restored

    def load(self, order: LoadAdapter) -> None:
        job, base = self.job(order.model_id), self._base
        adapter = self._read(order.source, job.adapter.config)
        moments = None
        if order.with_optimizer:
            size = job.adapter.layout.size
            moments = checkpoint.read_optimizer(order.source, size, base.device).moments
        job.replace(adapter, moments)

    def save(self, order: SaveAdapter) -> None:
        job = self.job(order.model_id)
        if isinstance(job.adapter, FullWeights):
            write_weights(job.adapter, order.directory, self._base)
        else:
            checkpoint.write_adapter(job.adapter, order.directory, self._name)
        if order.with_optimizer:
            checkpoint.write_optimizer(job, order.directory)

    def page_out(self, model_id: ModelId) -> None:
        self._jobs.page_out(model_id)

    def drop(self, model_id: ModelId) -> None:
        self._jobs.drop(model_id)
