"""Adapters and optimizer state on disk: safetensors, never pickle.

`adapter_model.safetensors` and `adapter_config.json` are PEFT's: peft, vLLM and others load them
as they are. An adapted head is keyed `unembed_tokens`, also with tied embeddings, where
`lm_head` would break loaders; `lm_head` is understood when read. `optimizer.safetensors` holds
AdamW's moments, the step and version counts, and the accumulated gradient if there is one, all
in the adapter's flat layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrl.engines.pytorch.job import Job
from openrl.engines.pytorch.lora import Adapter, Factor, Layout, LinearSpec, check_config
from openrl.engines.pytorch.optim import Moments
from openrl.errors import UserError
from openrl.types import LoraConfig

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"

_PREFIX = "base_model.model."
_HEAD_ALIASES = {
    f"{_PREFIX}lm_head.lora_{side}.weight": f"{_PREFIX}model.unembed_tokens.lora_{side}.weight"
    for side in "AB"
}
_REFUSED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """`moments` None before the first step, `gradient` [size] None when nothing accumulated."""

    moments: Moments | None
    gradient: Tensor | None
    version: int


# --- writing --------------------------------------------------------------------------------


def write_adapter(adapter: Adapter, directory: Path, base_name: str) -> None:
    tensors: dict[str, Tensor] = {}
    for linear in adapter.layout.linears:
        factor = adapter.weights.by_linear[linear.index]
        if factor is not None:
            a_key, b_key = _keys(linear)
            tensors[a_key] = factor.a_RD.detach().cpu().clone()
            tensors[b_key] = factor.b_NR.detach().cpu().contiguous()
    _save(tensors, directory / ADAPTER)
    text = json.dumps(_peft_config(adapter, base_name), indent=2, sort_keys=True)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def write_optimizer(job: Job, directory: Path) -> None:
    tensors = {"version": torch.tensor(job.version)}
    moments = job.optimizer.moments
    if moments is not None:
        tensors["exp_avg"] = moments.exp_avg.cpu()
        tensors["exp_avg_sq"] = moments.exp_avg_sq.cpu()
        tensors["step"] = torch.tensor(moments.step)
    if job.gradient is not None:
        tensors["gradient"] = job.gradient.flat.cpu()
    _save(tensors, directory / OPTIMIZER)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises `OSError` like every other failure to write."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _keys(linear: LinearSpec) -> tuple[str, str]:
    stem = f"{_PREFIX}{linear.name}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _peft_config(adapter: Adapter, base_name: str) -> dict[str, Any]:
    linears = adapter.layout.linears
    adapted = [one.name for one in linears if adapter.weights.by_linear[one.index] is not None]
    alpha = adapter.config.alpha
    return {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapter.config.rank,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapted}),
        "task_type": "CAUSAL_LM",
    }


# --- reading --------------------------------------------------------------------------------


def read_adapter(
    directory: Path, linears: Sequence[LinearSpec], device: torch.device, dtype: torch.dtype
) -> Adapter:
    """Rank, alpha and targets are the checkpoint's own. Raises `UserError` when it does not fit
    the base model that `linears` describe."""
    tensors = {_HEAD_ALIASES.get(k, k): v for k, v in _load(directory / ADAPTER).items()}
    config = _lora_config(directory / CONFIG, tensors, linears)
    layout = Layout(linears, config)
    weights = layout.zeros(torch.device("cpu"))
    for linear in linears:
        factor = weights.by_linear[linear.index]
        if factor is not None:
            _fill(factor, linear, tensors, directory)
    if tensors:
        raise UserError(f"{directory.name}: the base model has no place for {min(tensors)}")
    return Adapter(layout, layout.view(weights.flat.to(device)), dtype)


def read_optimizer(directory: Path, size: int, device: torch.device) -> OptimizerState:
    """Raises `UserError` when there is none, or one of another layout."""
    tensors = _load(directory / OPTIMIZER)
    for name in ("exp_avg", "exp_avg_sq", "gradient"):
        if name in tensors and tensors[name].shape != (size,):
            raise UserError(f"{directory.name}: {name} has shape {list(tensors[name].shape)}")
    moments = None
    if "step" in tensors:
        exp_avg, exp_avg_sq = (tensors[name].to(device) for name in ("exp_avg", "exp_avg_sq"))
        moments = Moments(exp_avg, exp_avg_sq, int(tensors["step"]))
    gradient = tensors["gradient"].to(device) if "gradient" in tensors else None
    return OptimizerState(moments, gradient, int(tensors["version"]))


def require_same(checkpoint: LoraConfig, target: LoraConfig) -> None:
    """Raises `UserError` naming the first setting that differs; a seed says nothing any more."""
    for field in ("rank", "alpha", "train_unembed", "train_mlp", "train_attn"):
        ours, theirs = getattr(target, field), getattr(checkpoint, field)
        if ours != theirs:
            raise UserError(
                "Checkpoint model configuration is incompatible with target model: "
                f"checkpoint {field} is {theirs} but target model {field} is {ours}"
            )


def _fill(factor: Factor, linear: LinearSpec, tensors: dict[str, Tensor], directory: Path) -> None:
    """Copies both factors and takes them out of `tensors`."""
    for key, into in zip(_keys(linear), (factor.a_RD, factor.b_NR), strict=True):
        given = tensors.pop(key, None)
        if given is None or given.shape != into.shape:
            found = "is missing" if given is None else f"has shape {list(given.shape)}"
            raise UserError(f"{directory.name}: {key} {found}, expected {list(into.shape)}")
        if not bool(given.isfinite().all()):
            raise UserError(f"{directory.name}: {key} is not finite")
        into.copy_(given)


def _lora_config(
    path: Path, tensors: dict[str, Tensor], linears: Sequence[LinearSpec]
) -> LoraConfig:
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(stated["r"]), float(stated["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path.parent.name}: {CONFIG} cannot be read: {error!r}") from error
    for key in _REFUSED:
        if stated.get(key):
            raise UserError(f"{path.parent.name}: {CONFIG} has {key}, which is not supported")
    groups = {linear.group for linear in linears if _keys(linear)[0] in tensors}
    config = LoraConfig(
        rank=rank,
        alpha=alpha,
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )
    check_config(config)
    return config


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent.name}: there is no {path.name}") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path.parent.name}: {path.name} cannot be read: {error}") from error
