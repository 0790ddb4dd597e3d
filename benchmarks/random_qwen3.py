"""Qwen3 models of random weights for benchmarks of sampling."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def save_random_qwen3(
    directory: Path, *, vocab: int, hidden: int, layers: int, heads: int, context: int
) -> int:
    """Heads of 32, two of them to one of keys; returns the number of parameters. 704, 128, 4, 4
    have a million, 4096, 192, 6, 6 about four."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())
