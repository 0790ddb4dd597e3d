"""The engines under test, each with a reference that is not its own code.

The reference of the torch engine is transformers with peft; the fake's is its formula, written out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from openrl.config import EngineConfig, ModelSource
from openrl.engines.base import BaseModelInfo, Engine
from openrl.engines.fake import FakeEngine
from openrl.engines.pytorch.engine import TorchEngine

VOCAB = 101
EOS = 2
ADAPTERS = 4
Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """`logits(tokens, adapter)` is [len(tokens), VOCAB]: row n says what follows `tokens[: n + 1]`.
    `text(token)` is what a stop string sees of one token."""

    engine: Engine
    info: BaseModelInfo
    adapters: tuple[Path, ...]
    logits: Callable[[Sequence[int], Path | None], Logits]
    text: Callable[[int], str]


def subject(engine: Engine, **facts: Any) -> Subject:
    (info,) = engine.describe()
    engine.load(lambda _: None)
    return Subject(engine, info, **facts)


def fake(root: Path) -> Subject:
    def made(number: int) -> Path:
        directory = root / f"adapter{number}"
        directory.mkdir()
        bias_V = np.random.default_rng(number).normal(size=VOCAB)
        save_file({"bias": bias_V}, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 4}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return directory

    def logits(tokens: Sequence[int], adapter: Path | None) -> Logits:
        waves = np.outer(np.add(tokens, 1.0), np.arange(1, VOCAB + 1))
        bias_V = load_file(adapter / "adapter_model.safetensors")["bias"] if adapter else 0.0
        return np.asarray(np.sin(0.618 * waves) + bias_V)

    adapters = tuple(made(number) for number in range(ADAPTERS))
    engine = FakeEngine(["tiny"], vocab_size=VOCAB)
    return subject(engine, adapters=adapters, logits=logits, text=chr)


def pytorch(root: Path) -> Subject:
    base = root / "base"
    save_model(base)

    @cache
    def plain(adapter: Path | None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()

    @torch.inference_mode()
    def logits(tokens: Sequence[int], adapter: Path | None) -> Logits:
        found = plain(adapter)(input_ids=torch.tensor([list(tokens)])).logits[0]
        return np.asarray(found.double().numpy())

    adapters = tuple(save_adapter(base, root / f"adapter{i}", i) for i in range(ADAPTERS))
    config = EngineConfig(device="cpu", threads=1, kv_cache_bytes=4 << 20)
    engine = TorchEngine(config, [ModelSource("tiny", base)])
    return subject(engine, adapters=adapters, logits=logits, text=character)


def character(token: int) -> str:
    return chr(0x100 + token)


def save_model(directory: Path) -> None:
    """A random Qwen3 whose tokens are one character each."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.2,  # far from uniform, so that a wrong product shows
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = {character(token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=character(0)))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def save_adapter(base: Path, directory: Path, seed: int) -> Path:
    """By peft, and of another rank each."""
    torch.manual_seed(seed)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = PeftConfig(r=2 + seed, lora_alpha=8, target_modules=linears, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.2)
    model.save_pretrained(directory)
    return directory
