"""The versions that ephemeral samplers read, after a restart: which are still read, and where."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from openrl.catalogue import Catalogue, Run, Sampler
from openrl.engines.snapshots import whole
from openrl.errors import NotFound
from openrl.scheduler.closing import unloaded
from openrl.scheduler.models import Model, Models
from openrl.scheduler.snapshots import Snapshots
from openrl.types import ModelId, OwnerId, SessionId, VersionId


class Versions:
    def __init__(self, models: Models, catalogue: Catalogue, snapshots: Snapshots) -> None:
        self._models = models
        self._catalogue = catalogue
        self._snapshots = snapshots
        for path in snapshots.versions().values():
            if not whole(path):  # at once: it may be written anew under the same name
                shutil.rmtree(path, ignore_errors=True)
        self._found = snapshots.versions()
        self._expected: dict[VersionId, Model] = {}
        self._live = cache(self._live_in)

    def durable(self, version: VersionId) -> bool:
        return version in self._found

    def live_of(self, model: Model) -> frozenset[VersionId]:
        """What a sampler of the model's session reads, of whichever model."""
        return self._live(model.session_id, model.owner)

    def expect(self, model: Model, versions: Iterable[VersionId]) -> None:
        """They will be pinned again before any sample runs."""
        self._expected |= dict.fromkeys(versions, model)

    def revive(self) -> None:
        """Pins what is read still, the oldest first, and deletes the rest."""
        gone = []
        for version in sorted({*self._found, *self._expected}, key=_number):
            if (model := self._expected.get(version)) is not None:
                self._models.pins.await_(version, model.model_id, model.owner)
                continue
            path = self._found[version]
            run = self._catalogue.find_run(_model_of(version))
            if run is not None and run.base_model not in self._models.bases:
                continue  # it may be served again
            if run is None or version not in self._live(run.session_id, run.owner):
                gone.append(path)
            else:
                self._pin(version, run, path)
        self._snapshots.delete(gone)

    def _pin(self, version: VersionId, run: Run, path: Path) -> None:
        if self._models.find(run.model_id) is None:
            closed = unloaded(run.model_id)
            self._models.add(
                Model(run.model_id, run.session_id, run.owner, run.base_model, run.lora, 0, closed)
            )
        size = sum(file.stat().st_size for file in path.iterdir())
        self._models.pins.add(version, run.model_id, run.owner, path, size)

    def _live_in(self, session_id: SessionId, owner: OwnerId) -> frozenset[VersionId]:
        return frozenset(
            sampler.target.version
            for sampler in self._samplers(session_id, owner)
            if sampler.target.version is not None and sampler.target.path is None
        )

    def _samplers(self, session_id: SessionId, owner: OwnerId) -> Iterator[Sampler]:
        try:
            if self._catalogue.session(session_id, owner).finished is not None:
                return
            rows = self._catalogue.samplers_of(session_id, owner)
        except NotFound:
            return
        for row in rows:
            yield self._catalogue.sampler(row.sampling_session_id, owner)


def _model_of(version: VersionId) -> ModelId:
    """A version of an ephemeral sampler is named after the request that pinned it."""
    return ModelId(version.rpartition(":")[0])


def _number(version: VersionId) -> int:
    number = version.rpartition(":")[2]
    return int(number) if number.isdigit() else 0
