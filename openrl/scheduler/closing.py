"""Why nothing more will run on a model, in words for its client. Pure but for the catalogue."""

from __future__ import annotations

from openrl.catalogue import Catalogue, Run
from openrl.errors import Gone, OpenRLError, ServerError, UserError
from openrl.scheduler.models import Model
from openrl.types import (
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    ModelUnloaded,
    Outcome,
    RequestId,
    UnloadModel,
    Work,
)

_AFTER_ALL = 2**63
"""A seq_id above all that a client can send."""


def not_created(model_id: str, cause: OpenRLError) -> UserError:
    return UserError(f"model {model_id!r} was not created: {cause.message}")


def ended_by(work: Work, outcome: Outcome) -> OpenRLError | None:
    """A model ends when it was unloaded, or never began."""
    match work.operation, outcome:
        case ((CreateModel() | CreateModelFromCheckpoint()), Failed(error)):
            return not_created(work.lane, error)
        case UnloadModel(), ModelUnloaded():
            return unloaded(work.lane)
        case _:
            return None


def farewell(model: Model) -> Work:
    """Unloads a model whose session is over."""
    request_id = RequestId(f"{model.model_id}:end")
    seq_id, lane = _AFTER_ALL, model.model_id
    return Work(request_id, model.owner, model.session_id, lane, seq_id, UnloadModel())


def past_life(run: Run, catalogue: Catalogue) -> UserError:
    """For a model that the catalogue remembers and the engine does not."""
    if run.copied_from is not None:
        return UserError(
            f"model {run.model_id!r} is a copy of {run.copied_from} and cannot be trained: make a "
            "model from it"
        )
    return Gone(
        f"the weights of model {run.model_id!r} are gone: it was unloaded, or went with an earlier "
        "process of this server; " + _advice(run, catalogue)
    )


def unloaded(model_id: str) -> Gone:
    return Gone(f"model {model_id!r} was unloaded")


def damaged(model_id: str, damage: str, catalogue: Catalogue) -> ServerError:
    """For a model that an earlier process left in a state that cannot be had again."""
    run = catalogue.find_run(model_id)
    advice = "make a new model" if run is None else _advice(run, catalogue)
    return ServerError(
        f"model {model_id!r} could not be recovered and is stopped: {damage}; {advice}"
    )


def _advice(run: Run, catalogue: Catalogue) -> str:
    saved = catalogue.checkpoints_of(run.model_id, run.owner)
    last = next((c.path for c in saved if c.kind == "weights"), None)
    return f"make a model from its last checkpoint, {last}" if last else "make a new model"
