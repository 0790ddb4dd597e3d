"""Where a model's replay begins: at its newest snapshot that is whole, or at its creation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from openrl.engines.snapshots import whole
from openrl.errors import ServerError
from openrl.journal import RecoveredModel
from openrl.scheduler.snapshots import Snapshots
from openrl.types import RequestId, VersionId


def beginning(
    one: RecoveredModel,
    pinned: Mapping[VersionId, int],
    snapshots: Snapshots,
    durable: Callable[[VersionId], bool],
) -> tuple[Path | None, int]:
    """The newest snapshot that is whole, and the index of the last operation in it: -1 for the one
    that the journal knows, or none at all. `pinned`: the operations that pinned versions, each of
    which must be `durable` when its operation is not done again. Raises `ServerError`."""
    for index, path in _candidates(one, snapshots):
        before = [version for version, at in pinned.items() if at <= index]
        if whole(path) and all(map(durable, before)):
            return path, index
    if one.snapshot is not None:
        raise ServerError(f"its snapshot {one.snapshot.name} is not whole")
    return None, -1


def _candidates(one: RecoveredModel, snapshots: Snapshots) -> Iterator[tuple[int, Path]]:
    """Newest first. One that was written but not noted in the journal is as good."""
    places = {each.request_id: i for i, each in enumerate(one.executed)}
    if one.snapshot is None:
        places[RequestId(f"{one.model_id}:0")] = -1
    known = one.snapshot.name if one.snapshot is not None else None
    found = []
    for path in snapshots.of(one.model_id):
        position = RequestId(f"{one.model_id}:{path.name.partition('-')[0]}")
        if path.name == known:
            found.append((-1, path))
        elif position in places:
            found.append((places[position], path))
    yield from sorted(found, key=lambda each: each[0], reverse=True)
