"""The vocabulary of the pure core: events go in, decisions come out.

The core knows requests by id and size alone; payloads stay with the actor. Times are seconds
on one monotonic clock that the caller reads. `state.State.handle(event, now) -> [Decision]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

from openrl.engines.base import Capacity, RowId, WeightsKey
from openrl.errors import OpenRLError
from openrl.types import OwnerId, RequestId, SessionId

PassId = NewType("PassId", int)

Kind = Literal["forward_backward", "optim_step", "control", "sample"]


# --- what is scheduled ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleSize:
    """Tokens of the prompt, rows (num_samples), and the most new tokens of each row."""

    prompt_tokens: int
    rows: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Item:
    """A request as the core sees it.

    `lane` orders items by `seq_id`, except for samples, which are unordered. `atoms` holds the
    tokens of each atom of a forward_backward, in order. `deadline` is when the caller stops
    caring.
    """

    request_id: RequestId
    owner: OwnerId
    session_id: SessionId
    lane: str
    seq_id: int
    kind: Kind
    weights: WeightsKey
    atoms: tuple[int, ...] = ()
    sample: SampleSize | None = None
    deadline: float | None = None


# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaneOpened:
    """A model exists from here on; its first expected seq_id is `first_seq`."""

    lane: str
    first_seq: int


@dataclass(frozen=True, slots=True)
class LaneClosed:
    """Nothing more will come; queued items of the lane are refused with `error`."""

    lane: str
    error: OpenRLError


@dataclass(frozen=True, slots=True)
class Submitted:
    item: Item


@dataclass(frozen=True, slots=True)
class SeqConsumed:
    """A seq_id that will never run, since its request was refused at the door."""

    lane: str
    seq_id: int


@dataclass(frozen=True, slots=True)
class LanePaused:
    """Nothing more of the lane starts until it is resumed; what the engine has goes on. A
    sampling session without requests has no lane, and nothing to pause."""

    lane: str


@dataclass(frozen=True, slots=True)
class LaneResumed:
    lane: str


@dataclass(frozen=True, slots=True)
class WeightChanged:
    """The owner's part of the engine, beside the others' weights, from now on."""

    owner: OwnerId
    weight: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Waiting work goes at once, rows leave the engine with its next decode pass. Of training
    work the running pass ends first: when it held the last part, the answer comes as usual."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The base weights are loaded."""

    capacity: Capacity


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine cannot go on; everything running is refused with `error`."""

    error: OpenRLError


@dataclass(frozen=True, slots=True)
class PartEnded:
    """One part of a train, optim or control pass: an atom, a step, an order."""

    request_id: RequestId
    ok: bool


@dataclass(frozen=True, slots=True)
class RowProgress:
    """What one row did in a decode slice; `kv_blocks` are held after it."""

    row: RowId
    new_tokens: int
    kv_blocks: int
    ended: bool
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Finished:
    """A pass came back; `seconds` is measured engine time. `capacity` is None when the engine
    did not say: then it is as it was."""

    pass_id: PassId
    seconds: float
    capacity: Capacity | None
    parts: tuple[PartEnded, ...] = ()
    rows: tuple[RowProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """The time asked for by `WakeAt` has come."""


Event: TypeAlias = (
    LaneOpened
    | LaneClosed
    | Submitted
    | LanePaused
    | LaneResumed
    | WeightChanged
    | SeqConsumed
    | Cancelled
    | EngineReady
    | EngineLost
    | Finished
    | Tick
)


# --- decisions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTrain:
    pass_id: PassId
    weights: WeightsKey
    atoms: tuple[tuple[RequestId, int], ...]  # (request, index of the atom), ordered by lane


@dataclass(frozen=True, slots=True)
class StartOptim:
    pass_id: PassId
    weights: WeightsKey
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class StartControl:
    pass_id: PassId
    weights: WeightsKey
    request: RequestId


@dataclass(frozen=True, slots=True)
class StartDecode:
    """See `engines.base.DecodePass`; `admit` pairs a request with the rows that join."""

    pass_id: PassId
    weights: WeightsKey
    admit: tuple[tuple[RequestId, tuple[int, ...]], ...]
    resume: tuple[RowId, ...]
    preempt: tuple[RowId, ...]
    drop: tuple[RowId, ...]
    steps: int
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Resolve:
    """Every part of the request has come back (or one has failed): answer it."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request will not run (any further): answer it with `error`."""

    request_id: RequestId
    error: OpenRLError


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Tick` at this time; a later WakeAt replaces an earlier one."""

    when: float


Start: TypeAlias = StartTrain | StartOptim | StartControl | StartDecode
Decision: TypeAlias = Start | Resolve | Refuse | WakeAt
