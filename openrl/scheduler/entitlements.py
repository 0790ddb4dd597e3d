"""What each owner may have: the configuration, and what an administrator has changed since."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from openrl.config import SchedulerConfig
from openrl.types import OwnerId
from openrl.values import OwnerQuota


@dataclass(frozen=True, slots=True)
class Quota:
    """One owner's. 0 is no bound for `max_models` and `tokens_per_minute`, and none at all of
    `full_models`; `weight` is the owner's
    share of the engine, beside the others'."""

    weight: float
    max_models: int
    full_models: int
    max_queued_samples: int
    max_queued_bytes: int
    max_queued_requests: int
    tokens_per_minute: int


_NAMES = tuple(field.name for field in fields(Quota))


class Entitlements:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._own = {OwnerId(owner): quota for owner, quota in config.owners.items()}

    def of(self, owner: OwnerId) -> Quota:
        return Quota(**{name: self._value(owner, name) for name in _NAMES})

    def rate(self, owner: OwnerId) -> int:
        """Tokens per minute."""
        return int(self._value(owner, "tokens_per_minute"))

    def weights(self) -> dict[str, float]:
        """Of all owners whose weight is not that of everybody."""
        named = (*self._config.owner_weights, *self._own)
        return {owner: self._value(OwnerId(owner), "weight") for owner in named}

    def change(self, owner: OwnerId, given: OwnerQuota) -> Quota:
        """What is None stays as it is. Holds until the next start, for what comes from now on."""
        own = self._own.get(owner, OwnerQuota())
        merged = {n: getattr(own if getattr(given, n) is None else given, n) for n in _NAMES}
        self._own[owner] = OwnerQuota(**merged)
        return self.of(owner)

    def _value(self, owner: OwnerId, name: str) -> Any:
        own = getattr(self._own.get(owner), name, None)
        if own is not None:
            return own
        if name == "weight":
            return self._config.owner_weights.get(owner, 1.0)
        return getattr(self._config, name)
