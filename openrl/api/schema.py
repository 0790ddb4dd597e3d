"""The shapes of request bodies, the same for JSON and msgpack; msgspec stays in this room and
in `codec`.

Old SDKs leave out every field with a default, and all leave out nulls or send them as they
please: so `type` is never required and every optional field has its default here. A field
that changes what is computed is never ignored: the structs that hold such fields forbid
unknown ones.

In msgpack, wherever JSON has a list of numbers, there may be a binary (`Bin`) or a tensor object.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

Id: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SeqId: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bin: TypeAlias = memoryview  # in JSON: base64
Numbers: TypeAlias = Bin | list[int | float]


class Body(Struct, frozen=True):
    """Unknown fields are ignored."""


class Strict(Struct, frozen=True, forbid_unknown_fields=True):
    """An unknown field is an error that names it."""


# --- tensors and prompts --------------------------------------------------------------------


class TensorData(Strict, frozen=True):
    data: Numbers
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: Numbers | None = None
    sparse_col_indices: Numbers | None = None


class Chunk(Body, frozen=True):
    """Without `type` it is text. The fields of images and audio are not read: see `prompts`."""

    type: str = "encoded_text"
    tokens: Numbers | TensorData | None = None


class ModelInput(Body, frozen=True):
    chunks: list[Chunk]


class Datum(Body, frozen=True):
    """Provenance spans are accepted and not used."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


# --- sessions -------------------------------------------------------------------------------


class ClientConfig(Body, frozen=True):
    sdk_version: str = ""


class CreateSession(Body, frozen=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(Body, frozen=True):
    session_id: Id


class FinishReason(Body, frozen=True):
    type: str


class FinishSession(Body, frozen=True):
    reason: FinishReason
    detail: str | None = None


# --- training -------------------------------------------------------------------------------


class LoraConfig(Strict, frozen=True):
    """`alpha` is an addition of OpenRL's own; the SDK has no field for it."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: float = 32.0


class OptimizerConfig(Body, frozen=True):
    type: str = "adamw"


class CreateModel(Body, frozen=True):
    session_id: Id
    model_seq_id: Count
    base_model: Id
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class GetInfo(Body, frozen=True):
    model_id: Id


class ForwardBackwardInput(Body, frozen=True):
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, int | float | str] | None = None


class ForwardBackward(Body, frozen=True):
    """`forward_only` is in the protobuf form; here it is an addition, and `forward_input` is the
    name that the old forward route uses."""

    model_id: Id
    seq_id: SeqId
    forward_backward_input: ForwardBackwardInput | None = None
    forward_input: ForwardBackwardInput | None = None
    forward_only: bool = False


class AdamParams(Strict, frozen=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    type: str = "adamw"


class OptimStep(Body, frozen=True):
    model_id: Id
    seq_id: SeqId
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerConfig | None = None


class SaveWeights(Body, frozen=True):
    model_id: Id
    seq_id: SeqId
    path: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSampler(Body, frozen=True):
    model_id: Id
    seq_id: SeqId
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveWeightsExternal(Body, frozen=True):
    model_id: Id
    seq_id: SeqId
    path: str
    age_encryption_recipients: list[str] = []
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class LoadWeights(Body, frozen=True):
    """Onto a model (`model_id`, `seq_id`), or making one (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: SeqId | None = None
    session_id: Id | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class UnloadModel(Body, frozen=True):
    model_id: Id
    seq_id: SeqId


# --- sampling -------------------------------------------------------------------------------


class CreateSamplingSession(Body, frozen=True):
    session_id: Id
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(Body, frozen=True):
    sampling_session_id: Id


class SamplingParams(Strict, frozen=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int | str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Strict, frozen=True):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    sampling_session_id: Id | None = None
    seq_id: SeqId | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int | None = None
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


# --- administration -------------------------------------------------------------------------


class LogMetrics(Strict, frozen=True):
    metrics: dict[str, float]
    step: float | None = None


class OwnerWeight(Strict, frozen=True):
    weight: Annotated[float, Meta(gt=0, le=1e6)]


# --- futures --------------------------------------------------------------------------------


class RetrieveFuture(Body, frozen=True):
    request_id: Id
    allow_metadata_only: bool = False


class FeedTarget(Body, frozen=True):
    sampling_session_id: Id
    cloned_sampler_id: Count = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFutures(Body, frozen=True):
    """`prev_cursor` 0 reads a feed from its start; `timeout` 0 answers at once."""

    target: FeedTarget
    prev_cursor: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    timeout: Annotated[float, Meta(ge=0)] | None = None
    retrieved_request_ids: list[str] = []


class CancelFuture(Body, frozen=True):
    request_id: Id
