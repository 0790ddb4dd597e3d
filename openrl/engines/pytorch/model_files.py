"""Where a base model's files are, and what its configuration says. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from openrl import demo
from openrl.config import ModelSource
from openrl.engines.base import BaseModelInfo, WeightsKey
from openrl.errors import UserError

_CONFIGURATION = ("config.json", "generation_config.json")
_WEIGHTS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")  # with its tokenizer
_UNKNOWN_LENGTH = 2048


def read_info(source: ModelSource, max_lora_rank: int) -> BaseModelInfo:
    """Reads configuration files only. Raises `UserError` for a model that is not there."""
    directory = configuration_directory(source)
    config = _read_json(directory / "config.json")
    text = config.get("text_config", config)
    return BaseModelInfo(
        name=source.name,
        weights=WeightsKey(str(directory.resolve())),
        context_length=int(text.get("max_position_embeddings") or _UNKNOWN_LENGTH),
        vocab_size=_vocab_size(source, text),
        eos_token_ids=_eos_token_ids(directory, text),
        tokenizer_id=_tokenizer_id(source),
        max_lora_rank=max_lora_rank,
        architecture=_architecture(config),
    )


def _tokenizer_id(source: ModelSource) -> str:
    """The name, which clients resolve by the hub; the demo model is not there, and its directory
    is. Directories of other models stay untold: their clients may be on another machine."""
    if source.path is not None and source.path.resolve() == demo.model_directory().resolve():
        return str(demo.model_directory())
    return source.name


def configuration_directory(source: ModelSource) -> Path:
    """The local directory that holds `config.json`; a hub name costs at most its small files."""
    if source.path is not None:
        return _local(source.name, source.path)
    if (Path(source.name) / "config.json").is_file():
        return Path(source.name)
    return _from_hub(source.name, _CONFIGURATION)


def weights_directory(source: ModelSource) -> Path:
    """The same directory, with the weights in it: downloads them when they are not there yet."""
    directory = configuration_directory(source)
    if source.path is not None or any(directory.glob("*.safetensors")):
        return directory
    return _from_hub(source.name, _WEIGHTS)


def _local(name: str, path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"model {name}: there is no directory {path}")
    if not (path / "config.json").is_file():
        raise UserError(f"model {name}: {path} holds no config.json, so it is no model directory")
    return path


def _from_hub(name: str, patterns: Sequence[str]) -> Path:
    """The snapshot in the hub's cache; asks the hub only for what the cache lacks."""
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise UserError(
            f"model {name} is gated: accept its terms on the hub and log in with `hf auth login`, "
            f"or give a local directory: {name}=PATH"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"model {name} is neither a local directory nor a model that the hub knows: "
            f"check the name, log in if it is private, or give a directory: {name}=PATH"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"model {name} is not in the hub's cache and the hub cannot be reached: "
            f"give a local directory ({name}=PATH) or connect once to fill the cache"
        ) from error


def _vocab_size(source: ModelSource, text: Mapping[str, Any]) -> int:
    if not isinstance(text.get("vocab_size"), int):
        raise UserError(f"model {source.name}: config.json names no vocab_size")
    return int(text["vocab_size"])


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [config.get("model_type", "unknown")]
    return str(named[0])


def _eos_token_ids(directory: Path, text: Mapping[str, Any]) -> tuple[int, ...]:
    """Generation's end tokens first, then the configuration's, each once."""
    generation = directory / "generation_config.json"
    found = _as_ids(_read_json(generation).get("eos_token_id")) if generation.is_file() else []
    return tuple(dict.fromkeys([*found, *_as_ids(text.get("eos_token_id"))]))


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(one) for one in (value if isinstance(value, list) else [value])]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object")
    return content
