"""The shapes of bodies of the routes about names: sessions, runs, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from openrl.api.schema import Body, Count, Id, Strict

# --- sessions -------------------------------------------------------------------------------


class SetProject(Body, frozen=True):
    project_id: Id


class SearchOwner(Strict, frozen=True):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class SearchStatus(Strict, frozen=True):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None


class SearchCursor(Strict, frozen=True):
    last_created_at: str
    last_session_id: str


class SearchSessions(Strict, frozen=True):
    """See the SDK's `SessionSearchRequest`."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


# --- checkpoints ----------------------------------------------------------------------------


class WeightsInfo(Body, frozen=True):
    tinker_path: str


class CopyWeights(Strict, frozen=True):
    """Into a place of a session, or into a project."""

    source_path: str
    session_id: Id | None = None
    model_seq_id: Count | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class SetTtl(Body, frozen=True):
    ttl_seconds: int | None = None
