"""The lean decoder against the modules that it stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.pytorch import lean as lean_module
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.lean import LeanDecoder, forward_of
from openrl.engines.pytorch.loading import load_base_model
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


def test_large_activations_do_not_stand_in_its_way(model_directory: Any, base_model: Any) -> None:
    """Some thousands in a few channels, as trained models have them: an absolute limit of 1e-4
    would refuse this one, for rounding alone."""
    base = load_base_model(model_directory("llama"), torch.device("cpu"), torch.float32)
    decoder: Any = base.decoder
    decoder.layers[0].mlp.down_proj.weight.data[:3] *= 3000
    decoder.norm.weight.data *= 100
    lean = LeanDecoder(base)
    assert (hidden(base, lean.hidden) - hidden(base, base.hidden)).abs().max() > 1e-4
    assert LeanDecoder.of(base) is not None


@pytest.mark.parametrize("change", ["eps", "scaling", "window"])
def test_a_slightly_different_layer_is_refused(
    change: str, base_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model("gemma3")
    made = lean_module._layer

    def other(index: int, layer: Any, of: BaseModel) -> Any:
        right = made(index, layer, of)
        wrong = {
            "eps": {"norm_attn": replace(right.norm_attn, eps=right.norm_attn.eps + 1e-3)},
            "scaling": {"scaling": right.scaling * 1.001},
            "window": {"window": right.window and right.window + 1},
        }
        return replace(right, **wrong[change])

    monkeypatch.setattr(lean_module, "_layer", other)
    assert LeanDecoder.of(base) is None


def test_another_form_leaves_it_to_the_modules(
    base_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model("llama")
    monkeypatch.delattr(base.decoder.layers[0], "post_attention_layernorm")
    assert LeanDecoder.of(base) is None
