"""Prompts become keys, values and first logits: packed, in chunks, each computed once.

A prompt is cut at multiples of `BLOCK_TOKENS`, whatever is cached and whoever shares the pass,
so that its numbers depend on itself alone. It is computed into a staging tensor, from which
each of the request's rows gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.decode_attention import Chunk, PrefillAttention
from openrl.engines.pytorch.kvcache import BLOCK_TOKENS, KVMemory, kv_class
from openrl.engines.pytorch.lowrank import Banks
from openrl.engines.pytorch.packing import Batch
from openrl.engines.pytorch.prefixes import PrefixCache
from openrl.engines.pytorch.prompt_scores import PromptScores
from openrl.engines.pytorch.rows import Request, Row
from openrl.engines.pytorch.segments import MIN_ROWS
from openrl.types import VersionId


@dataclass(slots=True, eq=False)
class Job:
    """One prompt on its way, for those rows of its request that wait for it.

    `done` tokens of it are in `staged` [layers, 2, kv_heads, capacity, head_dim].
    """

    request: Request
    rows: list[Row]
    staged: Tensor
    scores: PromptScores | None
    done: int = 0
    hit_tokens: int = 0

    @property
    def length(self) -> int:
        return len(self.request.prompt)

    @property
    def capacity(self) -> int:
        return self.staged.shape[3]

    def pending_keys(self) -> tuple[bytes, ...]:
        return self.request.keys[self.done // BLOCK_TOKENS :]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Tokens `offset … offset + size` of a job at rows `start …` of the batch."""

    job: Job
    start: int
    offset: int
    size: int


def _shareable(request: Request) -> tuple[bytes, ...]:
    """The keys of chunks that need not be computed when they are cached: none after the first
    token that is to be scored."""
    first = request.first_scored
    return request.keys if first is None else request.keys[: first // BLOCK_TOKENS]


class Prefill:
    """Runs the jobs in `jobs`, the oldest first, at most `pass_tokens` tokens at a time."""

    def __init__(
        self,
        base: BaseModel,
        forward: Callable[[Batch], Tensor],
        memory: KVMemory[Row],
        prefixes: PrefixCache,
        banks: Banks,
        pass_tokens: int,
    ) -> None:
        self._base = base
        self._hidden = forward
        self._memory = memory
        self._prefixes = prefixes
        self._banks = banks
        self._pass_tokens = pass_tokens
        self.jobs: list[Job] = []

    def pending_tokens(self) -> int:
        return sum(job.length - job.done for job in self.jobs)

    def wants_more(self) -> bool:
        return self.pending_tokens() < self._pass_tokens

    def shares_with_running(self, request: Request) -> bool:
        """A running job is about to compute a chunk that this prompt could take from it."""
        keys = _shareable(request)
        hits = self._prefixes.hits(keys)
        if hits == len(keys):
            return False
        wanted = keys[hits]
        return any(wanted in job.pending_keys() for job in self.jobs)

    def start(self, request: Request, rows: Sequence[Row]) -> bool:
        """False when the budget has no room for the staging."""
        capacity = kv_class(len(request.prompt))
        if not self._memory.reserve(capacity):
            return False
        shape = self._memory.shape
        staged = torch.zeros(
            (shape.layers, 2, shape.kv_heads, capacity, shape.head_dim),
            dtype=shape.dtype,
            device=self._memory.device,
        )
        scores = None if request.first_scored is None else PromptScores(request.sample)
        job = Job(request, list(rows), staged, scores)
        keys = request.keys[: self._prefixes.hits(_shareable(request))]
        self._prefixes.fetch(keys, staged)
        job.done = job.hit_tokens = len(keys) * BLOCK_TOKENS
        self.jobs.append(job)
        return True

    def forget(self, rows: set[Row]) -> None:
        """Takes rows out of their jobs; a job without rows is dropped."""
        for job in self.jobs[:]:
            job.rows = [row for row in job.rows if row not in rows]
            if not job.rows:
                self.finish(job)

    def finish(self, job: Job) -> None:
        self.jobs.remove(job)
        self._memory.unreserve(job.capacity)

    def keep(self, job: Job) -> None:
        """Makes a sound prompt's chunks available to others."""
        self._prefixes.store(job.request.version, job.request.keys, job.staged)

    def advance(self) -> tuple[list[Job], Tensor | None]:
        """One packed pass; the jobs whose prompts are complete now, and the fp32 logits [F, V]
        after each one's last token."""
        pieces = self._cut()
        hidden_TD = self._forward(pieces)
        self._score([piece for piece in pieces if piece.job.scores is not None], hidden_TD)
        ready: list[Job] = []
        last: list[int] = []
        for piece in pieces:
            piece.job.done += piece.size
            if piece.job.done == piece.job.length:
                ready.append(piece.job)
                last.append(piece.start + piece.size - 1)
        if not ready:
            return [], None
        versions = [job.request.version for job in ready]
        return ready, self._logits(hidden_TD, last, versions)

    def _cut(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        start = 0
        for job in self.jobs:
            offset = job.done
            while offset < job.length and start < self._pass_tokens:
                size = min(BLOCK_TOKENS, job.length - offset)
                pieces.append(_Piece(job, start, offset, size))
                start, offset = start + size, offset + size
        return pieces

    def _forward(self, pieces: Sequence[_Piece]) -> Tensor:
        device = self._base.device
        tokens = [p.job.request.prompt[p.offset : p.offset + p.size] for p in pieces]
        places = [np.arange(p.offset, p.offset + p.size) for p in pieces]
        versions = [p.job.request.version for p in pieces for _ in range(p.size)]
        filler = max(0, MIN_ROWS - len(versions))
        tail = [np.zeros(filler, dtype=np.int64)]
        attend = PrefillAttention([Chunk(p.start, p.size, p.offset, p.job.staged) for p in pieces])
        batch = Batch(
            torch.from_numpy(np.concatenate([*tokens, *tail]).astype(np.int64)).to(device),
            torch.from_numpy(np.concatenate([*places, *tail]).astype(np.int64)).to(device),
            self._banks.rows(versions, len(versions) + filler),
            attend,
        )
        return self._hidden(batch)

    def _logits(
        self, hidden_TD: Tensor, rows: list[int], versions: Sequence[VersionId | None]
    ) -> Tensor:
        padded = rows + [rows[0]] * (MIN_ROWS - len(rows))
        index = torch.tensor(padded, device=hidden_TD.device)
        adapters = self._banks.rows(versions, len(padded))
        return self._base.logits(hidden_TD.index_select(0, index), adapters)[: len(rows)]

    def _score(self, pieces: Sequence[_Piece], hidden_TD: Tensor) -> None:
        for piece in pieces:
            assert piece.job.scores is not None
            if piece.offset + piece.size <= piece.job.scores.first:
                continue
            rows = list(range(piece.start, piece.start + piece.size))
            versions = [piece.job.request.version] * piece.size
            piece.job.scores.add(piece.offset, self._logits(hidden_TD, rows, versions))
