"""Continuous batching: rows of all requests, versions and the plain base share every step.

    sampler.run(pass):  drop, preempt, resume, admit, then steps:
        waiting rows get their prompt computed (prefill), then a slot and a first token;
        rows with a slot get one more token each, all in one packed forward pass.

The scheduler decides who is in the batch. When it admits more than fits, the sampler never
runs out of memory: the youngest rows give their memory back and wait, so that the oldest
always gets on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from openrl.engines.base import DecodePass, DecodeReport, KVPool, RowId, RowReport, RowStart
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.decode_step import DecodeStep
from openrl.engines.pytorch.kvcache import BLOCK_TOKENS, KVMemory, KVShape
from openrl.engines.pytorch.lean import forward_of
from openrl.engines.pytorch.lora import Adapter
from openrl.engines.pytorch.lowrank import Banks
from openrl.engines.pytorch.prefill import Job, Prefill
from openrl.engines.pytorch.prefixes import PrefixCache, chunk_keys
from openrl.engines.pytorch.rows import Request, Row
from openrl.engines.pytorch.sampling import stream_of
from openrl.engines.pytorch.seating import Seating
from openrl.engines.pytorch.stops import Detokenizer, StopRule, StringWatch
from openrl.engines.pytorch.versions import Versions
from openrl.errors import OpenRLError
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
        pages: Path | None = None,
        idle_versions: int = 16,
        raw_logprobs: bool = False,
        prefill_tokens: int = 512,
    ) -> None:
        shape = KVShape(base.num_layers, base.num_kv_heads, base.head_dim, base.dtype)
        self._eos = tuple(eos_token_ids)
        self._text = detokenizer
        self.versions = Versions(read_adapter, pages, idle_versions)
        self.memory: KVMemory[Row] = KVMemory(shape, base.device, kv_cache_bytes)
        self._prefixes = PrefixCache(self.memory)
        self._banks = Banks(base.linears, base.device)
        forward = forward_of(base)
        self._prefill = Prefill(
            base, forward, self.memory, self._prefixes, self._banks, prefill_tokens
        )
        self._decode = DecodeStep(base, forward, self._banks, raw_logprobs)
        self._rows: dict[RowId, Row] = {}
        self._seating = Seating(self.memory, self._prefixes, self._prefill, self._decode.changed)
        self._paused: set[Row] = set()
        self._admitted = 0
        self._versions_changed = False
        self._prompts: dict[RequestId, SampleOutput] = {}
        self._ended: list[RowReport] = []

    # --- versions ---

    def pin(self, version_id: VersionId, adapter: Adapter) -> int:
        """Returns the version's size in bytes."""
        return self.versions.pin(version_id, adapter)

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

    @property
    def kv_pool(self) -> KVPool:
        return KVPool(self.kv_blocks_total, self.kv_blocks_free)

    # --- a pass ---

    def run(self, work: DecodePass) -> DecodeReport:
        self._prompts, self._ended = {}, []
        self._forget(work.drop)
        self._preempt(work.preempt)
        self._resume(work.resume)
        for start in work.admit:
            self._admit(start)
        end = time.perf_counter() + work.seconds
        with torch.no_grad():
            for _ in range(work.steps):
                if not self._step() or time.perf_counter() >= end:
                    break
        return self._report()

    def _step(self) -> bool:
        """One prefill pass and one decode step; false when no row could do anything."""
        self._seating.start_prefills()
        self._close_failed()
        self._hold_versions()
        worked = False
        if self._prefill.jobs:
            ready, logits_FV = self._prefill.advance()
            if logits_FV is not None:
                self._seat_ready(ready, logits_FV)
            worked = True
        if self._seating.grow():
            self._close(self._decode.run(self.memory))
            worked = True
        return worked

    # --- joining and leaving ---

    def _admit(self, start: RowStart) -> None:
        wanted = (RowId(start.request_id, index) for index in start.indexes)
        ids = [row for row in wanted if row not in self._rows]
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
        self._seating.waiting += rows

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
        self._seating.take_out(gone)
        for row in gone:
            self._remove(row)

    def _preempt(self, ids: Iterable[RowId]) -> None:
        rows = {self._rows[i] for i in ids if i in self._rows}
        self._seating.take_out(rows)
        self._paused |= rows

    def _resume(self, ids: Iterable[RowId]) -> None:
        back = [row for i in ids if (row := self._rows.get(i)) in self._paused and row]
        self._paused -= set(back)
        self._seating.waiting += back

    def _remove(self, row: Row) -> None:
        del self._rows[row.id]
        self._paused.discard(row)
        self._versions_changed = True
        version = row.request.version
        if version is not None and self.versions.release(version):
            self._prefixes.forget(version)

    def _seat_ready(self, ready: Sequence[Job], logits_FV: Tensor) -> None:
        """Gives the rows of complete prompts their slots and their first tokens."""
        seated: list[Row] = []
        source: list[int] = []
        for number, job in enumerate(ready):
            rows = self._seating.seat(job)
            self._report_prompt(job, rows)
            seated += rows
            source += [number] * len(rows)
        if seated:
            index = torch.tensor(source, device=logits_FV.device)
            self._close(self._decode.draw(seated, logits_FV.index_select(0, index)))
        for job in ready:
            if not any(isinstance(row.ended, Failed) for row in job.rows):
                self._prefill.keep(job)
            self._prefill.finish(job)

    def _report_prompt(self, job: Job, seated: Sequence[Row]) -> None:
        if job.request.scored or not any(row.id.sample == 0 for row in seated):
            return
        output = job.scores.output() if job.scores else SampleOutput(())
        job.request.scored = True
        self._prompts[job.request.id] = replace(output, prompt_cache_hit_tokens=job.hit_tokens)

    def _close_failed(self) -> None:
        failed, self._seating.failed = self._seating.failed, []
        self._close(failed)

    def _close(self, rows: Iterable[Row]) -> None:
        """Frees what ended rows held; their reports go out with this pass."""
        for row in rows:
            self._seating.unseat(row)
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
