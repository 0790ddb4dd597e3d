"""The self-test of a loaded model: are packed log-probabilities those of plain transformers?

A few short random sequences of different lengths, each alone through the untouched model, then
all together through the packed one. Sliding windows are shortened for the test, so that few
tokens suffice to see them work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.errors import UserError

_LENGTHS = (5, 23, 1, 40)
_WINDOW = 8
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Largest difference of a log-probability, in nats."""


def reference_logprobs(model: Any) -> list[Tensor]:
    """fp32 [N, V] on the CPU for each test sequence, from the model as transformers made it."""
    device = next(model.parameters()).device
    with torch.no_grad(), short_windows(model):
        return [
            model(torch.from_numpy(tokens).long()[None].to(device), use_cache=False)
            .logits[0]
            .float()
            .log_softmax(-1)
            .cpu()
            for tokens in test_sequences(model.config.vocab_size)
        ]


def require_parity(base: BaseModel, reference: list[Tensor]) -> None:
    """Raises `UserError` when the packed model differs from `reference`."""
    gap = parity_gap(base, reference)
    limit = _TOLERANCE[base.dtype]
    # "not <=" also refuses NaN.
    if not gap <= limit:
        raise UserError(
            f"model type {base.config.model_type} is not served: packed log-probabilities differ "
            f"from transformers' by up to {gap:.2g} nats (limit {limit:g} in {base.dtype})"
        )


def parity_gap(base: BaseModel, reference: list[Tensor]) -> float:
    rows = lay_out(test_sequences(base.config.vocab_size), base.device)
    with torch.no_grad(), short_windows(base.decoder):
        hidden_TD = base.hidden(training_batch(rows, ()))
        logprobs_TV = base.logits(hidden_TD, ()).log_softmax(-1).cpu()
    gaps = [
        (logprobs_TV[span.start : span.end] - expected_NV).abs().max()
        for span, expected_NV in zip(rows.spans, reference, strict=True)
    ]
    return float(torch.stack(gaps).max())


def test_sequences(vocab_size: int) -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, n, dtype=np.int32) for n in _LENGTHS]


@contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """The window stands in the attention modules and, for transformers' masks, in the
    configuration."""
    holders: list[Any] = [*model.modules(), getattr(model, "config", None)]
    windowed = [h for h in holders if isinstance(getattr(h, "sliding_window", None), int)]
    before = [holder.sliding_window for holder in windowed]
    for holder in windowed:
        holder.sliding_window = _WINDOW
    try:
        yield
    finally:
        for holder, window in zip(windowed, before, strict=True):
            holder.sliding_window = window
