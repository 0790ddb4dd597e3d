"""Models of clients that are not heard any more leave the device's memory.

They lose nothing: gradient, optimizer and all come back with the model's next request. The engine
is asked between two passes, and nobody is charged for it.
"""

from __future__ import annotations

import logging

from openrl.actors import Tasks
from openrl.engines.base import ControlPass, ControlReport, PageOut
from openrl.errors import EngineDied
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.models import Model, Models
from openrl.scheduler.securing import Execute
from openrl.types import RequestId, SessionId

log = logging.getLogger("openrl")

_NOBODYS = RequestId("leases")


class Leases:
    def __init__(self, execute: Execute, models: Models, backlog: Backlog, tasks: Tasks) -> None:
        self._execute = execute
        self._models = models
        self._backlog = backlog
        self._tasks = tasks
        self._ended: dict[SessionId, float] = {}  # and when it had been heard last

    def heard(self, last: dict[SessionId, float], horizon: float) -> int:
        """`last` says of each session when it was heard; those before `horizon` lose their lease,
        once for each time that they fall silent, unless work of theirs waits. Returns how many
        models those have."""
        silent = {s: when for s, when in last.items() if when < horizon and not self._busy(s)}
        self._ended = {s: when for s, when in self._ended.items() if silent.get(s) == when}
        fresh = silent.keys() - self._ended.keys()
        models = [model for model in self._models.all_alive() if model.session_id in fresh]
        self._ended |= {session_id: silent[session_id] for session_id in fresh}
        if models:
            self._tasks.spawn(self._page_out(models), "leases")
        return len(models)

    def _busy(self, session_id: SessionId) -> bool:
        return self._backlog.busy(session_id)

    async def _page_out(self, models: list[Model]) -> None:
        for model in models:
            if model.closed is not None or self._busy(model.session_id):
                continue
            weights = self._models.weights_of(model.model_id)
            try:
                ran = await self._execute(ControlPass(weights, _NOBODYS, PageOut(model.model_id)))
            except EngineDied:
                return  # the next pass finds out as well, and says so
            assert isinstance(ran.report, ControlReport)
            if ran.report.error is None:
                log.info("%s, whose client is gone, waits outside memory", model.model_id)
