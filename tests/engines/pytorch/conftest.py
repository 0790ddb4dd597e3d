"""Tiny random models of the served families, made in-process and saved to disk once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.loading import load_base_model

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "gemma3")

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    # Far from uniform, so that a wrong product shows.
    "initializer_range": 0.2,
}


def _make(family: str) -> Any:
    torch.manual_seed(7)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=False))
    if family == "qwen2":  # biases on q, k, v
        model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True))
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(value, std=0.2)
        return model
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=True))
    if family == "gemma3":
        return Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_SHAPE,
                tie_word_embeddings=True,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
                query_pre_attn_scalar=16,
                final_logit_softcapping=5.0,
            )
        )
    raise AssertionError(family)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_directory("qwen3")`: a directory with config.json and model.safetensors."""
    root = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            _make(family).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def base_model(model_directory: Callable[[str], Path]) -> Callable[[str], BaseModel]:
    """`base_model("qwen3")`: loaded once per session; frozen, so tests may share it."""
    loaded: dict[str, BaseModel] = {}

    def load(family: str) -> BaseModel:
        if family not in loaded:
            loaded[family] = load_base_model(model_directory(family), CPU, torch.float32)
        return loaded[family]

    return load


@pytest.fixture
def plain_model(model_directory: Callable[[str], Path]) -> Callable[[str], Any]:
    """`plain_model("qwen3")`: the same weights as transformers serves them, fresh each time."""

    def load(family: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            model_directory(family), dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval().requires_grad_(False)

    return load
