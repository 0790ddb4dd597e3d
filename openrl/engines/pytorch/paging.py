"""Idle jobs outside the device's memory: slots are a cache, and many more models than slots work.

What a job is made of (weights, moments, gradient) moves as it is, so a job that comes back is
the same to the bit. The host's memory is the first place to go, when the device has its own; the
disk is the last. Files belong to this process alone and die with it: durability is not their
purpose.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrl.engines.pytorch.job import Job, JobRecord
from openrl.engines.pytorch.lora import Layout
from openrl.errors import OutOfMemory, ServerError
from openrl.types import ModelId

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True)
class AdapterBudget:
    """Bytes for jobs on the device, and for idle ones in the host's memory where that is another
    memory. None: no bound. `disk` is the directory for the rest; None: a temporary one."""

    device: int | None = None
    host: int | None = None
    disk: Path | None = None


UNBOUNDED = AdapterBudget()


def job_bytes(layout: Layout, dtype: torch.dtype) -> int:
    """What a job takes while it trains: weights, two moments, the gradient and a scratch in
    fp32, and the weights once more in a narrower base model's dtype."""
    narrow = 0 if dtype == torch.float32 else dtype.itemsize
    return layout.size * (5 * 4 + narrow)


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    """`tensors` or `path` is set."""

    record: JobRecord
    tensors: dict[str, Tensor] | None = None
    path: Path | None = None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tensors or {}).values())


class Jobs:
    """All jobs of a base model: those on the device in the order of their last use, and pages."""

    def __init__(self, budget: AdapterBudget, device: torch.device, dtype: torch.dtype) -> None:
        self._budget = budget
        self._device, self._dtype = device, dtype
        self._resident: OrderedDict[ModelId, Job] = OrderedDict()
        self._pages: OrderedDict[ModelId, _Page] = OrderedDict()
        self._directory: Path | None = None
        self._files = 0

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._resident or model_id in self._pages

    def __len__(self) -> int:
        return len(self._resident) + len(self._pages)

    @property
    def resident(self) -> int:
        return len(self._resident)

    def on_device(self, model_id: ModelId) -> bool:
        return model_id in self._resident

    def bytes_of(self, model_id: ModelId) -> int:
        """0 for a model that is not there."""
        if model_id in self._resident:
            return job_bytes(self._resident[model_id].adapter.layout, self._dtype)
        if model_id in self._pages:
            return job_bytes(self._pages[model_id].record.layout, self._dtype)
        return 0

    def fits(self, wanted: int) -> bool:
        return self._budget.device is None or wanted <= self._budget.device

    def require_room(self, layout: Layout) -> None:
        """Raises `OutOfMemory` for an adapter that would not fit if it were alone."""
        size = job_bytes(layout, self._dtype)
        if not self.fits(size):
            what = "a full model" if layout.config.full else f"an adapter of rank {layout.rank}"
            raise OutOfMemory(
                f"{what} takes {size:,} bytes with its optimizer, more "
                f"than engine.adapter_bytes = {self._budget.device:,}: choose a smaller rank or "
                "fewer targets, or raise the setting"
            )

    def add(self, model_id: ModelId, job: Job) -> None:
        self._resident[model_id] = job

    def get(self, model_id: ModelId) -> Job:
        """On the device; the last used now. The model is there. Raises `ServerError` when its
        page cannot be read, `OutOfMemory` when there is no room to read it into; then it stays."""
        if model_id not in self._resident:
            self._resident[model_id] = self._read(model_id)
            self._forget_page(model_id)
        self._resident.move_to_end(model_id)
        return self._resident[model_id]

    def drop(self, model_id: ModelId) -> None:
        self._resident.pop(model_id, None)
        if model_id in self._pages:
            self._forget_page(model_id)

    def make_room(self, needed: int = 0, keep: frozenset[ModelId] = frozenset()) -> None:
        """Pages out idle jobs, the longest unused first, until `needed` more bytes fit. Jobs in
        `keep` and those with half a request stay."""
        if self._budget.device is None:
            return
        used = needed + sum(self.bytes_of(model_id) for model_id in self._resident)
        for model_id in list(self._resident):
            if used <= self._budget.device:
                return
            job = self._resident[model_id]
            if model_id not in keep and not job.open_requests:
                size = self.bytes_of(model_id)
                if not self._page_out(model_id, job):
                    return
                used -= size

    def page_out(self, model_id: ModelId) -> None:
        """For a while that nobody will need it; not in the middle of a request."""
        job = self._resident.get(model_id)
        if job is not None and not job.open_requests:
            self._page_out(model_id, job)

    def close(self) -> None:
        self._resident.clear()
        self._pages.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- pages ------------------------------------------------------------------------------

    def _page_out(self, model_id: ModelId, job: Job) -> bool:
        """False when there is no place for it: the job stays, since losing it is no choice."""
        record, tensors = job.record(), job.tensors()
        if self._device.type != "cpu":
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
            self._pages[model_id] = _Page(record, tensors)
        else:
            path = self._write(model_id, tensors)
            if path is None:
                return False
            self._pages[model_id] = _Page(record, path=path)
        del self._resident[model_id]
        self._spill()
        return True

    def _spill(self) -> None:
        """Takes pages from the host's memory to the disk."""
        if self._budget.host is None:
            return
        used = sum(page.bytes for page in self._pages.values())
        for model_id, page in list(self._pages.items()):
            if used <= self._budget.host:
                return
            if page.tensors is not None:
                path = self._write(model_id, page.tensors)
                if path is None:
                    return
                used -= page.bytes
                self._pages[model_id] = _Page(page.record, path=path)

    def _write(self, model_id: ModelId, tensors: dict[str, Tensor]) -> Path | None:
        try:
            if self._directory is None:
                self._directory = _own_directory(self._budget.disk)
            self._files += 1
            path = self._directory / f"{self._files}.safetensors"
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            log.warning("%s stays in memory: it cannot be paged out: %s", model_id, error)
            return None
        return path

    def _read(self, model_id: ModelId) -> Job:
        page = self._pages[model_id]
        try:
            tensors = page.tensors if page.path is None else load_file(page.path)
            assert tensors is not None
            return Job.restored(page.record, tensors, self._device, self._dtype)
        except (OSError, SafetensorError) as error:
            raise ServerError(f"model {model_id} cannot be paged in: {error}") from error
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(f"model {model_id} cannot be paged in: {error}") from error

    def _forget_page(self, model_id: ModelId) -> None:
        page = self._pages.pop(model_id)
        if page.path is not None:
            page.path.unlink(missing_ok=True)


def _own_directory(parent: Path | None) -> Path:
    """For its owner alone: adapters are learnt from their users' data."""
    if parent is not None:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="openrl-adapters-", dir=parent))
