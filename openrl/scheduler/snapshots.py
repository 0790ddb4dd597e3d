"""Snapshots of models: when they are ordered, where they lie, and from when on they count.

    ROOT/snapshots/{hash of the model's id}/{seq_id}-{random}/   of the model as it was after that
    ROOT/versions/{version id}/                                  what ephemeral samplers read

A snapshot counts when it is written, so are the versions that were pinned before it, and the
outcome of its last operation is in the journal. Then older ones of the model go.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from openrl.actors import Tasks
from openrl.engines.base import (
    Control,
    OptimPass,
    OptimReport,
    SnapshotAdapter,
    SnapshotVersion,
    TrainPass,
    TrainReport,
    Written,
)
from openrl.errors import Diverged, Unavailable
from openrl.journal import Journal
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.pins import Pin, Pins
from openrl.scheduler.rhythm import Rhythm
from openrl.types import Failed, ModelId, OptimStepDone, RequestId, VersionId

log = logging.getLogger("openrl")


@dataclass(slots=True)
class _Draft:
    """A snapshot that does not count yet: `missing` are the directories to be written still."""

    model_id: ModelId
    position: RequestId
    directory: Path
    missing: set[Path]


class Snapshots:
    def __init__(
        self, root: Path | None, journal: Journal, rhythm: Rhythm, pins: Pins, tasks: Tasks
    ) -> None:
        """Without a `root` nothing is ever ordered."""
        self._root = root
        self._journal = journal
        self._rhythm = rhythm
        self._pins = pins
        self._tasks = tasks
        self._positions: dict[ModelId, RequestId] = {}
        self._drafts: list[_Draft] = []
        self._versions: dict[Path, VersionId] = {}  # being written

    @property
    def enabled(self) -> bool:
        return self._root is not None

    # --- what has been executed ---

    def trained(self, work: TrainPass, report: TrainReport, seconds: float) -> list[ModelId]:
        """Returns the models that should have a snapshot now, their gradients with them."""
        tokens = [sum(len(datum.tokens) for datum in piece.data) for piece in work.pieces]
        per_token = seconds / max(1, sum(tokens))
        ended = []
        for piece, outcome, size in zip(work.pieces, report.outcomes, tokens, strict=True):
            if piece.forward_only or isinstance(outcome, Failed):
                continue
            self._rhythm.worked(piece.model_id, size * per_token)
            if piece.last:
                self._positions[piece.model_id] = piece.request_id
                ended.append(piece.model_id)
        return [model for model in ended if self._due(model, with_gradient=True)]

    def stepped(self, work: OptimPass, report: OptimReport, seconds: float) -> list[ModelId]:
        """Returns the models that should have a snapshot now, while they have no gradients."""
        due = []
        for piece, outcome in zip(work.pieces, report.outcomes, strict=True):
            if changed_by_step(outcome):
                self.reached(piece.model_id, piece.request_id, seconds / len(work.pieces))
                if self._due(piece.model_id):
                    due.append(piece.model_id)
        return due

    def reached(self, model_id: ModelId, position: RequestId, seconds: float = 0.0) -> None:
        """The model is as it was after this operation, the last that changed it."""
        self._rhythm.worked(model_id, seconds)
        self._positions[model_id] = position

    def _due(self, model_id: ModelId, with_gradient: bool = False) -> bool:
        size = self._journal.size_of(model_id)
        return self.enabled and self._rhythm.due(model_id, size, with_gradient)

    def in_debt(self) -> tuple[ModelId, ...]:
        return self._rhythm.in_debt() if self.enabled else ()

    # --- orders ---

    def orders(self, model_id: ModelId) -> list[Control]:
        """For a snapshot of the model as it is now: its pinned versions first, unless they are on
        disk already."""
        versions = self.version_orders(model_id)
        position = self._positions[model_id]
        name = f"{position.rpartition(':')[2]}-{secrets.token_hex(4)}"
        directory = self._of(model_id) / name
        missing = {directory, *(order.directory for order in versions)}
        missing |= {path for path, v in self._versions.items() if self._belongs(v, model_id)}
        self._drafts.append(_Draft(model_id, position, directory, missing))
        return [*versions, SnapshotAdapter(model_id, directory)]

    def version_orders(self, model_id: ModelId) -> list[SnapshotVersion]:
        """For what ephemeral samplers read of the model and is in memory alone."""
        orders = []
        for version in self._pins.of(model_id) if self.enabled else ():
            pin, path = self._pins.get(version), self.version_directory(version)
            if pin.directory is None and not pin.awaited and path not in self._versions:
                self._versions[path] = version
                orders.append(SnapshotVersion(version, path))
        return orders

    def _belongs(self, version: VersionId, model_id: ModelId) -> bool:
        return version in self._pins and self._pins.get(version).model_id == model_id

    def taken(self, control: Control, seconds: float, error: object) -> None:
        """The engine has copied what was ordered; with an `error` it could not."""
        match control:
            case SnapshotAdapter(model_id=model_id, directory=directory):
                self._rhythm.taken(model_id, seconds)
            case SnapshotVersion(directory=directory):
                pass
            case _:
                return
        if error is not None:
            self.written([Written(directory, error=str(error))])

    # --- what has been written ---

    def written(self, reports: Iterable[Written]) -> None:
        for report in reports:
            version = self._versions.pop(report.directory, None)
            if report.error is not None:
                self._failed(report)
            else:
                if version is not None:
                    self._version_is_there(version, report.directory)
                waiting = [each for each in self._drafts if report.directory in each.missing]
                for draft in waiting:
                    draft.missing.remove(report.directory)
                if version is None and not waiting:  # its model has ended meanwhile
                    self._delete([report.directory])

    def _failed(self, report: Written) -> None:
        log.error("a snapshot could not be written: %s", report.error)
        for draft in [each for each in self._drafts if report.directory in each.missing]:
            self._drafts.remove(draft)
            self._rhythm.failed(draft.model_id)
            self._delete([draft.directory])

    def _version_is_there(self, version: VersionId, directory: Path) -> None:
        if version in self._pins:
            self._pins.get(version).directory = directory
        else:
            self._delete([directory])  # its samplers are gone meanwhile

    def record(self, backlog: Backlog) -> None:
        """Those that are whole count, once their last operation is answered."""
        for draft in [each for each in self._drafts if not each.missing]:
            if backlog.find(draft.position) is None:
                self._drafts.remove(draft)
                self.counts(draft.model_id, draft.position, draft.directory)

    def counts(self, model_id: ModelId, position: RequestId, directory: Path) -> None:
        try:
            self._journal.snapshot(model_id, position, directory.name)
        except ValueError as error:  # it costs a snapshot, not the server
            log.error("snapshot %s does not count: %s", directory.name, error)
            self._rhythm.failed(model_id)
            self._delete([directory])
            return
        self._rhythm.counted(model_id)
        being_written = {draft.directory for draft in self._drafts}
        old = set(self.of(model_id)) - {directory} - being_written
        self._delete(old)

    # --- directories ---

    def _of(self, model_id: ModelId) -> Path:
        assert self._root is not None
        digest = hashlib.sha256(model_id.encode()).hexdigest()[:32]
        return self._root / "snapshots" / digest

    def of(self, model_id: ModelId) -> list[Path]:
        """All that lie there, whole or not."""
        return _children(self._of(model_id)) if self.enabled else []

    def version_directory(self, version: VersionId) -> Path:
        assert self._root is not None
        return self._root / "versions" / quote(version, safe=":")

    def versions(self) -> dict[VersionId, Path]:
        """All that lie there, whole or not."""
        found = _children(self._root / "versions") if self._root is not None else []
        return {VersionId(unquote(path.name)): path for path in found}

    def strangers(self, known: Iterable[ModelId]) -> list[Path]:
        """Directories of snapshots that belong to none of these models."""
        if self._root is None:
            return []
        ours = {self._of(model_id) for model_id in known}
        return [path for path in _children(self._root / "snapshots") if path not in ours]

    # --- what goes ---

    def forget(self, model_id: ModelId) -> None:
        """The model has ended."""
        self._rhythm.forget(model_id)
        self._positions.pop(model_id, None)
        self._drafts = [draft for draft in self._drafts if draft.model_id != model_id]
        if self.enabled:
            self._delete([self._of(model_id)])

    def unpinned(self, pin: Pin) -> None:
        if pin.directory is not None:
            self._delete([pin.directory])

    def delete(self, paths: Iterable[Path]) -> None:
        """Once all that is in the journal now is durable."""
        self._delete(paths)

    def _delete(self, paths: Iterable[Path]) -> None:
        if paths := tuple(paths):
            self._tasks.spawn(self._deleted(paths), "deleting snapshots")

    async def _deleted(self, paths: Iterable[Path]) -> None:
        try:
            await self._journal.flushed()
        except Unavailable:
            return  # what would not need them is not durable
        for path in paths:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def changed_by_step(outcome: object) -> bool:
    """A step changes the model, and so does one whose gradient was dropped because it was not
    finite. One that failed for another reason has changed nothing."""
    match outcome:
        case OptimStepDone():
            return True
        case Failed(error):
            return isinstance(error, Diverged)
        case _:
            return False


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
