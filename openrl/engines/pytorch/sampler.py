"""Continuous batching: rows of all requests, versions and the plain base share every step.

    sampler.run(pass):  drop, preempt, resume, admit, then steps:
        waiting rows get their prompt computed (prefill), then a slot and a first token;
        rows with a slot get one more token each, all in one packed forward pass.

The scheduler decides who is in the batch. When it admits more than fits, the sampler never
runs out of memory: the youngest rows give their memory back and wait, so that the oldest
always gets on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from openrl.engines.base import DecodePass, DecodeReport, RowId, RowReport, RowStart
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.decode_step import DecodeStep
from openrl.engines.pytorch.kvcache import BLOCK_TOKENS, KVMemory, KVShape, kv_class
from openrl.engines.pytorch.lora import Adapter
from openrl.engines.pytorch.lowrank import Banks
from openrl.engines.pytorch.prefill import Job, Prefill
from openrl.engines.pytorch.prefixes import PrefixCache, chunk_keys
from openrl.engines.pytorch.rows import Request, Row
from openrl.engines.pytorch.sampling import stream_of
from openrl.engines.pytorch.stops import Detokenizer, StopRule, StringWatch
from openrl.engines.pytorch.versions import Versions
from openrl.errors import OpenRLError, OutOfMemory
from openrl.types import Failed, RequestId, SampleOutput, VersionId


class Sampler:
    """All sampling over one set of base weights. Used by the engine's thread alone."""

    def __init__(
        self,
        base: BaseModel,
        *,
        kv_cache_bytes: int,
        eos_token_ids: Sequence[int],
        detokenizer: Detokenizer,
        read_adapter: Callable[[Path], Adapter],
        raw_logprobs: bool = False,
        prefill_tokens: int = 512,
    ) -> None:
        shape = KVShape(base.num_layers, base.num_kv_heads, base.head_dim, base.dtype)
        self._eos = tuple(eos_token_ids)
        self._text = detokenizer
        self.versions = Versions(read_adapter)
        self.memory: KVMemory[Row] = KVMemory(shape, base.device, kv_cache_bytes)
        self._prefixes = PrefixCache(self.memory)
        self._banks = Banks(base.linears, base.device)
        self._prefill = Prefill(base, self.memory, self._prefixes, self._banks, prefill_tokens)
        self._decode = DecodeStep(base, self._banks, raw_logprobs)
        self._rows: dict[RowId, Row] = {}
        self._waiting: list[Row] = []
        self._paused: set[Row] = set()
        self._admitted = 0
        self._versions_changed = False
        self._prompts: dict[RequestId, SampleOutput] = {}
        self._ended: list[RowReport] = []

    # --- versions ---

    def pin(self, version_id: VersionId, adapter: Adapter) -> None:
        self.versions.pin(version_id, adapter)

    def drop_version(self, version_id: VersionId) -> None:
        """Rows that run on it may finish."""
        self.versions.drop(version_id)
        self._prefixes.forget(version_id)

    # --- capacity ---

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def kv_blocks_total(self) -> int:
        return self.memory.total // BLOCK_TOKENS

    @property
    def kv_blocks_free(self) -> int:
        """Cached prefixes count as free: they go when somebody needs the room."""
        memory = self.memory
        return (memory.unallocated + memory.idle() + self._prefixes.tokens) // BLOCK_TOKENS

    # --- a pass ---

    def run(self, work: DecodePass) -> DecodeReport:
        self._prompts, self._ended = {}, []
        self._forget(work.drop)
        self._preempt(work.preempt)
        self._resume(work.resume)
        for start in work.admit:
            self._admit(start)
        self._waiting.sort(key=lambda row: row.order)
        with torch.no_grad():
            for _ in range(work.steps):
                if not self._step():
                    break
        return self._report()

    def _step(self) -> bool:
        """One prefill pass and one decode step; false when no row could do anything."""
        self._start_prefills()
        self._hold_versions()
        worked = False
        if self._prefill.jobs:
            ready, logits_FV = self._prefill.advance()
            if logits_FV is not None:
                self._seat_ready(ready, logits_FV)
            worked = True
        if self._grow():
            self._close(self._decode.run(self.memory))
            worked = True
        return worked

    # --- joining and leaving ---

    def _admit(self, start: RowStart) -> None:
        ids = [RowId(start.request_id, index) for index in start.indexes]
        try:
            request = self._request(start)
            rows = [self._row(i, request, start) for i in ids]
        except OpenRLError as error:
            self._ended += [RowReport(i, 0, 0, Failed(error)) for i in ids]
            return
        for row in rows:
            if start.adapter is not None:
                self.versions.acquire(start.adapter)
            self._rows[row.id] = row
        self._versions_changed = True
        self._waiting += rows

    def _request(self, start: RowStart) -> Request:
        """One object per admission: rows of a request that join later need no link to it."""
        sample, source = start.sample, start.adapter
        adapter = None
        if source is not None:
            adapter = self.versions.acquire(source)
            self.versions.release(source.version_id)
        return Request(
            start.request_id,
            sample,
            source.version_id if source else None,
            adapter,
            StopRule.of(sample.params.stop, self._eos),
            chunk_keys(source.version_id if source else None, sample.prompt),
            scored=0 not in start.indexes,
        )

    def _row(self, row_id: RowId, request: Request, start: RowStart) -> Row:
        watch = None
        if request.rule.strings:
            watch = StringWatch(request.rule, self._text, request.prompt[-8:].tolist())
        self._admitted += 1
        stream = stream_of(request.sample.params.seed, row_id.sample)
        return Row(row_id, request, stream, start.max_new_tokens, self._admitted, watch)

    def _forget(self, ids: Iterable[RowId]) -> None:
        gone = {self._rows[i] for i in ids if i in self._rows}
        if not gone:
            return
        self._take_out(gone)
        for row in gone:
            self._remove(row)

    def _preempt(self, ids: Iterable[RowId]) -> None:
        rows = {self._rows[i] for i in ids if i in self._rows}
        self._take_out(rows)
        self._paused |= rows

    def _resume(self, ids: Iterable[RowId]) -> None:
        back = [row for i in ids if (row := self._rows.get(i)) in self._paused and row]
        self._paused -= set(back)
        self._waiting += back

    def _take_out(self, rows: set[Row]) -> None:
        """Out of the batch wherever they are; their tokens stay with them."""
        if not rows:
            return
        self._waiting = [row for row in self._waiting if row not in rows]
        self._prefill.forget(rows)
        for row in rows:
            self._unseat(row)

    def _unseat(self, row: Row) -> None:
        if row.slot is not None:
            poisoned = isinstance(row.ended, Failed)
            self.memory.release(row.slot, poisoned=poisoned)
            row.slot, row.filled = None, 0
            self._decode.changed()

    def _remove(self, row: Row) -> None:
        del self._rows[row.id]
        self._paused.discard(row)
        self._versions_changed = True
        version = row.request.version
        if version is not None and self.versions.release(version):
            self._prefixes.forget(version)

    def _park(self, row: Row) -> None:
        """Takes a running row's memory; it waits for its turn by age."""
        self._unseat(row)
        self._waiting.append(row)
        self._waiting.sort(key=lambda other: other.order)

    # --- prefill ---

    def _start_prefills(self) -> None:
        """Oldest first; a prompt that does not fit yet holds the younger ones back."""
        while self._waiting and self._prefill.wants_more():
            request = self._next_unshared()
            if request is None:
                return
            mates = [row for row in self._waiting if row.request is request]
            seats = self._seats(request, mates)
            if not seats:
                return
            if not self._prefill.start(request, seats):
                return
            self._waiting = [row for row in self._waiting if row not in set(seats)]

    def _next_unshared(self) -> Request | None:
        """The oldest waiting request whose prefix nobody else is computing right now."""
        seen: set[RequestId] = set()
        for row in self._waiting:
            if row.request.id not in seen and not self._prefill.shares_with_running(row.request):
                return row.request
            seen.add(row.request.id)
        return None

    def _seats(self, request: Request, mates: list[Row]) -> list[Row]:
        """As many of the rows as there is memory for, beside what running jobs will take."""
        free = self.memory.unallocated + self._prefixes.tokens - kv_class(len(request.prompt))
        free += self.memory.spare(kv_class(mates[0].length + 1))
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
        return not self._prefill.jobs and not any(row.slot for row in self._rows.values())

    def _fail_too_large(self, row: Row) -> None:
        need = kv_class(len(row.request.prompt)) + kv_class(row.length + 1)
        self._waiting.remove(row)
        row.ended = Failed(
            OutOfMemory(
                f"sample {row.id.sample} does not fit into the memory for keys and values even "
                f"alone: {row.length} tokens need room for {need} (prompt and sequence), and "
                f"there is {self.memory.total}; raise kv_cache_bytes or shorten the sequence"
            )
        )
        self._close([row])

    def _seat_ready(self, ready: Sequence[Job], logits_FV: Tensor) -> None:
        """Gives the rows of complete prompts their slots and their first tokens."""
        seated: list[Row] = []
        source: list[int] = []
        for number, job in enumerate(ready):
            rows = self._seat(job)
            seated += rows
            source += [number] * len(rows)
        if seated:
            index = torch.tensor(source, device=logits_FV.device)
            self._close(self._decode.draw(seated, logits_FV.index_select(0, index)))
        for job in ready:
            if not any(isinstance(row.ended, Failed) for row in job.rows):
                self._prefill.keep(job)
            self._prefill.finish(job)

    def _seat(self, job: Job) -> list[Row]:
        request = job.request
        seated: list[Row] = []
        for number, row in enumerate(job.rows):
            row.slot = self.memory.allocate(row, row.length + 1, len(job.rows) - number)
            if row.slot is None:
                self._park(row)
                continue
            shelf, index = row.slot.shelf, row.slot.index
            shelf.kv[:, :, index, :, : job.length] = job.staged[:, :, :, : job.length]
            row.filled = job.length
            seated.append(row)
            if row.id.sample == 0 and not request.scored:
                self._report_prompt(job)
        self._decode.changed()
        return seated

    def _report_prompt(self, job: Job) -> None:
        output = job.scores.output() if job.scores else SampleOutput(())
        job.request.scored = True
        self._prompts[job.request.id] = SampleOutput(
            (), output.prompt_logprobs, output.topk_prompt_logprobs, job.hit_tokens
        )

    # --- decode ---

    def _grow(self) -> bool:
        """Room for one more token in every row; false when no row has a slot."""
        full = [
            row
            for shelf in self.memory.shelves()
            for slot in shelf.slots
            if (row := slot.owner).filled >= shelf.capacity
        ]
        for row in sorted(full, key=lambda row: row.order):
            self._make_room(row)
        return any(shelf.slots for shelf in self.memory.shelves())

    def _make_room(self, row: Row) -> None:
        """Takes the youngest rows' memory until this one can grow, or until it is the youngest
        itself."""
        while row.slot is not None:
            self._decode.changed()
            if self.memory.move(row.slot, row.filled + 1, row.filled):
                return
            running = (r for r in self._rows.values() if r.slot is not None)
            self._park(max(running, key=lambda r: r.order))

    def _close(self, rows: Iterable[Row]) -> None:
        """Frees what ended rows held; their reports go out with this pass."""
        for row in rows:
            self._unseat(row)
            self._remove(row)
            self._ended.append(RowReport(row.id, row.new_tokens, 0, row.ended))

    def _hold_versions(self) -> None:
        """The banks hold the versions of all rows."""
        if not self._versions_changed:
            return
        adapters = {
            row.request.version: row.request.adapter
            for row in self._rows.values()
            if row.request.version is not None and row.request.adapter is not None
        }
        if self._banks.hold(adapters):
            self._decode.changed()
        self._versions_changed = False

    # --- report ---

    def _report(self) -> DecodeReport:
        reports = self._ended
        for row in self._rows.values():
            blocks = row.slot.capacity // BLOCK_TOKENS if row.slot else 0
            reports.append(RowReport(row.id, row.new_tokens, blocks))
            row.new_tokens = 0
        return DecodeReport(tuple(reports), self._prompts)
