"""Refuses bad requests by looking at them, before any engine does. Pure functions.

Each raises `UserError`, or `InvalidDatum` with the index and field of the datum at fault.
"""

from __future__ import annotations

import math

import numpy as np

from openrl.config import Limits
from openrl.engines.base import BaseModelInfo
from openrl.engines.losses import LOSSES, InputSpec, LossSpec
from openrl.engines.scores import check_scores
from openrl.errors import InvalidDatum, UserError
from openrl.paths import check_name, parse_tinker_path
from openrl.types import (
    AdamParams,
    Array,
    CreateModel,
    CreateModelFromCheckpoint,
    Datum,
    ForwardBackward,
    LoadWeights,
    LoraConfig,
    Malformed,
    OptimStep,
    Sample,
    SamplingParams,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TrainingOperation,
    UnloadModel,
)

_MIN_TTL = 3600
_MAX_TTL = 10 * 366 * 24 * 3600
_MAX_ALPHA = 1e6  # near the end of float32 the scale of an adapter is no number
_SEEDS = range(-(2**63), 2**64)
_UNSIGNED = {4: np.uint32, 8: np.uint64}


def check_training(operation: TrainingOperation, info: BaseModelInfo, limits: Limits) -> None:
    match operation:
        case CreateModel(lora=lora) | CreateModelFromCheckpoint(lora=lora):
            check_lora(lora, info)
        case ForwardBackward():
            _check_forward_backward(operation, info, limits)
        case OptimStep(adam=adam):
            check_adam(adam)
        case (
            SaveWeights(name=name, ttl_seconds=ttl)
            | SaveWeightsExternal(name=name, ttl_seconds=ttl)
        ):
            check_name(name)
            check_ttl(ttl)
        case SaveWeightsForSampler(name=name, sampling_session_id=session, ttl_seconds=ttl):
            if (name is None) == (session is None):
                raise UserError("save_weights_for_sampler: give a name or a sampling session")
            if name is not None:
                check_name(name)
            check_ttl(ttl)
        case LoadWeights(path=path):
            parse_tinker_path(path)
        case UnloadModel():
            pass
        case Malformed(error=error):
            raise error


def check_lora(lora: LoraConfig, info: BaseModelInfo) -> None:
    if lora.full:
        return
    if lora.rank <= 0:
        raise UserError("lora_config.rank must be positive")
    if lora.rank & (lora.rank - 1):
        raise UserError("lora_config.rank must be a power of 2")
    if lora.rank > info.max_lora_rank:
        raise UserError(
            f"Lora_config.rank {lora.rank} exceeds max LoRA rank {info.max_lora_rank} "
            f"for model {info.name}"
        )
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise UserError("At least one of train_unembed, train_mlp, or train_attn must be True")
    if not 0 < lora.alpha <= _MAX_ALPHA:
        raise UserError(
            f"lora_config.alpha must be above 0 and at most {_MAX_ALPHA:.0f}, got {lora.alpha}"
        )
    if lora.seed is not None and lora.seed not in _SEEDS:
        raise UserError("lora_config.seed must fit 64 bits")


def check_samples(lora: LoraConfig) -> None:
    """Engines sample from adapters and base models only."""
    if lora.full:
        raise UserError(
            "sampling from a model that trains all parameters is not there yet: save its state, "
            "and serve the checkpoint, which transformers loads, elsewhere"
        )


def check_adam(adam: AdamParams) -> None:
    """A learning rate of 0 is let through: schedules begin or end there."""
    _check_range("learning_rate", adam.learning_rate, 0.0, math.inf)
    _check_range("beta1", adam.beta1, 0.0, 1.0)
    _check_range("beta2", adam.beta2, 0.0, 1.0)
    _check_range("eps", adam.eps, 0.0, math.inf)
    _check_range("weight_decay", adam.weight_decay, 0.0, math.inf)
    _check_range("grad_clip_norm", adam.grad_clip_norm, 0.0, math.inf)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """`low` itself is allowed, `high` is not."""
    if not low <= value < high:
        bound = "" if high == math.inf else f" and below {high:g}"
        raise UserError(
            f"adam_params.{name} must be finite, at least {low:g}{bound}, got {value!r}"
        )


def check_ttl(ttl_seconds: int | None) -> None:
    """In seconds; None means never."""
    if ttl_seconds is not None and not _MIN_TTL <= ttl_seconds <= _MAX_TTL:
        raise UserError(f"ttl_seconds must be from {_MIN_TTL} to {_MAX_TTL}, got {ttl_seconds}")


# --- forward_backward ----------------------------------------------------------------------


def _check_forward_backward(work: ForwardBackward, info: BaseModelInfo, limits: Limits) -> None:
    spec = loss_spec(work.loss_fn)
    _check_config(spec, work)
    if not work.data:
        raise UserError("data: at least one datum is needed")
    if len(work.data) > limits.datums:
        raise UserError(f"data: {len(work.data)} datums, at most {limits.datums} in one request")
    for index, datum in enumerate(work.data):
        _check_datum(index, datum, spec, info)


def loss_spec(name: str) -> LossSpec:
    if name not in LOSSES:
        why = " (its formula is not public)" if name == "stable_reinforce" else ""
        raise UserError(f"loss_fn {name!r} is not supported{why}; these are: {', '.join(LOSSES)}")
    return LOSSES[name]


def _check_config(spec: LossSpec, work: ForwardBackward) -> None:
    for key, value in work.loss_fn_config.items():
        if key not in spec.config:
            known = ", ".join(spec.config) or "none"
            raise UserError(
                f"loss_fn_config key {key!r} is unknown to {spec.name}, whose keys are: {known}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config.{key} must be a finite number, got {value!r}")
    settings = spec.configured(work.loss_fn_config)
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 0.0)
    if low > high:
        raise UserError(f"clip_low_threshold {low:g} is above clip_high_threshold {high:g}")


def _check_datum(index: int, datum: Datum, spec: LossSpec, info: BaseModelInfo) -> None:
    length = len(datum.tokens)
    if length == 0:
        raise InvalidDatum(index, "model_input", "is empty")
    if length > info.context_length:
        raise InvalidDatum(
            index,
            "model_input",
            f"{length} tokens, over the model's context of {info.context_length}",
        )
    _check_tokens(index, "model_input", datum.tokens, info.vocab_size)
    for needed in spec.inputs:
        _check_input(index, datum, needed, spec, info.vocab_size)


def _check_input(index: int, datum: Datum, needed: InputSpec, spec: LossSpec, vocab: int) -> None:
    given = datum.loss_inputs.get(needed.name)
    if given is None:
        if needed.required:
            raise InvalidDatum(index, needed.name, f"is missing; {spec.name} needs it")
        return
    _check_dtype(index, needed, given)
    _check_shape(index, datum, needed, given, spec)
    if needed.dtype == "int64":
        _check_tokens(index, needed.name, given, vocab)
    elif not np.isfinite(given).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(given))[0])
        raise InvalidDatum(index, needed.name, f"is not finite at position {_position(where)}")


def _check_dtype(index: int, needed: InputSpec, given: Array) -> None:
    fits = given.dtype.kind in "iu" if needed.dtype == "int64" else given.dtype == np.float32
    if not fits:
        raise InvalidDatum(index, needed.name, f"must be {needed.dtype}, got {given.dtype}")


def _check_shape(index: int, datum: Datum, needed: InputSpec, given: Array, spec: LossSpec) -> None:
    length = len(datum.tokens)
    if needed.like_targets:
        expected = datum.loss_inputs["target_tokens"].shape
        if given.shape != expected:
            raise InvalidDatum(
                index, needed.name, f"has shape {given.shape}, target_tokens has {expected}"
            )
        return
    many = needed.name == "target_tokens" and spec.many_targets
    if given.shape == (length,) or (many and given.ndim == 2 and _rows_of(given, length)):
        return
    wanted = f"[{length}] or [{length}, K]" if many else f"[{length}]"
    raise InvalidDatum(
        index,
        needed.name,
        f"has shape {list(given.shape)}; with {length} tokens {spec.name} takes {wanted}",
    )


def _rows_of(given: Array, length: int) -> bool:
    rows, columns = given.shape
    return bool(rows == length and columns > 0)


def _check_tokens(index: int, field: str, tokens: Array, vocab: int) -> None:
    # A negative id is beyond every vocabulary when it is read as unsigned: one comparison.
    outside = tokens.view(_UNSIGNED[tokens.dtype.itemsize]) >= vocab
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        raise InvalidDatum(
            index,
            field,
            f"token {int(tokens[where])} at position {_position(where)} is outside the "
            f"vocabulary of {vocab}",
        )


def _position(where: tuple[int, ...]) -> str:
    return str(where[0]) if len(where) == 1 else str(list(where))


# --- samples -------------------------------------------------------------------------------


def check_sample(sample: Sample, info: BaseModelInfo, limits: Limits) -> None:
    prompt = len(sample.prompt)
    if prompt == 0:
        raise UserError("prompt: must hold at least one token")
    outside = (sample.prompt < 0) | (sample.prompt >= info.vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise UserError(
            f"prompt: token {int(sample.prompt[at])} at position {at} is outside the vocabulary "
            f"of {info.vocab_size}"
        )
    if not 1 <= sample.num_samples <= limits.num_samples:
        raise UserError(
            f"num_samples must be from 1 to {limits.num_samples}, got {sample.num_samples}"
        )
    check_scores(sample, info.vocab_size, limits)
    _check_sampling_params(sample.params)
    max_new_tokens(sample, info)


def max_new_tokens(sample: Sample, info: BaseModelInfo) -> int:
    """How many tokens a sequence may grow by; without `max_tokens` up to the context."""
    prompt, context = len(sample.prompt), info.context_length
    wanted = sample.params.max_tokens
    if wanted is None:
        wanted = max(1, context - prompt)
    if wanted < 1:
        raise UserError(f"sampling_params.max_tokens must be at least 1, got {wanted}")
    if prompt + wanted > context:
        raise UserError(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{prompt} + {wanted} > {context}"
        )
    return wanted


def _check_sampling_params(params: SamplingParams) -> None:
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise UserError(
            f"sampling_params.temperature must be finite and at least 0, got {params.temperature}"
        )
    if params.top_k != -1 and params.top_k < 1:
        raise UserError(
            f"sampling_params.top_k must be at least 1, or -1 for off, got {params.top_k}"
        )
    if not 0 < params.top_p <= 1:
        raise UserError(f"sampling_params.top_p must be above 0 and at most 1, got {params.top_p}")
    if any(token < 0 for token in params.stop.tokens):
        raise UserError("sampling_params.stop: token ids cannot be negative")
    if "" in params.stop.strings:
        raise UserError("sampling_params.stop: a stop string cannot be empty")
