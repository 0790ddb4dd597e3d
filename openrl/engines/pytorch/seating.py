"""Who has room in the memory for keys and values, and who waits for it.

    waiting -> (prefill job) -> seated in a slot -> ended, preempted, or parked: waiting again

Older rows come first everywhere. When a row cannot grow, the youngest gives its memory back, so
that the oldest always gets on: nothing runs out of memory and nothing waits in a circle. A row
that does not fit even alone fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openrl.engines.pytorch.kvcache import KVMemory, kv_class
from openrl.engines.pytorch.prefill import Job, Prefill
from openrl.engines.pytorch.prefixes import PrefixCache
from openrl.engines.pytorch.rows import Request, Row
from openrl.errors import OutOfMemory
from openrl.types import Failed, RequestId


class Seating:
    """`changed` is called whenever a row joins, leaves or moves within the decode batch.
    `failed` collects rows that can never be seated, for the caller to take."""

    def __init__(
        self,
        memory: KVMemory[Row],
        prefixes: PrefixCache,
        prefill: Prefill,
        changed: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._prefixes = prefixes
        self._prefill = prefill
        self._changed = changed
        self.waiting: list[Row] = []
        self.failed: list[Row] = []

    def take_out(self, rows: set[Row]) -> None:
        """Out of the batch wherever they are; their tokens stay with them."""
        if not rows:
            return
        self.waiting = [row for row in self.waiting if row not in rows]
        self._prefill.forget(rows)
        for row in rows:
            self.unseat(row)

    def unseat(self, row: Row) -> None:
        if row.slot is not None:
            poisoned = isinstance(row.ended, Failed)
            self._memory.release(row.slot, poisoned=poisoned)
            row.slot, row.filled = None, 0
            self._changed()

    def _park(self, row: Row) -> None:
        """Takes a running row's memory; it waits for its turn by age."""
        self.unseat(row)
        self.waiting.append(row)

    def start_prefills(self) -> None:
        """Oldest first; a prompt that does not fit yet holds the younger ones back."""
        self.waiting.sort(key=lambda row: row.order)
        while self.waiting and self._prefill.wants_more():
            request = self._next_unshared()
            if request is None:
                return
            mates = [row for row in self.waiting if row.request is request]
            seats = self._seats(request, mates)
            if not seats:
                return
            if not self._prefill.start(request, seats):
                return
            self.waiting = [row for row in self.waiting if row not in set(seats)]

    def _next_unshared(self) -> Request | None:
        """The oldest waiting request whose prefix nobody else is computing right now."""
        seen: set[RequestId] = set()
        for row in self.waiting:
            if row.request.id not in seen and not self._prefill.shares_with_running(row.request):
                return row.request
            seen.add(row.request.id)
        return None

    def _seats(self, request: Request, mates: list[Row]) -> list[Row]:
        """As many of the rows as there is memory for, beside what running jobs will take."""
        free = self._memory.unallocated + self._prefixes.tokens - kv_class(len(request.prompt))
        free += self._memory.spare(kv_class(mates[0].length + 1))
        for job in self._prefill.jobs:
            free -= sum(kv_class(row.length + 1) for row in job.rows)
        seats: list[Row] = []
        for row in mates:
            need = kv_class(row.length + 1)
            if free < need:
                break
            free -= need
            seats.append(row)
        if not seats and self._is_idle():
            self._fail_too_large(mates[0])
        return seats

    def _is_idle(self) -> bool:
        return not self._prefill.jobs and next(self._seated(), None) is None

    def _seated(self) -> Iterator[Row]:
        for shelf in self._memory.shelves():
            for slot in shelf.slots:
                yield slot.owner

    def _fail_too_large(self, row: Row) -> None:
        need = kv_class(len(row.request.prompt)) + kv_class(row.length + 1)
        self.waiting.remove(row)
        row.ended = Failed(
            OutOfMemory(
                f"sample {row.id.sample} does not fit into the memory for keys and values even "
                f"alone: {row.length} tokens need room for {need} (prompt and sequence), and "
                f"there is {self._memory.total}; raise kv_cache_bytes or shorten the sequence"
            )
        )
        self.failed.append(row)

    def seat(self, job: Job) -> list[Row]:
        """Gives the job's rows slots with its prompt; those without room wait again."""
        seated: list[Row] = []
        for number, row in enumerate(job.rows):
            row.slot = self._memory.allocate(row, row.length + 1, len(job.rows) - number)
            if row.slot is None:
                self._park(row)
                continue
            shelf, index = row.slot.shelf, row.slot.index
            shelf.kv[:, :, index, :, : job.length] = job.staged[:, :, :, : job.length]
            row.filled = job.length
            seated.append(row)
        self._changed()
        return seated

    def grow(self) -> bool:
        """Room for one more token in every row; false when no row has a slot."""
        full = [row for row in self._seated() if row.slot and row.filled >= row.slot.capacity]
        for number, row in enumerate(sorted(full, key=lambda row: row.order)):
            self._make_room(row, len(full) - number)
        return next(self._seated(), None) is not None

    def _make_room(self, row: Row, company: int) -> None:
        """Takes the youngest rows' memory until this one can grow, or until it is the youngest
        itself."""
        while row.slot is not None:
            self._changed()
            if self._memory.move(row.slot, row.filled + 1, row.filled, company):
                return
            self._park(max(self._seated(), key=lambda other: other.order))
