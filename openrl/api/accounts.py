"""Who the caller is, what was done in its name, and what it used."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime, timedelta

from aiohttp import web

from openrl.api import auth, codec, shapes
from openrl.api.services import Services
from openrl.api.shapes import Plain
from openrl.catalogue.ledgers import HOUR, Bucket
from openrl.errors import UserError
from openrl.keys import ID_CHARS
from openrl.types import OwnerId

IDENTITY_SECONDS = 3600.0
_GIGABYTE = 10**9
_MOST_DAYS = 14
_RESOURCES = {
    "all": None,
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}


class Accounts:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/auth/token", self.token),
            web.get("/api/v1/auth/apikey/me", self.key),
            web.delete("/api/v1/auth/apikey/me", self.delete_key),
            web.get("/api/v1/audit", self.audit),
            web.get("/api/v1/billing/usage/events", self.usage),
            web.get("/api/v1/billing/usage/checkpoints/current", self.storage),
        ]

    # --- who ---

    async def token(self, request: web.Request) -> web.Response:
        """A key for an identity that says who its holder is, and serves as a key for an hour."""
        if not self._services.config.issue_jwts:
            raise UserError("this server issues no tokens: server.issue_jwts is off; use the key")
        if auth.is_identity(auth.key_of(request)):
            raise UserError("a token cannot be exchanged for another: use the key")
        holder, now = auth.holder_of(request), self._services.clock()
        claims: dict[str, str | int] = {
            "sub": shapes.urn(holder.owner),
            "org_id": self._services.config.home,
            "email": self._email(holder.owner),
            "iat": int(now),
        }
        jwt = self._services.signer.sign_identity(holder.key_id, claims, now + IDENTITY_SECONDS)
        return codec.answer(request, {"jwt": jwt})

    async def key(self, request: web.Request) -> web.Response:
        """The caller's key. The number is its name in `openrl keys list`, which is hexadecimal."""
        holder = auth.holder_of(request)
        answer = {
            "key_id": int(holder.key_id[:ID_CHARS], 16),
            "name": holder.owner,
            "note": "an administrator's" if holder.admin else "",
            "details": {
                "org_details": {"name": self._services.config.home},
                "user_details": {"email": self._email(holder.owner)},
            },
        }
        return codec.answer(request, answer)

    async def delete_key(self, request: web.Request) -> web.Response:
        raise UserError("keys are not deleted over HTTP: see `openrl keys revoke`")

    def _email(self, owner: OwnerId) -> str:
        """Nobody's address: the SDK wants one to show."""
        return f"{owner}@{self._services.config.home}"

    # --- what was done ---

    async def audit(self, request: web.Request) -> web.Response:
        """One UTC day of the caller's own log, today's unless `day` says otherwise."""
        kind = request.query.get("event_type", "all")
        if kind not in _RESOURCES:
            raise UserError(f"event_type must be one of {', '.join(_RESOURCES)}")
        start = self._day(request)
        entries = self._services.catalogue.audit.between(
            auth.owner_of(request),
            start.timestamp(),
            (start + timedelta(days=1)).timestamp(),
            _RESOURCES[kind],
        )
        listed = [
            {
                "timestamp": shapes.time(each.at),
                "event": each.event,
                "event_details": each.details,
                "tinker_path": each.details.get("tinker_path"),
                "purpose": each.details.get("purpose"),
            }
            for each in entries
        ]
        return codec.answer(request, {"entries": listed})

    def _day(self, request: web.Request) -> datetime:
        text = request.query.get("day")
        if text is None:
            today = datetime.fromtimestamp(self._services.clock(), UTC)
            return today.replace(hour=0, minute=0, second=0, microsecond=0)
        try:
            day = date.fromisoformat(text)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        except ValueError as error:
            raise UserError(f"day must be a date such as 2026-07-13, not {text[:20]!r}") from error

    # --- what was used ---

    async def usage(self, request: web.Request) -> web.Response:
        """Counted by this server, hour by hour; nothing has a price."""
        start, end = _moment(request, "starting_on"), _moment(request, "ending_before")
        if not start < end <= start + _MOST_DAYS * 24 * HOUR:
            raise UserError(
                f"ending_before must be after starting_on, by {_MOST_DAYS} days at most"
            )
        owner = auth.owner_of(request)
        counted = self._services.catalogue.usage.between(owner, start, end)
        answer = {
            "data": [self._event(bucket, amount) for bucket, amount in counted],
            "sessions": {
                name: {"user_metadata": self._services.session(name, owner).user_metadata}
                for name in sorted({bucket.session for bucket, _ in counted})
            },
            "cost_data_through": None,
        }
        return codec.answer(request, answer)

    def _event(self, bucket: Bucket, amount: int) -> Plain:
        return {
            "bucket_start": shapes.time(bucket.hour),
            "bucket_end": shapes.time(bucket.hour + HOUR),
            "base_model": bucket.base_model,
            "user_id": shapes.urn(bucket.owner),
            "session_id": bucket.session,
            "project_id": self._services.session(bucket.session, bucket.owner).project_id,
            "event_info": _info(bucket, amount),
        }

    async def storage(self, request: web.Request) -> web.Response:
        """What the caller's checkpoints take now, by project."""
        owner, wanted = auth.owner_of(request), request.query.get("project_id")
        counts: Counter[str | None] = Counter()
        sizes: Counter[str | None] = Counter()
        for session in self._services.catalogue.sessions_after(owner, None):
            count, size = self._services.catalogue.stored(session.session_id)
            if count and wanted in (None, session.project_id):
                counts[session.project_id] += count
                sizes[session.project_id] += size
        listed = [
            {
                "project_id": project,
                "org_user_urn": shapes.urn(owner),
                "user_email": self._email(owner),
                "checkpoint_count": count,
                "size_bytes": sizes[project],
                "size_gigabytes": sizes[project] / _GIGABYTE,
            }
            for project, count in counts.items()
        ]
        return codec.answer(request, {"data": listed})


def _info(bucket: Bucket, amount: int) -> Plain:
    match bucket.kind:
        case "training":
            return {"type": "training", "token_count": amount}
        case "sampled":
            return {"type": "sampling_sample", "token_count": amount}
        case "checkpoint":
            return {"type": "checkpoint", "count": amount}
        case kind:
            cached = kind == "prefill_cached"
            return {"type": "sampling_prefill", "cached": cached, "token_count": amount}


def _moment(request: web.Request, name: str) -> float:
    """RFC 3339, in Unix seconds."""
    text = request.query.get(name, "")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{name} must be a time such as 2026-07-13T00:00:00Z") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
