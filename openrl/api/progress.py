"""The curves of a model: what its passes said, and what its client logs beside them."""

from __future__ import annotations

import math

from aiohttp import web

from openrl.api import auth, board, codec, paging, schema
from openrl.api.services import Services
from openrl.catalogue import Run
from openrl.errors import NotFound, UserError
from openrl.scheduler.curves import METRICS

_ONE = "/api/v1/openrl/models/{model_id}/metrics"
_NAME_CHARS = 64


class Progress:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [web.get(_ONE, self.curve), web.post(_ONE, self.log)]

    async def curve(self, request: web.Request) -> web.Response:
        """The points of a model's curves, oldest first: number, time, step and values."""
        run = self._run(request)
        after = paging.number(request, "after", 0)
        points = [
            board.as_list(point)
            for point in self._services.meter.curves.of(run.model_id)
            if point.number > after
        ]
        return codec.answer(request, {"model_id": run.model_id, "points": points})

    async def log(self, request: web.Request) -> web.Response:
        """A client's own numbers, a reward say, for the curves. They are kept in memory, as long
        as the server runs and the model is not silent for too long."""
        run = self._run(request)
        body = await self._services.read(request, schema.LogMetrics)
        _check(body)
        self._services.meter.curves.add(
            run.model_id, run.owner, self._services.clock(), body.metrics, body.step
        )
        return codec.answer(request, {})

    def _run(self, request: web.Request) -> Run:
        """Raises `NotFound` for another owner's model."""
        model_id = self._services.check_id(request.match_info["model_id"])
        run = self._services.catalogue.find_run(model_id)
        if run is None or not (run.owner == auth.owner_of(request) or auth.is_admin(request)):
            raise NotFound(f"no model {model_id!r}")
        return run


def _check(body: schema.LogMetrics) -> None:
    """Raises `UserError`."""
    if not 0 < len(body.metrics) <= METRICS:
        raise UserError(f"metrics: 1 to {METRICS} names at once, not {len(body.metrics)}")
    for name, value in body.metrics.items():
        if not 0 < len(name) <= _NAME_CHARS:
            raise UserError(f"metrics: a name has 1 to {_NAME_CHARS} characters, not {len(name)}")
        if not math.isfinite(value):
            raise UserError(f"metrics: {name!r} is {value}: only finite numbers can be drawn")
