"""How runs, checkpoints, owners and times look in answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

from openrl.api.versions import Version
from openrl.catalogue import Checkpoint, Run
from openrl.types import CheckpointKind, OwnerId

Plain: TypeAlias = dict[str, Any]

TYPES: Mapping[CheckpointKind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
EXTERNAL_SINCE: Version = (0, 28)
"""Earlier SDKs fail on a whole list that holds one external checkpoint."""


def time(unix_seconds: float) -> str:
    """RFC 3339, in UTC."""
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat()


def urn(owner: OwnerId) -> str:
    return f"tml:organization_user:{owner}"


def visible(checkpoints: Iterable[Checkpoint], version: Version) -> list[Checkpoint]:
    """What an SDK of this version can read."""
    return [c for c in checkpoints if version >= EXTERNAL_SINCE or c.kind != "external_weights"]


def checkpoint(given: Checkpoint) -> Plain:
    expires = given.expires_at
    return {
        "checkpoint_id": f"{given.kind}/{given.name}",
        "checkpoint_type": TYPES[given.kind],
        "time": time(given.created_at),
        "tinker_path": given.path,
        "size_bytes": given.size_bytes,
        "public": given.public,
        "base_model": given.base_model,
        "user_metadata": given.user_metadata,
        "expires_at": None if expires is None else time(expires),
    }


def run(given: Run, saved: Iterable[Checkpoint]) -> Plain:
    """`saved` are newest first."""
    newest: dict[CheckpointKind, Plain] = {}
    for each in saved:
        newest.setdefault(each.kind, checkpoint(each))
    return {
        "training_run_id": given.model_id,
        "base_model": given.base_model,
        "model_owner": urn(given.owner),
        "is_lora": not given.lora.full,
        "corrupted": False,
        "lora_rank": given.lora.shown_rank,
        "last_request_time": time(given.last_request_at),
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": given.user_metadata,
    }
