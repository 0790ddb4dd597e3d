"""Tokens per minute, owner by owner: work over the rate waits for its turn and never fails. Pure.

Each owner has a bucket that holds a minute's worth and fills steadily. Work goes while there is
something in it and may leave a debt, so that a request larger than the bucket runs too and is
paid for afterwards. What one owner sends leaves in the order in which it came, whatever it
costs: an optim_step must not pass its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from openrl.scheduler.core.events import Item
from openrl.types import OwnerId, RequestId

BUCKETS = 4096
"""Full buckets of owners that have nothing waiting are forgotten from here on."""

_TOKEN = 1.0 - 1e-6  # rounding must not make a time that is due look early


@dataclass(slots=True)
class Bucket:
    """`level` in tokens at the time `at`, below 0 for a debt."""

    level: float
    at: float
    waiting: dict[RequestId, Item] = field(default_factory=dict)


class Allowances:
    def __init__(self, tokens_per_minute: Callable[[OwnerId], int]) -> None:
        """Of an owner at this moment: it may change. 0 is no limit."""
        self.tokens_per_minute = tokens_per_minute
        self._buckets: dict[OwnerId, Bucket] = {}
        self._waiting: set[OwnerId] = set()

    def admit(self, item: Item, now: float) -> bool:
        """Whether it goes at once; otherwise it waits here until `due` gives it out."""
        if not self.tokens_per_minute(item.owner) and item.owner not in self._waiting:
            return True
        bucket = self._bucket(item.owner, now)
        if not bucket.waiting and bucket.level >= _TOKEN:
            bucket.level -= cost(item)
            return True
        bucket.waiting[item.request_id] = item
        self._waiting.add(item.owner)
        return False

    def due(self, now: float) -> Iterator[Item]:
        for owner in tuple(self._waiting):
            bucket = self._bucket(owner, now)
            free = not self.tokens_per_minute(owner)
            while bucket.waiting and (free or bucket.level >= _TOKEN):
                item = bucket.waiting.pop(next(iter(bucket.waiting)))
                bucket.level -= cost(item)
                yield item
            if not bucket.waiting:
                self._waiting.discard(owner)

    def wake_at(self) -> float | None:
        """When `due` will have something."""
        times = [self._when(owner) for owner in self._waiting]
        return min(times, default=None)

    def withdraw(self, owner: OwnerId, request_id: RequestId) -> Item | None:
        """None for one that does not wait here."""
        bucket = self._buckets.get(owner)
        return bucket.waiting.pop(request_id, None) if bucket else None

    def refund(self, owner: OwnerId, tokens: int) -> None:
        """What a request was counted for and did not use."""
        if bucket := self._buckets.get(owner):
            bucket.level = min(float(self.tokens_per_minute(owner)), bucket.level + tokens)

    def seconds_left(self, owner: OwnerId, request_id: RequestId, now: float) -> float | None:
        """None for one that does not wait here."""
        bucket = self._buckets.get(owner)
        if bucket is None or request_id not in bucket.waiting:
            return None
        ahead = 0
        for item in bucket.waiting.values():
            if item.request_id == request_id:
                break
            ahead += cost(item)
        rate = self.tokens_per_minute(owner) / 60.0
        return max(0.0, self._when(owner) + (ahead / rate if rate else 0.0) - now)

    def _when(self, owner: OwnerId) -> float:
        bucket, rate = self._buckets[owner], self.tokens_per_minute(owner) / 60.0
        return bucket.at + (max(0.0, 1.0 - bucket.level) / rate if rate else 0.0)

    def _bucket(self, owner: OwnerId, now: float) -> Bucket:
        bucket = self._buckets.get(owner)
        if bucket is None:
            self._forget_full(now)
            bucket = self._buckets[owner] = Bucket(float(self.tokens_per_minute(owner)), now)
        self._fill(owner, bucket, now)
        return bucket

    def _fill(self, owner: OwnerId, bucket: Bucket, now: float) -> None:
        full = float(self.tokens_per_minute(owner))
        bucket.level = min(full, bucket.level + (now - bucket.at) * full / 60.0)
        bucket.at = now

    def _forget_full(self, now: float) -> None:
        if len(self._buckets) < BUCKETS:
            return
        for owner, bucket in tuple(self._buckets.items()):
            self._fill(owner, bucket, now)
            if not bucket.waiting and bucket.level >= self.tokens_per_minute(owner):
                del self._buckets[owner]


def cost(item: Item) -> int:
    """Tokens that it may use: of a sample as many as it asks for, most of it refunded when it
    ends early."""
    size = item.sample
    return sum(item.atoms) if size is None else size.prompt_tokens + size.rows * size.max_new_tokens
