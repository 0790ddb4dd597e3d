"""What models say about themselves as they train: the metrics of each forward_backward and step,
and what their clients log. Bounded: old points thin out, models long silent go. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

POINTS = 1024
"""The most that are kept for a model."""

ALL_POINTS = 65536
"""The most for all of them: at half a kilobyte each they never take more than some 30 MB. Models
have equal parts of it, once there are many."""

MODELS = 256
METRICS = 32
"""The most names in one point."""


@dataclass(frozen=True, slots=True)
class Point:
    """`number` counts all points of the process; `at` is Unix seconds; `step` how many
    optim_steps the model had had, unless its client said."""

    number: int
    model_id: str
    owner: str
    at: float
    step: float
    values: Mapping[str, float]


@dataclass(slots=True)
class Curve:
    points: list[Point] = field(default_factory=list)
    steps: int = 0

    def thin(self, most: int) -> None:
        """A full curve loses every other point of its older half: its beginning stays in sight."""
        while len(self.points) > most:
            half = (len(self.points) + 1) // 2
            self.points = self.points[:half:2] + self.points[half:]


class Curves:
    """The models that spoke last come last."""

    def __init__(self) -> None:
        self.last = 0
        self._curves: OrderedDict[str, Curve] = OrderedDict()

    def stepped(self, model_id: str, version: int) -> None:
        self._curve(model_id).steps = version

    def add(
        self,
        model_id: str,
        owner: str,
        at: float,
        values: Mapping[str, float],
        step: float | None = None,
    ) -> None:
        """Values beyond the first `METRICS` are left out."""
        curve = self._curve(model_id)
        self.last += 1
        kept = dict(list(values.items())[:METRICS])
        where = curve.steps if step is None else step
        curve.points.append(Point(self.last, model_id, owner, at, where, kept))
        curve.thin(self._most())

    def of(self, model_id: str) -> list[Point]:
        """Oldest first."""
        curve = self._curves.get(model_id)
        return list(curve.points) if curve else []

    def after(self, number: int) -> list[Point]:
        """All newer points, in the order in which they came."""
        newer = [
            point
            for curve in self._curves.values()
            if curve.points and curve.points[-1].number > number
            for point in curve.points
            if point.number > number
        ]
        return sorted(newer, key=lambda point: point.number)

    def _most(self) -> int:
        return min(POINTS, ALL_POINTS // len(self._curves))

    def _curve(self, model_id: str) -> Curve:
        if model_id not in self._curves:
            self._make_room()
            self._curves[model_id] = Curve()
        self._curves.move_to_end(model_id)
        return self._curves[model_id]

    def _make_room(self) -> None:
        """For one more."""
        if len(self._curves) >= MODELS:
            self._curves.popitem(last=False)
        for curve in self._curves.values():
            curve.thin(min(POINTS, ALL_POINTS // (len(self._curves) + 1)))
