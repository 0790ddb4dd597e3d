"""Pinned versions: immutable adapters that sampling rows read while training goes on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openrl.engines.base import AdapterSource
from openrl.engines.pytorch.lora import Adapter
from openrl.errors import Gone
from openrl.types import VersionId

_IDLE_FILES = 8  # versions read from files that stay in memory without rows


@dataclass(slots=True)
class _Version:
    """`users` counts rows; `durable` versions can be read from their file again."""

    adapter: Adapter
    durable: bool
    users: int = 0
    dropped: bool = False


class Versions:
    """`read_adapter` reads a checkpoint directory in PEFT's layout."""

    def __init__(self, read_adapter: Callable[[Path], Adapter]) -> None:
        self._read = read_adapter
        self._versions: OrderedDict[VersionId, _Version] = OrderedDict()

    def __contains__(self, version_id: VersionId) -> bool:
        return version_id in self._versions

    def pin(self, version_id: VersionId, adapter: Adapter) -> None:
        """Copies the adapter as it is now. Pinning an id again changes nothing."""
        if version_id not in self._versions:
            self._versions[version_id] = _Version(adapter.copy(), durable=False)

    def drop(self, version_id: VersionId) -> bool:
        """Forgets a version once its last row has ended; true when it is gone now."""
        version = self._versions.get(version_id)
        if version is None:
            return False
        version.dropped = True
        return self._forget_if_unused(version_id)

    def acquire(self, source: AdapterSource) -> Adapter:
        """The adapter, kept until `release`. Raises `Gone` when it is neither in memory nor in
        a file, and the reader's `UserError` for a file that does not fit the model."""
        version = self._versions.get(source.version_id)
        if version is None:
            version = self._load(source)
        version.users += 1
        self._versions.move_to_end(source.version_id)
        return version.adapter

    def release(self, version_id: VersionId) -> bool:
        """Gives one use back; true when the version is gone now."""
        self._versions[version_id].users -= 1
        return self._forget_if_unused(version_id)

    def _load(self, source: AdapterSource) -> _Version:
        if source.path is None:
            raise Gone(
                "these sampler weights are neither in memory nor in a checkpoint any more: "
                "save the weights for the sampler again"
            )
        version = _Version(self._read(source.path), durable=True)
        self._versions[source.version_id] = version
        self._evict_idle()
        return version

    def _evict_idle(self) -> None:
        idle = [i for i, v in self._versions.items() if v.durable and not v.users]
        for version_id in idle[:-_IDLE_FILES]:
            del self._versions[version_id]

    def _forget_if_unused(self, version_id: VersionId) -> bool:
        version = self._versions[version_id]
        if version.dropped and not version.users:
            del self._versions[version_id]
            return True
        return False
