"""Models whose base model could not be loaded: they wait for a start that can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from openrl.scheduler.core.events import Event, LanePaused
from openrl.scheduler.parts import Parts
from openrl.scheduler.recovery.plans import Plan

log = logging.getLogger("openrl")


def of_loaded_bases(
    plans: Iterable[Plan], parts: Parts, post: Callable[[Event], None]
) -> list[Plan]:
    """The plans of the others. What is queued stays queued, and in the journal."""
    left = []
    for plan in plans:
        model_id = plan.model.model_id
        missing = parts.loading.failure_of(parts.models.weights_of(model_id))
        if missing is None:
            left.append(plan)
            continue
        reason = f"{missing.message}; it goes on when a start can"
        log.error("model %s waits: %s", model_id, reason)
        parts.models.away[model_id] = reason
        post(LanePaused(model_id))
    return left
