"""The lean decoder against the modules that it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.lean import LeanDecoder, forward_of
from openrl.engines.pytorch.packing import lay_out, training_batch

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def hidden(base: BaseModel, forward: Any) -> torch.Tensor:
    rng = np.random.default_rng(3)
    rows = lay_out([rng.integers(0, 101, n, dtype=np.int32) for n in (30, 1, 17)], base.device)
    with torch.no_grad():
        return forward(training_batch(rows, ()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_modules_compute(family: str, base_model: Any) -> None:
    """Gemma's window of 8 is shorter than two of the sequences."""
    base = base_model(family)
    lean = LeanDecoder.of(base)
    assert lean is not None
    torch.testing.assert_close(
        hidden(base, lean.hidden), hidden(base, base.hidden), atol=2e-5, rtol=0
    )


def test_joining_weights_holds_nothing_twice(base_model: Any) -> None:
    base = base_model("qwen3")
    LeanDecoder(base)
    attn = base.decoder.layers[0].self_attn
    starts = {m.weight.untyped_storage().data_ptr() for m in (attn.q_proj, attn.k_proj)}
    assert len(starts) == 1


def test_other_numbers_leave_it_to_the_modules(
    base_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model("qwen3")
    assert forward_of(base) != base.hidden
    monkeypatch.setattr(LeanDecoder, "_mlp", lambda self, layer, x_TD, adapters: x_TD * 1e-3)
    assert LeanDecoder.of(base) is None
    assert forward_of(base) == base.hidden


def test_another_form_leaves_it_to_the_modules(
    base_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model("llama")
    monkeypatch.delattr(base.decoder.layers[0], "post_attention_layernorm")
    assert LeanDecoder.of(base) is None
