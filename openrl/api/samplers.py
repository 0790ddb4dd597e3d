"""Which weights are sampled from, when they are named by base model or path."""

from __future__ import annotations

import hashlib
import secrets

from aiohttp import web

from openrl.api import auth
from openrl.api.services import Services
from openrl.catalogue import Sampler, Session
from openrl.engines.validation import check_samples
from openrl.errors import NotFound, UserError
from openrl.types import OwnerId, SamplerTarget, SamplingSessionId, SessionId


def new_seq() -> int:
    """Where nobody counts, every request is its own: repeats are not recognised."""
    return secrets.randbits(48)


class Samplers:
    def __init__(self, services: Services) -> None:
        self._services = services

    def target(
        self, request: web.Request, base_model: str | None, model_path: str | None
    ) -> SamplerTarget:
        """Raises `NotFound`, and `UserError` for what does not go together."""
        if model_path is None:
            if base_model is None:
                raise UserError("name what to sample from: base_model or model_path")
            return SamplerTarget(self._services.models.base(base_model).name)
        checkpoint = self._services.weights(request, model_path)
        check_samples(checkpoint.lora)
        self._services.models.base(checkpoint.base_model)
        if base_model is not None and base_model != checkpoint.base_model:
            trained = checkpoint.base_model
            raise UserError(f"{model_path} was trained on {trained}, not on {base_model}")
        return checkpoint.target

    def named(self, request: web.Request, model: str) -> Sampler:
        """By a base model's name, a path, or `NAME;PATH`."""
        base, separator, path = model.partition(";")
        if not separator and model.startswith("tinker://"):
            base, path = "", model
        return self.direct(request, base or None, path or None)

    def direct(
        self, request: web.Request, base_model: str | None, model_path: str | None
    ) -> Sampler:
        """A sampler for requests that name weights and no sampling session: one for each owner
        and target, in a session of its own that nobody finishes."""
        owner = auth.owner_of(request)
        target = self.target(request, base_model, model_path)
        session_id = SessionId(f"{self._services.config.home}-direct-{owner}")
        self._ensure_session(session_id, owner)
        name = hashlib.sha256(f"{target.base_model}\n{target.version}".encode()).hexdigest()[:16]
        return self._services.catalogue.add_sampler(
            Sampler(
                SamplingSessionId(f"{session_id}:sample:{name}"),
                session_id,
                owner,
                target,
                self._services.clock(),
            )
        )

    def _ensure_session(self, session_id: SessionId, owner: OwnerId) -> None:
        try:
            self._services.catalogue.session(session_id, owner)
        except NotFound:
            session = Session(session_id, owner, self._services.clock(), tags=("direct",))
            self._services.catalogue.add_session(session)
