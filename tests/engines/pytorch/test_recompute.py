"""Layers that are run twice instead of kept: less memory, the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.torch_cases import add_job, gradient_of, piece, random_datum, run, succeeded
from torch.autograd.graph import saved_tensors_hooks

from openrl.engines.pytorch.trainer import Trainer
from openrl.types import LoraConfig


def _run(base, activation_bytes):
    """Log-probabilities and gradients of two jobs, and the bytes kept for the backward pass."""
    rng = np.random.default_rng(0)
    trainer = Trainer(base, "test", activation_bytes=activation_bytes)
    pieces = []
    for model, loss in (("a", "cross_entropy"), ("b", "ppo")):
        add_job(trainer, model, LoraConfig(rank=4, seed=2))
        pieces.append(piece(model, [random_datum(rng, n, loss) for n in (20, 33)], loss))
    kept: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outcomes = run(trainer, *pieces)
    numbers = [r["logprobs"] for o in outcomes for r in succeeded(o).outputs]
    return numbers, [gradient_of(trainer, m) for m in "ab"], sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_recomputed_layers_give_the_same_bits_from_less_memory(family, base_model):
    base = base_model(family)
    kept_numbers, kept_gradients, kept_bytes = _run(base, None)
    numbers, gradients, few_bytes = _run(base, 0)
    assert few_bytes < kept_bytes / 3
    for mine, other in zip(numbers, kept_numbers, strict=True):
        assert np.array_equal(mine, other)
    for mine, other in zip(gradients, kept_gradients, strict=True):
        assert torch.equal(mine, other)


def test_what_a_row_keeps_has_been_measured(base_model):
    base = base_model("qwen3")
    _, _, kept_bytes = _run(base, None)
    rows = 2 * (20 + 33)
    assert base.row_bytes == pytest.approx(kept_bytes / rows, rel=0.4)
