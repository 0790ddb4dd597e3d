"""What the scheduler asks of an engine, and what it gets back. Torch-free.

An engine is driven by one thread, one call at a time: `describe` (fast, before the weights
are there), `load`, then `execute` for each pass, `close`. It never decides who runs: the
scheduler admits and preempts, the engine only executes and reports what it measured.

A pass holds work of one kind, of any number of models over one set of base weights.
Whatever goes wrong with one request is reported as that request's `Failed`. An engine raises
only when it could not begin: models and scratches are what they were before the pass, and the
scheduler has each model's part of it run alone. `EngineDied` says that it cannot go on at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NewType, Protocol, TypeAlias

from openrl.errors import OpenRLError
from openrl.types import (
    AdamParams,
    Datum,
    Failed,
    ForwardBackwardOutput,
    LoraConfig,
    ModelId,
    OptimStepDone,
    RequestId,
    Sample,
    SampledSequence,
    SampleOutput,
    VersionId,
)

WeightsKey = NewType("WeightsKey", str)
"""One set of base weights in memory. Several public names may share one key."""


# --- what an engine can do ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """Known before the weights are: read from the model's configuration files.

    `context_length` counts prompt and sampled tokens together; `tokenizer_id` is what a client
    may hand to `AutoTokenizer`.
    """

    name: str
    weights: WeightsKey
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_id: str
    max_lora_rank: int
    architecture: str


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`fraction` is in [0, 1]; `stage` is for people. With an `error` these weights cannot be
    loaded."""

    weights: WeightsKey
    stage: str
    fraction: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KVPool:
    """Memory for keys and values, in blocks."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine has room for now, reported with each finished pass.

    KV memory is counted in blocks of `block_tokens` tokens, all of it together; base weights
    with memory of their own, which no other's rows can use, are in `kv_pools`, the same ones in
    every report. `slots_total` are the models' adapters, `slots_used` of them in the device's
    memory; the others are paged out. `headroom_bytes` is what the device has free, 0 where nobody
    knows.
    """

    kv_blocks_total: int
    kv_blocks_free: int
    block_tokens: int
    max_rows: int
    slots_total: int
    slots_used: int
    headroom_bytes: int
    kv_pools: Mapping[WeightsKey, KVPool] = field(default_factory=dict)

    def pool(self, weights: WeightsKey) -> KVPool:
        """Where rows of these weights have their keys and values."""
        common = KVPool(self.kv_blocks_total, self.kv_blocks_free)
        return self.kv_pools.get(weights, common)


# --- training passes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class AtomPiece:
    """One atom of one forward_backward: the datums `start … start + len(data)` of the request.

    The engine adds gradients to the request's scratch and moves them to the model with the
    `last` atom; when an atom fails, the scratch is dropped and the request's later atoms are
    never sent. A request may also be cut short between passes without a word: its scratch is
    dropped when the model's next pass is another request's.
    """

    request_id: RequestId
    model_id: ModelId
    start: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class TrainPass:
    weights: WeightsKey
    pieces: tuple[AtomPiece, ...]


@dataclass(frozen=True, slots=True)
class OptimPiece:
    request_id: RequestId
    model_id: ModelId
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class OptimPass:
    weights: WeightsKey
    pieces: tuple[OptimPiece, ...]


# --- control passes: one model's adapter at a time -------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateAdapter:
    """B is zero and A is drawn from `lora.seed`: a fresh adapter equals the base bit for bit.
    With `source` the weights are read from that checkpoint directory instead."""

    model_id: ModelId
    lora: LoraConfig
    source: Path | None = None
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class DropAdapter:
    model_id: ModelId


@dataclass(frozen=True, slots=True)
class SaveAdapter:
    """Writes `adapter_model.safetensors`, `adapter_config.json` (PEFT's layout) and, with the
    optimizer, `optimizer.safetensors` into `directory`, which exists and is empty."""

    model_id: ModelId
    directory: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Replaces a model's weights, and its optimizer state by the checkpoint's or a fresh one.
    Accumulated gradients are dropped. Nothing changes when the checkpoint does not fit."""

    model_id: ModelId
    source: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class PinVersion:
    """Makes an immutable copy of the model's weights under `version_id`."""

    model_id: ModelId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class DropVersion:
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class SnapshotAdapter:
    """All that a model is, copied now: weights, optimizer, counts, and what gradient has been
    accumulated. It is written to `directory`, which is made for it, while other passes run;
    `Executed.written` tells when it is there. A model without steps has a snapshot too."""

    model_id: ModelId
    directory: Path


@dataclass(frozen=True, slots=True)
class SnapshotVersion:
    """A pinned version, written to `directory` like a snapshot but in PEFT's layout: it is an
    `AdapterSource.path` from then on."""

    version_id: VersionId
    directory: Path


@dataclass(frozen=True, slots=True)
class FinishSnapshots:
    """Returns when all snapshots that were asked for are written, or have failed."""


@dataclass(frozen=True, slots=True)
class RestoreAdapter:
    """A model that is not there, as it was when the snapshot in `directory` was taken, to the
    bit. Fails when the snapshot is not whole."""

    model_id: ModelId
    lora: LoraConfig
    directory: Path


@dataclass(frozen=True, slots=True)
class PageOut:
    """Nobody will need the model for a while. It comes back by itself when somebody does."""

    model_id: ModelId


Control: TypeAlias = (
    CreateAdapter
    | DropAdapter
    | SaveAdapter
    | LoadAdapter
    | PinVersion
    | DropVersion
    | SnapshotAdapter
    | SnapshotVersion
    | FinishSnapshots
    | RestoreAdapter
    | PageOut
)


@dataclass(frozen=True, slots=True)
class ControlPass:
    weights: WeightsKey
    request_id: RequestId
    control: Control


# --- sampling passes ------------------------------------------------------------------------


class RowId(NamedTuple):
    """One sequence of one sample request; `sample` counts from 0 to num_samples - 1."""

    request_id: RequestId
    sample: int


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A pinned version. When it is not in memory the engine reads it from `path`."""

    version_id: VersionId
    path: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowStart:
    """Samples `indexes` of one request join the batch; they share one prefill of its prompt.

    Prompt logprobs are computed with the rows that hold index 0.
    """

    request_id: RequestId
    sample: Sample
    adapter: AdapterSource | None
    indexes: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodePass:
    """A slice of at most `steps` decode steps over all running rows, and no further one once
    `seconds` have passed.

    In this order: `drop` forgets rows for good; `preempt` takes rows out of the batch and frees
    their KV but keeps their tokens; `resume` brings preempted rows back with identical bits;
    `admit` starts new ones. The slice ends early when no row is left.
    """

    weights: WeightsKey
    admit: tuple[RowStart, ...] = ()
    resume: tuple[RowId, ...] = ()
    preempt: tuple[RowId, ...] = ()
    drop: tuple[RowId, ...] = ()
    steps: int = 1
    seconds: float = math.inf


Pass: TypeAlias = TrainPass | OptimPass | ControlPass | DecodePass


# --- reports --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TrainReport:
    """One outcome per piece, in the pass's order."""

    outcomes: tuple[ForwardBackwardOutput | Failed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OptimReport:
    outcomes: tuple[OptimStepDone | Failed, ...]


@dataclass(frozen=True, slots=True)
class ControlReport:
    """`error` None means done; `size_bytes` is what a pinned version takes."""

    error: OpenRLError | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RowReport:
    """`new_tokens` were made in this slice; `kv_blocks` are held now. `ended` is the whole
    sequence when the row is finished, `Failed` when it cannot be, None while it runs."""

    row: RowId
    new_tokens: int
    kv_blocks: int
    ended: SampledSequence | Failed | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeReport:
    """`prompts` holds, for requests whose index 0 was prefilled in this slice, an output with
    no sequences: its prompt logprobs and its cache hits."""

    rows: tuple[RowReport, ...]
    prompts: Mapping[RequestId, SampleOutput]


Report: TypeAlias = TrainReport | OptimReport | ControlReport | DecodeReport


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a snapshot: it is in `directory` whole and durable, or `error` says why not."""

    directory: Path
    size_bytes: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """`seconds` is the measured engine time of the pass; `written` are the snapshots that have
    ended since the last pass, also those of other base weights."""

    report: Report
    seconds: float
    capacity: Capacity
    written: tuple[Written, ...] = ()


class Engine(Protocol):
    """See the module's docstring for the order of calls."""

    def describe(self) -> Sequence[BaseModelInfo]:
        """Reads configuration files only. Raises `UserError` for a model that is not there."""
        ...

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        """Loads the base weights; blocks until they are there. Weights that cannot be loaded are
        told by a progress with an `error`, and get no passes; raises when none can."""
        ...

    def execute(self, work: Pass) -> Executed: ...

    def close(self) -> None: ...
