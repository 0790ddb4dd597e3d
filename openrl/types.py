"""Frozen nouns, shared by every floor. Nothing here knows a wire, a clock or a tensor library.

Names are the protocol's. Arrays are numpy, C-contiguous and read-only by convention:
whoever makes one never writes to it again, so values may be shared between threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openrl.errors import OpenRLError, UserError, without_frames

OwnerId = NewType("OwnerId", str)
SessionId = NewType("SessionId", str)
ModelId = NewType("ModelId", str)  # "{session_id}:train:{model_seq_id}"
SamplingSessionId = NewType("SamplingSessionId", str)  # "{session_id}:sample:{seq}"
RequestId = NewType("RequestId", str)  # "{model_id or sampling_session_id}:{seq_id}"
VersionId = NewType("VersionId", str)  # one immutable weight state of one model
TinkerPath = NewType("TinkerPath", str)  # "tinker://{model_id}/{kind}/{name}"

IntArray: TypeAlias = NDArray[np.int32] | NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
Array: TypeAlias = NDArray[Any]

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
StopReason = Literal["stop", "length"]


# --- what a caller sends -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Scale is `alpha / rank`. `seed` makes the initial A reproducible; None draws one. With
    `full` there is no adapter: all parameters train, and what else stands here means nothing."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0
    full: bool = False

    @property
    def shown_rank(self) -> int | None:
        """What clients are told: a full model has none."""
        return None if self.full else self.rank


FULL = LoraConfig(rank=0, full=True)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW with decoupled weight decay; `grad_clip_norm` 0 switches clipping off."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """`tokens` int32 [N]; `loss_inputs` by name: int64 or float32, [N] or [N, K]."""

    tokens: NDArray[np.int32]
    loss_inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Stop:
    """What ends a sampled sequence besides its length.

    `eos` is true unless the caller sent an empty list of stops.
    """

    eos: bool = True
    tokens: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`max_tokens` None means up to the context; `temperature` 0 is greedy; `top_k` -1 is off."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: Stop = field(default_factory=Stop)
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


# --- operations: the payload of a work ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateModel:
    base_model: str
    lora: LoraConfig
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CreateModelFromCheckpoint:
    """`lora` is the checkpoint's own, read at the door; `path` names it. `reader` is the owner
    whose access token was shown; None reads with the model's owner's own rights."""

    base_model: str
    lora: LoraConfig
    path: TinkerPath
    with_optimizer: bool
    user_metadata: Mapping[str, str] | None = None
    reader: OwnerId | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackward:
    """Gradient of the *sum* loss over `data` is added to the model's; `forward_only` adds none."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str]
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class OptimStep:
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class SaveWeights:
    """Adapter and optimizer under `tinker://{model}/weights/{name}`."""

    name: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveWeightsForSampler:
    """Adapter alone under `sampler_weights/{name}`; without a name an ephemeral sampler
    `sampling_session_id` that pins the version in memory and is never listed."""

    name: str | None
    sampling_session_id: SamplingSessionId | None
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None
    inflight: bool = False  # the sampler and the model's other inflight ones follow its saves


@dataclass(frozen=True, slots=True)
class SaveWeightsExternal:
    """Adapter alone in PEFT's layout under `external_weights/{name}`, to be downloaded; each file
    encrypted with age for the `recipients`, if there are any."""

    name: str
    recipients: tuple[str, ...] = ()
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """`reader` as in `CreateModelFromCheckpoint`."""

    path: TinkerPath
    with_optimizer: bool
    reader: OwnerId | None = None


@dataclass(frozen=True, slots=True)
class UnloadModel:
    pass


@dataclass(frozen=True, slots=True)
class Malformed:
    """A training request whose content the door could not read. It is accepted all the same,
    takes its place in its lane and fails through its future with `error`."""

    error: UserError


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Values [n] at cells of a table `shape` [rows, columns], row by row: all of its cells, or
    with `crow` int64 [rows + 1] and `col` int64 [n] those of a compressed sparse row layout."""

    values: Array
    shape: tuple[int, int]
    crow: IntArray | None = None
    col: IntArray | None = None

    def rows(self) -> IntArray:
        """The row of each cell, int64 [n]."""
        rows, columns = self.shape
        counts = columns if self.crow is None else np.diff(self.crow)
        return np.repeat(np.arange(rows, dtype=np.int64), counts)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """`prompt` int32 [P]. `seed_i = f(params.seed, i)` for sample i; admission draws a seed
    when the caller sent none, so that a replay repeats it.

    Row i of `target_prompt_logprobs` (int64 ids in a table of P - 1 rows; -1 asks for nothing)
    and of the `prompt_alt_tokens_k` draws stands for prompt position i + 1.
    `prompt_logprobs_last_n` leaves `prompt_logprobs` and their top k before the last n out.
    """

    prompt: NDArray[np.int32]
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Cells | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


TrainingOperation: TypeAlias = (
    CreateModel
    | CreateModelFromCheckpoint
    | ForwardBackward
    | OptimStep
    | SaveWeights
    | SaveWeightsForSampler
    | SaveWeightsExternal
    | LoadWeights
    | UnloadModel
    | Malformed
)
Operation: TypeAlias = TrainingOperation | Sample


@dataclass(frozen=True, slots=True)
class SamplerTarget:
    """The weights a sampling session pins: a base model, with a version of an adapter or plain.
    `path` is where the version can be read from when it is not in memory."""

    base_model: str
    version: VersionId | None = None
    path: TinkerPath | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One accepted request. `lane` orders it: a model id, or a sampling session id (unordered).

    `target` is set for `Sample` and None otherwise. `deadline_seconds` after its acceptance
    nobody wants the result any more.
    """

    request_id: RequestId
    owner: OwnerId
    session_id: SessionId
    lane: str
    seq_id: int
    operation: Operation
    target: SamplerTarget | None = None
    deadline_seconds: float | None = None


# --- results --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelCreated:
    model_id: ModelId
    base_model: str
    lora: LoraConfig


ACTIVE_TOKENS = "active_tokens:sum"


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBackwardOutput:
    """One mapping per datum, in request order; `logprobs` float32 has the shape of
    `target_tokens`. Metric names are `name:reduction`; every mean is over as many tokens as
    `ACTIVE_TOKENS` says, or over the datums when that is not there."""

    outputs: tuple[Mapping[str, Array], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimStepDone:
    """`version` counts the steps that changed the weights."""

    metrics: Mapping[str, float]
    version: int


@dataclass(frozen=True, slots=True)
class WeightsSaved:
    path: TinkerPath


@dataclass(frozen=True, slots=True)
class SamplerWeightsSaved:
    """Exactly one is set."""

    path: TinkerPath | None = None
    sampling_session_id: SamplingSessionId | None = None


@dataclass(frozen=True, slots=True)
class ExternalWeightsSaved:
    path: TinkerPath
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    path: TinkerPath
    model_id: ModelId


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    model_id: ModelId


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """`token_ids` int32 and `logprobs` float32, both [length, k], best first.
    An empty cell is id 0 with -99999.0."""

    token_ids: NDArray[np.int32]
    logprobs: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """`tokens` int32 [T] ends with the token that completed the stop; `logprobs` float32 [T],
    of the same distributions as `topk_logprobs`."""

    tokens: NDArray[np.int32]
    logprobs: FloatArray
    stop_reason: StopReason
    topk_logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AltTokens:
    """Draws at prompt positions 1, 2, …: `token_ids` int32 and `logprobs` float32 (at temperature
    1, as all logprobs of prompts), both [P - 1, k]."""

    token_ids: NDArray[np.int32]
    logprobs: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class SampleOutput:
    """`prompt_logprobs` float32 [P] at temperature 1, NaN where nothing was scored: at position 0
    and before the last n that were asked for. `target_prompt_logprobs` float32 has the layout of
    the request's, 0 for its -1."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None
    topk_prompt_logprobs: TopLogprobs | None = None
    prompt_cache_hit_tokens: int = 0
    target_prompt_logprobs: Cells | None = None
    prompt_alt_tokens: AltTokens | None = None


Result: TypeAlias = (
    ModelCreated
    | ForwardBackwardOutput
    | OptimStepDone
    | WeightsSaved
    | SamplerWeightsSaved
    | ExternalWeightsSaved
    | WeightsLoaded
    | ModelUnloaded
    | SampleOutput
)


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """The other way a request ends. It is kept for as long as an answer, and its error keeps
    nothing but words alive."""

    error: OpenRLError

    def __post_init__(self) -> None:
        without_frames(self.error)


Outcome: TypeAlias = Result | Failed
