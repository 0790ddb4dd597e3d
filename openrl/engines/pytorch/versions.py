"""Pinned versions: immutable adapters that sampling rows read while training goes on.

Rows count as users. Versions without any stay in memory for a while, the latest used ones; then
those that were pinned from a model are written to disk, and come back from there to the bit,
and those that were read from a checkpoint are forgotten.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from openrl.engines.base import AdapterSource
from openrl.engines.pytorch.lora import Adapter, Layout
from openrl.errors import Gone, ServerError
from openrl.types import VersionId

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True)
class _Page:
    """Where a pinned version's flat fp32 buffer lies."""

    file: Path
    layout: Layout
    device: torch.device
    dtype: torch.dtype


@dataclass(slots=True)
class _Version:
    """`adapter` is None while the version is on disk alone; `page` once it has been written.
    `durable` versions can be read from their checkpoint again. `users` counts rows."""

    adapter: Adapter | None
    durable: bool
    page: _Page | None = None
    users: int = 0
    dropped: bool = False


class Versions:
    """`read_adapter` reads a checkpoint directory in PEFT's layout. `pages` is a directory of our
    own; without one, pinned versions stay in memory. `idle` versions without rows do anyhow."""

    def __init__(
        self, read_adapter: Callable[[Path], Adapter], pages: Path | None = None, idle: int = 16
    ) -> None:
        self._read = read_adapter
        self._pages = pages
        self._idle = idle
        self._versions: OrderedDict[VersionId, _Version] = OrderedDict()  # latest used last
        self._names = count()

    def __contains__(self, version_id: VersionId) -> bool:
        return version_id in self._versions

    @property
    def in_memory(self) -> int:
        return sum(version.adapter is not None for version in self._versions.values())

    def pin(self, version_id: VersionId, adapter: Adapter) -> int:
        """Copies the adapter as it is now; returns its size in bytes. Pinning an id again changes
        nothing."""
        if version_id not in self._versions:
            self._versions[version_id] = _Version(adapter.copy(), durable=False)
            self._page_out()
        return adapter.weights.flat.nbytes

    def drop(self, version_id: VersionId) -> bool:
        """Forgets a version once its last row has ended; true when it is gone now."""
        version = self._versions.get(version_id)
        if version is None:
            return False
        version.dropped = True
        return self._forget_if_unused(version_id)

    def acquire(self, source: AdapterSource) -> Adapter:
        """The adapter, kept until `release`. Raises `Gone` when it is neither in memory nor in
        a file, `ServerError` when its page cannot be read, and the reader's `UserError` for
        a checkpoint that does not fit the model."""
        version = self._versions.get(source.version_id)
        if version is None:
            version = self._load(source)
        if version.adapter is None:
            version.adapter = self._page_in(version.page)
        version.users += 1
        self._versions.move_to_end(source.version_id)
        self._page_out()
        return version.adapter

    def release(self, version_id: VersionId) -> bool:
        """Gives one use back; true when the version is gone now."""
        self._versions[version_id].users -= 1
        return self._forget_if_unused(version_id)

    def read(self, version_id: VersionId) -> Adapter:
        """The adapter, which nobody ever changes. Raises what `acquire` raises."""
        adapter = self.acquire(AdapterSource(version_id))
        self.release(version_id)
        return adapter

    def _load(self, source: AdapterSource) -> _Version:
        if source.path is None:
            raise Gone(
                "these sampler weights were pinned in memory and have been dropped since: "
                "save the weights for the sampler again"
            )
        if not source.path.is_dir():
            raise Gone(
                f"the files of these sampler weights are not there any more ({source.path.name}): "
                "save the weights for the sampler again"
            )
        version = _Version(self._read(source.path), durable=True)
        self._versions[source.version_id] = version
        return version

    def _forget_if_unused(self, version_id: VersionId) -> bool:
        version = self._versions[version_id]
        if not version.dropped or version.users:
            return False
        del self._versions[version_id]
        if version.page is not None:
            version.page.file.unlink(missing_ok=True)
        return True

    # --- pages ---

    def _page_out(self) -> None:
        """The longest unused leave memory, down to so many as may idle there."""
        idle = [i for i, v in self._versions.items() if v.adapter is not None and not v.users]
        for version_id in idle[: max(0, len(idle) - self._idle)]:
            version = self._versions[version_id]
            if version.durable:
                del self._versions[version_id]
            elif version.page is not None or self._write(version):
                version.adapter = None

    def _write(self, version: _Version) -> bool:
        """False when the version has to stay in memory."""
        if self._pages is None or version.adapter is None:
            return False
        file = self._pages / f"{next(self._names)}.safetensors"
        flat = version.adapter.weights.flat
        try:
            self._pages.mkdir(parents=True, exist_ok=True)
            save_file({"flat": flat.cpu()}, file)
        except (OSError, SafetensorError) as error:
            log.warning("idle sampler weights stay in memory, %s: %s", file, error)
            file.unlink(missing_ok=True)
            return False
        dtype = version.adapter.compute.flat.dtype
        version.page = _Page(file, version.adapter.layout, flat.device, dtype)
        return True

    def _page_in(self, page: _Page | None) -> Adapter:
        assert page is not None, "a version is in memory or on disk"
        try:
            flat = load_file(page.file)["flat"]
        except (OSError, SafetensorError) as error:
            raise ServerError(f"idle sampler weights cannot be read again: {error}") from error
        return page.layout.weights(flat.to(page.device), page.dtype)
