"""Full models on disk: what plain transformers loads with `from_pretrained`.

`model.safetensors` holds every parameter in fp32, tied ones once, and `config.json` is the base
model's. The optimizer's file is that of every other job: see `checkpoint`.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.full import FullLayout, FullWeights
from openrl.errors import UserError
from openrl.types import LoraConfig

WEIGHTS = "model.safetensors"


def write_weights(full: FullWeights, directory: Path, base: BaseModel) -> None:
    """Raises `OSError`."""
    tensors = {name: t.detach().cpu().clone() for name, t in full.weights.tensors.items()}
    try:
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    config = copy.deepcopy(base.config)
    config.dtype = "float32"
    config.save_pretrained(directory)


def read_weights(directory: Path, base: BaseModel, config: LoraConfig) -> FullWeights:
    """Raises `UserError` for files that are no full model of this base."""
    name = directory.name
    try:
        tensors = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{name}: {WEIGHTS} cannot be read: {error}") from error
    layout = FullLayout(base, config)
    weights = layout.weights(torch.zeros(layout.size), base.dtype)
    for key, into in weights.weights.tensors.items():
        given = tensors.pop(key, None)
        if given is None or given.shape != into.shape:
            found = "is missing" if given is None else f"has shape {list(given.shape)}"
            raise UserError(f"{name}: {key} {found}, expected {list(into.shape)}")
        if not bool(given.isfinite().all()):
            raise UserError(f"{name}: {key} is not finite")
        into.copy_(given)
    if tensors:
        raise UserError(f"{name}: the base model has no place for {min(tensors)}")
    return layout.weights(weights.weights.flat.to(base.device), base.dtype)
