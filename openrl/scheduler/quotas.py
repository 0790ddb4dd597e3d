"""How much one owner may have at once: what is over is refused for now, held, or refused.

Samples over a bound get 429, since clients slow down by it. Training work is held, since clients
cannot go on after a refused POST; and so is what its model was sent after it, lest a step
overtake its gradient.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from openrl.errors import Overloaded, UserError
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.entitlements import Entitlements
from openrl.scheduler.models import Models
from openrl.scheduler.pending import payload_bytes
from openrl.types import LoraConfig, OwnerId, Sample, Work


class Quotas:
    def __init__(
        self, allowed: Entitlements, backlog: Backlog, models: Models, hold_seconds: float
    ) -> None:
        self._allowed = allowed
        self._backlog = backlog
        self._models = models
        self._hold_seconds = hold_seconds
        self._held: defaultdict[str, set[int]] = defaultdict(set)  # seq_ids by lane

    def check_samples(self, owner: OwnerId) -> None:
        """Raises `Overloaded` with the time in which some will probably have been answered."""
        share, quota = self._backlog.share(owner), self._allowed.of(owner)
        for count, bound, what in (
            (share.samples, quota.max_queued_samples, "samples"),
            (share.requests, quota.max_queued_requests, "requests"),
        ):
            if count >= bound:
                raise Overloaded(
                    f"{count} {what} are queued for you, at most {bound}: try again",
                    retry_after=self._backlog.seconds_to_next(owner),
                )

    def check_models(self, owner: OwnerId, lora: LoraConfig) -> None:
        """Counts the one to be made, which is among the owner's models already."""
        if lora.full:
            self._check_full(owner)
        most = self._allowed.of(owner).max_models
        if most and self._models.alive(owner) > most:
            raise UserError(
                f"{most} models are in memory for you, the most that this server keeps for one "
                "owner: unload one, or finish its session"
            )

    def _check_full(self, owner: OwnerId) -> None:
        most = self._allowed.of(owner).full_models
        if not most:
            raise UserError(
                "lora_config is missing, and full-parameter training is not open to you here: send "
                "a lora_config, or have scheduler.full_models raised"
            )
        if self._models.full(owner) > most:
            raise UserError(
                f"{most} models that train all parameters are in memory for you, the most that "
                "this server keeps for one owner: unload one, or train an adapter"
            )

    async def hold(self, work: Work) -> None:
        """Returns when there is room for it. Raises `Overloaded` when that takes too long."""
        if isinstance(work.operation, Sample) or not self._must_wait(work):
            return
        self._held[work.lane].add(work.seq_id)
        try:
            async with asyncio.timeout(self._hold_seconds):
                while self._must_wait(work):
                    await self._backlog.stirred()
        except TimeoutError:
            raise Overloaded(self._too_much(work), retry_after=5.0) from None
        finally:
            self._let_pass(work)

    def _let_pass(self, work: Work) -> None:
        self._held[work.lane].discard(work.seq_id)
        if not self._held[work.lane]:
            del self._held[work.lane]
        self._backlog.stir()

    def _must_wait(self, work: Work) -> bool:
        before = self._held.get(work.lane, ())
        return any(seq < work.seq_id for seq in before) or not self._has_room(work)

    def _has_room(self, work: Work) -> bool:
        """A request larger than the bound itself comes in when its owner has nothing else;
        one without data always does, but for the bound on requests."""
        share, quota = self._backlog.share(work.owner), self._allowed.of(work.owner)
        if share.requests >= quota.max_queued_requests:
            return False
        more = payload_bytes(work.operation)
        together = share.payload_bytes + more
        return 0 in (share.payload_bytes, more) or together <= quota.max_queued_bytes

    def _too_much(self, work: Work) -> str:
        share, quota = self._backlog.share(work.owner), self._allowed.of(work.owner)
        return (
            f"{share.requests} requests with {share.payload_bytes} bytes are queued for you, at "
            f"most {quota.max_queued_requests} with {quota.max_queued_bytes}: "
            "try again"
        )
