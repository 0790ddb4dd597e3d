"""Loads a base model from its directory, and refuses what cannot be packed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from openrl.engines.pytorch.activations import ACTIVATIONS, activation_name
from openrl.engines.pytorch.base_model import TARGETS, BaseModel, is_target
from openrl.engines.pytorch.numerics import measure_row_bytes
from openrl.engines.pytorch.parity import reference_logprobs, require_parity
from openrl.errors import OpenRLError, ServerError, UserError, in_words

_STATIC_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary embeddings whose frequencies do not depend on the longest sequence of the batch."""


def load_base_model(directory: Path, device: torch.device, dtype: torch.dtype) -> BaseModel:
    """Loads, wraps and tests a model. Raises `UserError` for a family that is not served."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be loaded by transformers: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers would serve random numbers in their place.
        raise UserError(
            f"{directory} cannot be loaded: its files lack {len(missing)} of the weights that its "
            f"config.json asks for, {missing[0]} first"
        )
    check_family(model)
    model.to(device).eval()
    reference = reference_logprobs(model)
    base = BaseModel(model)
    require_parity(base, reference)
    base.row_bytes = measure_row_bytes(base)
    return base


def why_not_loaded(error: Exception) -> OpenRLError:
    """Without what the attempt has loaded, which the error's traceback would keep in memory."""
    if isinstance(error, OpenRLError):
        return error.with_traceback(None)
    return ServerError(f"it cannot be loaded: {in_words(error)}")


def check_family(model: nn.Module) -> None:
    """Raises `UserError` for a model whose parts cannot be found or packed."""
    config = cast(Any, model).config
    name = config.model_type
    decoder = getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    if decoder is None or layers is None:
        raise UserError(f"model type {name} is not served: no decoder layers at model.layers")
    for number, layer in enumerate(layers):
        found = sorted(n.rsplit(".")[-1] for n, m in layer.named_modules() if is_target(n, m))
        if found != sorted(TARGETS):
            raise UserError(
                f"model type {name} is not served: layer {number} has the linears {found} instead "
                f"of {sorted(TARGETS)} (mixtures of experts and fused projections are refused)"
            )
    if activation_name(config) not in ACTIVATIONS:
        raise UserError(
            f"model type {name} is not served: its activation {activation_name(config)} is none of "
            f"{', '.join(ACTIVATIONS)}"
        )
    for rope in _rope_types(config):
        if rope not in _STATIC_ROPE:
            raise UserError(
                f"model type {name} is not served: its rotary embedding ({rope}) depends on the "
                "longest sequence of the batch"
            )


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {one.get("rope_type", "default") for one in (nested or [parameters])}
