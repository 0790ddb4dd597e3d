"""What the trainer holds for one model: its adapter, its optimizer, its gradients.

An atom's gradients are summed in a buffer of their own. The buffers of one request's atoms are
added up, in atom order, in the request's scratch; the last atom moves the scratch to the model's
accumulated gradient. A request that fails drops its scratch, so it leaves no trace. Where there
is nothing to add to, a buffer is handed on instead of copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.engines.pytorch.lora import Adapter, Factors, Layout
from openrl.engines.pytorch.optim import AdamW, Moments
from openrl.types import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class JobRecord:
    """What a job is beside its tensors. `steps` None before the first step."""

    slot: int
    layout: Layout
    version: int
    steps: int | None


class Job:
    """`slot` orders jobs in a packed batch. `version` counts the steps that changed the weights.
    `gradient` is None when nothing has been accumulated since the last step."""

    def __init__(
        self, slot: int, adapter: Adapter, moments: Moments | None = None, version: int = 0
    ) -> None:
        self.slot = slot
        self.adapter = adapter
        self.optimizer = AdamW(adapter.weights.flat, moments)
        self.version = version
        self.gradient: Factors | None = None
        self._scratches: dict[RequestId, Factors] = {}
        self._spare: Factors | None = None

    def record(self) -> JobRecord:
        moments = self.optimizer.moments
        steps = None if moments is None else moments.step
        return JobRecord(self.slot, self.adapter.layout, self.version, steps)

    def tensors(self) -> dict[str, Tensor]:
        """All that an idle job is made of, fp32 [size] each; the live tensors."""
        tensors = {"weights": self.adapter.weights.flat}
        if (moments := self.optimizer.moments) is not None:
            tensors |= {"exp_avg": moments.exp_avg, "exp_avg_sq": moments.exp_avg_sq}
        if self.gradient is not None:
            tensors["gradient"] = self.gradient.flat
        return tensors

    @classmethod
    def restored(
        cls,
        record: JobRecord,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Job:
        layout = record.layout
        # Copies, which start where fresh tensors do.
        own = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        moments = None
        if record.steps is not None:
            moments = Moments(own["exp_avg"], own["exp_avg_sq"], record.steps)
        adapter = layout.weights(own["weights"], dtype)
        job = cls(record.slot, adapter, moments, record.version)
        if "gradient" in own:
            job.gradient = layout.view(own["gradient"])
        return job

    @property
    def open_requests(self) -> int:
        """Requests that hold a scratch: some of their atoms are in, the last is not."""
        return len(self._scratches)

    def empty_buffer(self) -> Factors:
        """Zeros, for one atom's gradients."""
        spare, self._spare = self._spare, None
        if spare is None:
            return self.adapter.layout.zeros(self.adapter.weights.flat.device)
        spare.flat.zero_()
        return spare

    def give_back(self, buffer: Factors) -> None:
        self._spare = buffer

    def add_atom(self, request_id: RequestId, buffer: Factors) -> None:
        """Takes `buffer` over."""
        scratch = self._scratches.get(request_id)
        if scratch is None:
            self._scratches[request_id] = buffer
        else:
            scratch.flat.add_(buffer.flat)
            self.give_back(buffer)

    def commit(self, request_id: RequestId) -> None:
        """The request's last atom is in: its gradients become the model's."""
        scratch = self._scratches.pop(request_id)
        if self.gradient is None:
            self.gradient = scratch
        else:
            self.gradient.flat.add_(scratch.flat)
            self.give_back(scratch)

    def discard(self, request_id: RequestId) -> None:
        scratch = self._scratches.pop(request_id, None)
        if scratch is not None:
            self.give_back(scratch)

    def discard_all_but(self, running: set[RequestId]) -> None:
        """Forgets requests that were cut short. A model's requests run one after another, so a
        scratch of a request that is not running now will never be finished."""
        for request_id in set(self._scratches) - running:
            self.discard(request_id)

    def clear_gradient(self) -> None:
        if self.gradient is not None:
            self.give_back(self.gradient)
        self.gradient = None

    def replace(self, adapter: Adapter, moments: Moments | None) -> None:
        """Takes over the weights of `adapter`, of the same layout; gradients are dropped."""
        self.adapter.weights.flat.copy_(adapter.weights.flat)
        self.adapter.refresh()
        self.optimizer = AdamW(self.adapter.weights.flat, moments)
        self.discard_all_but(set())
        self.clear_gradient()
