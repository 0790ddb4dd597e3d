"""When a snapshot of a model is due, so that a restart has little to do again. Pure.

A model's debt is the engine time that a restart would have to spend on it. All debts together
stay about within a budget, and snapshots cost at most a small part of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrl.types import ModelId

_COSTS = 20
"""Work done between two snapshots, in units of what one costs: they take at most a twentieth."""
_PATIENCE = 1.5
"""After a snapshot that failed the debt grows by this factor before the next is tried."""


@dataclass(slots=True)
class _Account:
    """In engine seconds. `covered` is the debt that the snapshot being written takes away; below
    `patient_until` none is taken."""

    debt: float = 0.0
    cost: float = 0.0
    covered: float | None = None
    patient_until: float = 0.0


class Rhythm:
    def __init__(self, replay_seconds: float, replay_bytes: int) -> None:
        """How much replay all models together may need, in engine seconds and in bytes."""
        self._seconds = replay_seconds
        self._bytes = replay_bytes
        self._accounts: dict[ModelId, _Account] = {}

    def worked(self, model_id: ModelId, seconds: float) -> None:
        self._accounts.setdefault(model_id, _Account()).debt += seconds

    def in_debt(self) -> tuple[ModelId, ...]:
        """Models whose newest snapshot, counted or being written, is not of now."""
        return tuple(m for m, a in self._accounts.items() if a.debt > (a.covered or 0.0))

    def due(self, model_id: ModelId, journal_bytes: int, with_gradient: bool = False) -> bool:
        """`journal_bytes` must be kept until the next snapshot. One with a gradient is larger, and
        is taken only when bytes press."""
        account = self._accounts.get(model_id)
        if account is None or account.covered is not None or account.debt < account.patient_until:
            return False
        share = 2 * max(1, len(self.in_debt()))
        if journal_bytes * share >= self._bytes * (2 if with_gradient else 1):
            return True
        enough = max(self._seconds / share, _COSTS * account.cost)
        return not with_gradient and account.debt >= enough

    def taken(self, model_id: ModelId, cost: float) -> None:
        """A snapshot of now is being written; its copy took `cost` engine seconds."""
        account = self._accounts.setdefault(model_id, _Account())
        account.covered, account.cost = account.debt, cost

    def counted(self, model_id: ModelId) -> None:
        """A restart would begin with the one that was taken."""
        if account := self._accounts.get(model_id):
            account.debt -= account.covered or 0.0
            account.covered, account.patient_until = None, 0.0

    def failed(self, model_id: ModelId) -> None:
        if account := self._accounts.get(model_id):
            account.covered, account.patient_until = None, account.debt * _PATIENCE

    def forget(self, model_id: ModelId) -> None:
        self._accounts.pop(model_id, None)
