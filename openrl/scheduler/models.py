"""What this process serves: base models by public name, and the models and sampler versions
that are alive in its engine. The catalogue remembers more than is alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from openrl.engines.base import BaseModelInfo, WeightsKey
from openrl.errors import NotFound, OpenRLError
from openrl.scheduler.pins import Pins
from openrl.types import LoraConfig, ModelId, OwnerId, SessionId


@dataclass(slots=True)
class Model:
    """`atom_tokens`: the size at which its requests are cut, the same for all its life. `closed`
    says why nothing more will run on it; None while it is alive."""

    model_id: ModelId
    session_id: SessionId
    owner: OwnerId
    base_model: str
    lora: LoraConfig
    atom_tokens: int
    closed: OpenRLError | None = None


CLOSED_KEPT = 4096


class Models:
    """`pins` are the versions held for ephemeral samplers; `away` says of models that an earlier
    process has left why this one cannot go on with them. Of models that are closed the last
    `CLOSED_KEPT` are remembered, and those that have versions pinned."""

    def __init__(self, pins: Pins) -> None:
        self.pins = pins
        self.away: dict[str, str] = {}
        self._bases: dict[str, BaseModelInfo] = {}
        self._models: dict[str, Model] = {}
        self._closed: dict[str, None] = {}  # oldest first

    # --- base models ---

    def serve(self, bases: Iterable[BaseModelInfo]) -> None:
        self._bases = {info.name: info for info in bases}

    @property
    def bases(self) -> Mapping[str, BaseModelInfo]:
        return self._bases

    def base(self, name: str) -> BaseModelInfo:
        """Raises `NotFound` with the names that are served."""
        if name not in self._bases:
            served = ", ".join(self._bases) or "none"
            raise NotFound(f"base model {name!r} is not served here; these are: {served}")
        return self._bases[name]

    # --- models ---

    def weights_of(self, model_id: str) -> WeightsKey:
        """Of a model that is or was alive here."""
        return self.base(self._models[model_id].base_model).weights

    def add(self, model: Model) -> None:
        self._models[model.model_id] = model
        if model.closed is not None:
            self.close(model.model_id, model.closed)

    def find(self, model_id: str) -> Model | None:
        return self._models.get(model_id)

    def of(self, session_id: SessionId) -> list[Model]:
        return [model for model in self._models.values() if model.session_id == session_id]

    def alive(self, owner: OwnerId) -> int:
        """How many of the owner's are not closed."""
        return sum(1 for m in self._models.values() if m.owner == owner and m.closed is None)

    def full(self, owner: OwnerId) -> int:
        """How many of them train all parameters."""
        mine = (m for m in self._models.values() if m.owner == owner and m.lora.full)
        return sum(1 for model in mine if model.closed is None)

    def alive_by_owner(self) -> dict[OwnerId, int]:
        return Counter(m.owner for m in self._models.values() if m.closed is None)

    def all_alive(self) -> list[Model]:
        return [model for model in self._models.values() if model.closed is None]

    def closed(self, model_id: str) -> bool:
        model = self._models.get(model_id)
        return model is None or model.closed is not None

    def close(self, model_id: str, error: OpenRLError) -> None:
        self._models[model_id].closed = error
        self._closed[model_id] = None
        if len(self._closed) > CLOSED_KEPT:
            self._forget(next(iter(self._closed)))

    def _forget(self, model_id: str) -> None:
        """Later, as long as a sampler may name its weights."""
        del self._closed[model_id]
        if self.pins.of(ModelId(model_id)):
            self._closed[model_id] = None
        else:
            del self._models[model_id]
