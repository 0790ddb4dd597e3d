"""What the handlers stand on, and the few things that all of them do with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from openrl.api import auth, codec
from openrl.api.feeds import Feeds
from openrl.api.shares import Shares
from openrl.catalogue import Catalogue, Checkpoint, Session
from openrl.checkpoints import CheckpointStore
from openrl.cluster import names
from openrl.config import Config
from openrl.errors import Gone, Unauthenticated, UserError
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.admission import Admission
from openrl.scheduler.core.events import Event
from openrl.scheduler.enquiries import Enquiries
from openrl.scheduler.entitlements import Entitlements
from openrl.scheduler.fetching import Fetching
from openrl.scheduler.loading import ModelStatus
from openrl.scheduler.metering import Meter
from openrl.scheduler.models import Models
from openrl.signing import Signer
from openrl.types import OwnerId

B = TypeVar("B", bound=msgspec.Struct)

DEADLINE = "X-OpenRL-Deadline-Seconds"


@dataclass(frozen=True, slots=True)
class Services:
    """`clock` gives Unix seconds; `monotonic` counts seconds that no correction of the clock moves:
    how long a client has been silent is told by those. `status` says how far each base model is,
    `engine_seconds` how long the engine has worked; `post` tells the scheduler what an
    administrator decided."""

    config: Config
    catalogue: Catalogue
    checkpoints: CheckpointStore
    fetching: Fetching
    futures: Futures
    admission: Admission
    models: Models
    status: Callable[[], tuple[ModelStatus, ...]]
    engine_seconds: Callable[[], float]
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    authenticator: auth.Authenticator
    signer: Signer
    enquiries: Enquiries
    entitlements: Entitlements
    feeds: Feeds
    meter: Meter
    journal: Journal
    post: Callable[[Event], None]
    polls: Shares = field(default_factory=lambda: Shares("polls open"))
    bodies: Shares = field(default_factory=lambda: Shares("bytes of bodies on the way"))
    heard: dict[str, float] = field(default_factory=dict)  # sessions, and when one last spoke
    heartbeats: dict[str, float] = field(default_factory=dict)  # and when its heart last beat

    async def read(self, request: web.Request, kind: type[B]) -> B:
        """The body as a `kind`. Raises `UserError` naming the field that does not fit."""
        return codec.parse(await self.body(request), codec.encoding_of(request), kind)

    async def body(self, request: web.Request) -> bytes:
        """Decompressed. Raises `Overloaded` when its owner is sending too much at once."""
        read: bytes | None = request.get(codec.BODY)
        if read is not None:
            return read
        limits = self.config.limits
        size = request.content_length
        if size is None:  # told by none, or in pieces of which nobody knows how many
            size = limits.body_bytes if request.body_exists else 0
        owner = auth.owner_of(request)
        with self.bodies.holding(owner, size, limits.open_bodies_bytes):
            return await codec.read_body(request, limits)

    def check_id(self, identity: str) -> str:
        """Raises `UserError`; the id itself is not repeated, it may be megabytes."""
        if len(identity) > self.config.limits.id_chars:
            limit = self.config.limits.id_chars
            raise UserError(f"an id of {len(identity)} characters: {limit} are allowed")
        return identity

    def named(self, name: str) -> str:
        """A sampling session or request, by the name that says in a cluster who serves it."""
        node = self.config.cluster.node
        return names.served_by(name, node) if node else name

    def session(self, session_id: str, owner: OwnerId) -> Session:
        """Raises `NotFound`."""
        return self.catalogue.session(self.check_id(session_id), owner)

    def live_session(self, session_id: str, owner: OwnerId) -> Session:
        """Raises `NotFound`, or `Gone` for one that is finished."""
        session = self.session(session_id, owner)
        if session.finished is not None:
            raise Gone(f"session {session_id!r} is finished ({session.finished}): make a new one")
        self.heard[session.session_id] = self.monotonic()
        return session

    def metadata(self, given: Mapping[str, Any] | None) -> Mapping[str, str] | None:
        """Values as text, since that is how they come back. Raises `UserError` when too large."""
        if given is None:
            return None
        texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in given.items()}
        size = sum(len(key) + len(value) for key, value in texts.items())
        if size > self.config.limits.metadata_bytes:
            limit = self.config.limits.metadata_bytes
            raise UserError(f"user_metadata has {size} characters: {limit} are allowed")
        return texts

    def deadline(self, request: web.Request) -> float | None:
        """Seconds from the work's acceptance to when its sender stops caring; None for ever."""
        given = request.headers.get(DEADLINE)
        if given is None:
            return None
        with suppress(ValueError):
            if 0.0 < (seconds := float(given)) <= 1e9:
                return seconds
        raise UserError(f"{DEADLINE}: {given[:32]!r} is no number of seconds above 0")

    # --- what others may read ---

    def reader(self, request: web.Request, token: str | None) -> OwnerId:
        """With whose rights weights are read: one's own, or those of the key or identity that
        was handed over as `weights_access_token`. Raises `UserError`."""
        if token is None:
            return auth.owner_of(request)
        try:
            return self.authenticator.holder(token).owner
        except Unauthenticated as error:
            raise UserError(f"weights_access_token: {error.message}") from error

    def readable(self, request: web.Request, path: str, token: str | None = None) -> Checkpoint:
        """Raises `NotFound`, and `UserError` for a token that nobody holds."""
        return self.catalogue.readable_checkpoint(path, self.reader(request, token))

    def weights(self, request: web.Request, path: str, token: str | None = None) -> Checkpoint:
        """One that this server itself can read. Raises what `readable` raises."""
        checkpoint = self.readable(request, path, token)
        if checkpoint.kind == "external_weights":
            raise UserError(f"{path} is for download: name a training or sampler checkpoint")
        return checkpoint

    # --- the audit log ---

    def note(self, owner: OwnerId, event: str, **details: str) -> None:
        self.catalogue.audit.add(owner, self.clock(), event, **details)

    def note_read(self, checkpoint: Checkpoint, by: OwnerId, purpose: str) -> None:
        """In the log of the one whose checkpoint it is."""
        self.note(
            checkpoint.owner,
            "checkpoint_read",
            tinker_path=checkpoint.path,
            purpose=purpose,
            by=by,
        )
