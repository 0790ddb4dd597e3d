"""The versions that ephemeral samplers read: whose they are, and which of them make room. Pure.

A version stays as long as its session lives, unless its owner has more of them than the bounds
allow: then the oldest that no request uses go, and their samplers are told why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from openrl.types import ModelId, OwnerId, VersionId

REMOVED = 16384
"""Versions of which it is remembered that they made room, the latest."""
_ELSEWHERE = (
    "this sampler's weights were kept for the life of its session, and went with an earlier "
    "process of this server or with the session: save weights for a sampler again"
)


@dataclass(slots=True)
class Pin:
    """`superseded`: its samplers have moved on to newer weights. `directory`: where it lies on
    disk; None while it is in the engine's memory alone. `awaited`: the engine will have it once
    its model has become again what an earlier process left."""

    model_id: ModelId
    owner: OwnerId
    size_bytes: int = 0
    superseded: bool = False
    directory: Path | None = None
    awaited: bool = False


class Pins:
    """The bounds are for each owner."""

    def __init__(self, most_versions: int, most_bytes: int) -> None:
        self._most_versions = most_versions
        self._most_bytes = most_bytes
        self._pins: dict[VersionId, Pin] = {}  # oldest first
        self._removed: dict[VersionId, None] = {}  # oldest first

    def __contains__(self, version: VersionId) -> bool:
        return version in self._pins

    def get(self, version: VersionId) -> Pin:
        return self._pins[version]

    def add(
        self,
        version: VersionId,
        model_id: ModelId,
        owner: OwnerId,
        directory: Path | None = None,
        size_bytes: int = 0,
    ) -> None:
        """Does nothing to one that is here."""
        self._pins.setdefault(version, Pin(model_id, owner, size_bytes, directory=directory))

    def await_(self, version: VersionId, model_id: ModelId, owner: OwnerId) -> None:
        """It is on its way to the engine: see `Pin.awaited`."""
        self._pins[version] = Pin(model_id, owner, awaited=True)

    def weigh(self, version: VersionId, size_bytes: int) -> None:
        """What the engine, which has it now, says that it takes."""
        if version in self._pins:
            self._pins[version].size_bytes = size_bytes
            self._pins[version].awaited = False

    def supersede(self, version: VersionId) -> None:
        if version in self._pins:
            self._pins[version].superseded = True

    def of(self, model_id: ModelId) -> list[VersionId]:
        """Oldest first."""
        return [version for version, pin in self._pins.items() if pin.model_id == model_id]

    def surplus(self, owner: OwnerId, used: Collection[VersionId | None]) -> list[VersionId]:
        """What has to go: never one of `used`, nor the owner's newest."""
        gone = [v for v, pin in self._of_owner(owner) if pin.superseded and v not in used]
        kept = [(v, pin) for v, pin in self._of_owner(owner) if v not in gone]
        count, size = len(kept), sum(pin.size_bytes for _, pin in kept)
        for version, pin in kept[:-1]:
            if count <= self._most_versions and size <= self._most_bytes:
                break
            if version not in used:
                gone.append(version)
                count, size = count - 1, size - pin.size_bytes
        return gone

    def bytes_by_owner(self) -> dict[OwnerId, int]:
        sizes: dict[OwnerId, int] = {}
        for pin in self._pins.values():
            sizes[pin.owner] = sizes.get(pin.owner, 0) + pin.size_bytes
        return sizes

    def _of_owner(self, owner: OwnerId) -> Iterator[tuple[VersionId, Pin]]:
        return ((version, pin) for version, pin in self._pins.items() if pin.owner == owner)

    def remove(self, version: VersionId) -> Pin:
        pin = self._pins.pop(version)
        self._removed[version] = None
        if len(self._removed) > REMOVED:
            del self._removed[next(iter(self._removed))]
        return pin

    def _reason(self) -> str:
        return (
            "this sampler's weights have made room for newer ones: at most "
            f"{self._most_versions} unnamed samplers, of {self._most_bytes} bytes together, are "
            "kept for you; save weights for a sampler again, under a name to keep them"
        )

    def forget(self, version: VersionId) -> Pin:
        """With its session: there is nothing to explain."""
        return self._pins.pop(version)

    def why_gone(self, version: VersionId) -> str:
        return self._reason() if version in self._removed else _ELSEWHERE
