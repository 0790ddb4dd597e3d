"""Why nothing more will run on a model, in words for its client. Pure but for the catalogue."""

from __future__ import annotations

from openrl.catalogue import Catalogue, Run
from openrl.errors import Gone, OpenRLError, UserError
from openrl.types import (
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    ModelUnloaded,
    Outcome,
    UnloadModel,
    Work,
)


def not_created(model_id: str, cause: OpenRLError) -> UserError:
    return UserError(f"model {model_id!r} was not created: {cause.message}")


def ended_by(work: Work, outcome: Outcome) -> OpenRLError | None:
    """A model ends when it was unloaded, or never began."""
    match work.operation, outcome:
        case ((CreateModel() | CreateModelFromCheckpoint()), Failed(error)):
            return not_created(work.lane, error)
        case UnloadModel(), ModelUnloaded():
            return Gone(f"model {work.lane!r} was unloaded")
        case _:
            return None


def past_life(run: Run, catalogue: Catalogue) -> UserError:
    """For a model that the catalogue remembers and the engine does not."""
    if run.copied_from is not None:
        return UserError(
            f"model {run.model_id!r} is a copy of {run.copied_from} and cannot be trained: make a "
            "model from it"
        )
    saved = catalogue.checkpoints_of(run.model_id, run.owner)
    last = next((c.path for c in saved if c.kind == "weights"), None)
    advice = f"make a model from its last checkpoint, {last}" if last else "make a new model"
    return Gone(
        f"the weights of model {run.model_id!r} went with an earlier process of this server: "
        + advice
    )
