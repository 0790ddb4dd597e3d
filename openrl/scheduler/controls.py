"""Control operations: what is checked before the engine is asked, and what is written after.

`prepare` raises `UserError` with the cause; then the engine is never asked and nothing has
changed. A save is staged, written by the engine, made durable, and only then has a row.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from openrl.catalogue import Catalogue, Checkpoint, Run, Sampler
from openrl.checkpoints import CheckpointStore, Staged
from openrl.engines.base import (
    Control,
    CreateAdapter,
    DropAdapter,
    LoadAdapter,
    PinVersion,
    SaveAdapter,
)
from openrl.engines.validation import check_samples
from openrl.errors import NotFound, ServerError, Unavailable, UserError
from openrl.scheduler.fetching import Fetching
from openrl.scheduler.models import Model, Models
from openrl.scheduler.publishing import Publisher, Save, path_of, saved
from openrl.types import (
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    LoadWeights,
    LoraConfig,
    ModelCreated,
    ModelUnloaded,
    OwnerId,
    Result,
    SamplerTarget,
    SamplerWeightsSaved,
    SamplingSessionId,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TinkerPath,
    UnloadModel,
    VersionId,
    WeightsLoaded,
    Work,
)

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True)
class Order:
    """A control operation that may go to the engine; `staged` is where it writes."""

    work: Work
    model: Model
    control: Control
    staged: Staged | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """An earlier process has done it, and died before it could say so."""

    result: Result


class Controls:
    def __init__(
        self,
        models: Models,
        catalogue: Catalogue,
        store: CheckpointStore,
        now: Callable[[], float],
    ) -> None:
        """`now` is in Unix seconds."""
        self._models = models
        self._catalogue = catalogue
        self._store = store
        self._now = now
        self._fetching = Fetching(catalogue, store)
        self._publisher = Publisher(catalogue, store, now)

    # --- before the engine ---

    async def prepare(self, work: Work) -> Order | Found:
        try:
            return await self._prepared(work)
        except sqlite3.Error as error:
            raise ServerError(f"the catalogue cannot be read: {error}") from error

    async def _prepared(self, work: Work) -> Order | Found:
        model = self._models.find(work.lane)
        assert model is not None, "admission registers a model before its first operation"
        name = model.model_id
        match work.operation:
            case CreateModel(lora=lora):
                return Order(work, model, CreateAdapter(name, lora))
            case CreateModelFromCheckpoint(lora=lora, path=path, with_optimizer=optimizer) as load:
                source = await self._source(path, model, optimizer, load.reader)
                return Order(work, model, CreateAdapter(name, lora, source, optimizer))
            case LoadWeights(path=path, with_optimizer=optimizer, reader=reader):
                source = await self._source(path, model, optimizer, reader)
                return Order(work, model, LoadAdapter(name, source, optimizer))
            case SaveWeights() | SaveWeightsExternal() | SaveWeightsForSampler(name=str()) as save:
                return self._prepare_save(work, model, save)
            case SaveWeightsForSampler(sampling_session_id=session):
                check_samples(model.lora)
                self._check_free(session, VersionId(work.request_id))
                return Order(work, model, PinVersion(name, VersionId(work.request_id)))
            case UnloadModel():
                return Order(work, model, DropAdapter(name))
            case other:
                raise AssertionError(f"{type(other).__name__} is no control operation")

    async def _source(
        self, path: TinkerPath, model: Model, with_optimizer: bool, reader: OwnerId | None
    ) -> Path:
        """The directory of a checkpoint that fits the model and that `reader` may read."""
        checkpoint = self._catalogue.readable_checkpoint(path, reader or model.owner)
        differences = self._differences(checkpoint, model)
        if differences:
            raise UserError(
                "Checkpoint model configuration is incompatible with target model: "
                + "; ".join(differences)
            )
        if with_optimizer and not checkpoint.with_optimizer:
            raise UserError(f"checkpoint {path!r} holds no optimizer state: load it without")
        try:
            return await self._fetching.bring(checkpoint)
        except NotFound as error:
            raise ServerError(
                f"the files of checkpoint {path!r} are missing from this server"
            ) from error
        except Unavailable as error:  # it was here when the work was accepted
            raise ServerError(f"{error.message}; load it again later") from error

    def _differences(self, checkpoint: Checkpoint, model: Model) -> list[str]:
        found = []
        bases = self._models.bases
        theirs, ours = bases.get(checkpoint.base_model), bases[model.base_model]
        if theirs is None or theirs.weights != ours.weights:
            found.append(_difference("base_model", checkpoint.base_model, model.base_model))
        there, here = _fixed(checkpoint.lora), _fixed(model.lora)
        return found + [_difference(k, there[k], here[k]) for k in there if there[k] != here[k]]

    def _prepare_save(self, work: Work, model: Model, save: Save) -> Order | Found:
        if isinstance(save, SaveWeightsForSampler):
            check_samples(model.lora)
        path = path_of(model, save)
        standing = self._catalogue.find_checkpoint(path)
        if standing is not None and standing.request_id == work.request_id:
            return Found(saved(save, standing))
        overwrite = isinstance(save, SaveWeights) and save.overwrite
        if not overwrite and standing is not None:
            raise UserError(f"checkpoint {path!r} exists already: choose another name")
        if standing is None:
            self._store.check_room(*self._catalogue.kept(model.owner))
        try:
            staged = self._store.stage()
        except OSError as error:
            raise ServerError(f"cannot make a directory for {path!r}: {error}") from error
        optimizer = isinstance(save, SaveWeights)
        control = SaveAdapter(model.model_id, staged.directory, with_optimizer=optimizer)
        return Order(work, model, control, staged)

    def _check_free(self, session: SamplingSessionId | None, version: VersionId) -> None:
        """An earlier process may have made the very sampler."""
        standing = None if session is None else self._catalogue.find_sampler(session)
        if session is None or (standing is not None and standing.target.version != version):
            raise UserError(f"sampling session {session!r} exists already")

    def locate(self, target: SamplerTarget) -> Path | None:
        """Where a sampler's version can be read from, if anywhere. Without it the engine uses
        what it has in memory, and says so when it has nothing."""
        if target.path is None:
            pins, version = self._models.pins, target.version
            return pins.get(version).directory if version and version in pins else None
        try:
            checkpoint = self._catalogue.find_checkpoint(target.path)
        except sqlite3.Error as error:
            log.error("the catalogue cannot be read: %s", error)
            return None
        if checkpoint is None or checkpoint.version != target.version:
            return None
        return self._store.directory(checkpoint.path, checkpoint.created_at)

    # --- after the engine ---

    def abandon(self, order: Order) -> None:
        """The engine could not do it: nothing stays."""
        if order.staged is not None:
            self._store.discard(order.staged)

    async def conclude(self, order: Order) -> Result | Failed:
        """The engine has done its part; the answer."""
        try:
            return await self._concluded(order)
        except (OSError, sqlite3.Error) as error:
            self.abandon(order)
            return Failed(ServerError(f"{order.work.request_id} could not be recorded: {error}"))

    async def _concluded(self, order: Order) -> Result:
        model = order.model
        match order.work.operation:
            case CreateModel(user_metadata=metadata):
                self._add_run(order, metadata)
                return ModelCreated(model.model_id, model.base_model, model.lora)
            case CreateModelFromCheckpoint(user_metadata=metadata, path=path):
                self._add_run(order, metadata)
                return WeightsLoaded(path, model.model_id)
            case LoadWeights(path=path):
                return WeightsLoaded(path, model.model_id)
            case SaveWeights() | SaveWeightsExternal() | SaveWeightsForSampler(name=str()) as save:
                assert order.staged is not None
                request_id = order.work.request_id
                return saved(
                    save, await self._publisher.publish(request_id, model, save, order.staged)
                )
            case SaveWeightsForSampler(sampling_session_id=str(session), inflight=inflight):
                self._add_sampler(order, SamplingSessionId(session), inflight)
                return SamplerWeightsSaved(sampling_session_id=SamplingSessionId(session))
            case _:
                return ModelUnloaded(model.model_id)

    def _add_run(self, order: Order, metadata: Mapping[str, str] | None) -> None:
        model, now = order.model, self._now()
        if self._catalogue.find_run(model.model_id) is not None:
            return  # it is a creation that an earlier process did not get to answer
        self._catalogue.add_run(
            Run(
                model_id=model.model_id,
                session_id=order.work.session_id,
                owner=model.owner,
                base_model=model.base_model,
                lora=model.lora,
                created_at=now,
                last_request_at=now,
                user_metadata=metadata,
            )
        )

    def _add_sampler(self, order: Order, session: SamplingSessionId, inflight: bool) -> None:
        model, version = order.model, VersionId(order.work.request_id)
        target = SamplerTarget(model.base_model, version)
        follows = model.model_id if inflight else None
        owner, now = model.owner, self._now()
        row = Sampler(session, order.work.session_id, owner, target, now, follows=follows)
        self._catalogue.add_sampler(row)
        left = self._catalogue.move_followers(model.model_id, target) if inflight else None
        self._models.pins.add(version, model.model_id, owner)
        if left is not None and left.version is not None and left != target:
            self._models.pins.supersede(left.version)


def _fixed(lora: LoraConfig) -> dict[str, object]:
    """What a checkpoint and the model that loads it must have in common."""
    return {name: value for name, value in asdict(lora).items() if name != "seed"}


def _difference(name: str, theirs: object, ours: object) -> str:
    return f"checkpoint {name} is {theirs} but target model {name} is {ours}"
