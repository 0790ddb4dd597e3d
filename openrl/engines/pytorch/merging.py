"""An adapter added to its base model's weights: W + (alpha / rank) B A, in fp32, kept in W's dtype.

File by file, so that a model larger than memory can be merged. An adapted head of a model with tied
embeddings gets a matrix of its own, since the embeddings themselves are not adapted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openrl.errors import UserError

_PREFIX = "base_model.model."
_HEAD = "lm_head.weight"
_HEAD_ALIAS = "model.unembed_tokens.weight"
_EMBEDDINGS = "embed_tokens.weight"
_KEPT = ("*.json", "*.model", "*.txt", "*.jinja")
_REFUSED = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """`a_RD` [rank, in], `b_NR` [out, rank]."""

    a_RD: Tensor
    b_NR: Tensor
    scale: float

    def added_to(self, weight_ND: Tensor, name: str) -> Tensor:
        """Raises `UserError` for a weight of another shape."""
        shape = (self.b_NR.shape[0], self.a_RD.shape[1])
        if weight_ND.shape != shape:
            raise UserError(
                f"{name} is {list(weight_ND.shape)} in the base model and {list(shape)} in the "
                "adapter: is it the model that it was trained on?"
            )
        change = self.scale * (self.b_NR.float() @ self.a_RD.float())
        return (weight_ND.float() + change).to(weight_ND.dtype)


def merge_adapter(base: Path, adapter: Path, out: Path) -> int:
    """Writes a model directory into `out`, an empty directory; gives how many weights changed.
    Raises `UserError` for an adapter that does not fit or cannot be merged."""
    deltas = _read_adapter(adapter)
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise UserError(f"{base} holds no *.safetensors: download the whole model first")
    for pattern in _KEPT:
        for file in base.glob(pattern):
            shutil.copyfile(file, out / file.name)
    left = dict(deltas)
    untied = _HEAD in deltas and _is_tied(base)
    for file in files:
        tensors = _load(file)
        if untied:
            _untie(tensors)
        for name in tensors.keys() & left.keys():
            tensors[name] = left.pop(name).added_to(tensors[name], name)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        shutil.copymode(file, out / file.name)  # else it is its owner's alone
        if untied and _HEAD in tensors:
            _say_untied(out, file.name, tensors[_HEAD])
    if left:
        raise UserError(
            f"the base model has no {min(left)}: is it the model that the adapter was trained on?"
        )
    return len(deltas)


def _read_adapter(directory: Path) -> Mapping[str, Delta]:
    """By the name of the weight that each changes."""
    stated_in = directory / "adapter_config.json"
    if not stated_in.exists() and (directory / "model.safetensors").exists():
        raise UserError(
            f"{directory} holds a full model, with nothing to merge: "
            "export the checkpoint and use that as it is"
        )
    stated = _read_json(stated_in)
    for key in _REFUSED:
        if stated.get(key):
            raise UserError(f"{directory}: adapter_config.json has {key}, which cannot be merged")
    try:
        scale = float(stated["lora_alpha"]) / int(stated["r"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{directory}: adapter_config.json: {error!r}") from error
    tensors = _load(directory / "adapter_model.safetensors")
    deltas = {}
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        stem = key.removesuffix(".lora_A.weight")
        b_NR = tensors.pop(f"{stem}.lora_B.weight", None)
        if b_NR is None:
            raise UserError(f"{directory}: {stem} has no lora_B")
        name = f"{stem.removeprefix(_PREFIX)}.weight"
        deltas[_HEAD if name == _HEAD_ALIAS else name] = Delta(tensors.pop(key), b_NR, scale)
    if tensors or not deltas:
        found = f"{min(tensors)}, which cannot be merged" if tensors else "no LoRA"
        raise UserError(f"{directory}: adapter_model.safetensors holds {found}")
    return deltas


# --- tied embeddings ------------------------------------------------------------------------


def _is_tied(base: Path) -> bool:
    config = _read_json(base / "config.json")
    text = config.get("text_config", config)
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True)))


def _untie(tensors: dict[str, Tensor]) -> None:
    """Beside the embeddings, the head starts as their copy, whatever was there."""
    for name in list(tensors):
        if name.endswith(_EMBEDDINGS):
            tensors[_HEAD] = tensors[name].clone()
            return
    tensors.pop(_HEAD, None)


def _say_untied(out: Path, file: str, head: Tensor) -> None:
    config = _read_json(out / "config.json")
    for section in (config, config.get("text_config")):
        if section is not None:
            section["tie_word_embeddings"] = False
    _write_json(out / "config.json", config)
    listed = out / "model.safetensors.index.json"
    if listed.is_file():
        index = _read_json(listed)
        index["weight_map"][_HEAD] = file
        if "total_size" in (about := index.get("metadata") or {}):
            about["total_size"] += head.numel() * head.element_size()
        _write_json(listed, index)


# --- files ----------------------------------------------------------------------------------


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
