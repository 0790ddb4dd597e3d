from __future__ import annotations

import math

import pytest
import torch
from support.torch_cases import randomise

from openrl.engines.pytorch.lora import Layout, fresh_adapter
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.engines.pytorch.segments import Segment
from openrl.errors import UserError
from openrl.types import LoraConfig

CPU = torch.device("cpu")


def _fresh(base, **config):
    return fresh_adapter(base.linears, LoraConfig(**config), CPU, torch.float32)


def test_a_fresh_adapter_equals_the_base_bit_for_bit(base_model):
    base = base_model("qwen3")
    rows = lay_out([torch.arange(20).int().numpy(), torch.arange(7).int().numpy()], CPU)
    adapter = _fresh(base, rank=8, seed=1)
    segments = (Segment(0, 27, adapter),)
    with torch.no_grad():
        plain = base.hidden(training_batch(rows, ()))
        adapted = base.hidden(training_batch(rows, segments))
        assert torch.equal(plain, adapted)
        assert torch.equal(base.logits(plain, ()), base.logits(adapted, segments))
        randomise(adapter, 1)
        assert not torch.equal(plain, base.hidden(training_batch(rows, segments)))


def test_a_is_drawn_from_the_seed_as_peft_draws_it(base_model):
    base = base_model("llama")
    one, same, other = (_fresh(base, rank=16, seed=seed).weights.flat for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    factor = _fresh(base, rank=16, seed=5).weights.by_linear[-1]
    assert factor is not None
    bound = 1 / math.sqrt(base.hidden_size)
    assert float(factor.a_RD.abs().max()) <= bound
    assert float(factor.a_RD.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not bool(factor.b_NR.any())


def test_without_a_seed_adapters_differ(base_model):
    one, other = (_fresh(base_model("llama"), rank=4) for _ in range(2))
    assert not torch.equal(one.weights.flat, other.weights.flat)


def test_targets_follow_the_three_switches(base_model):
    linears = base_model("llama").linears
    for group in ("attn", "mlp", "unembed"):
        switches = {f"train_{other}": other == group for other in ("attn", "mlp", "unembed")}
        views = Layout(linears, LoraConfig(rank=2, **switches)).zeros(CPU).by_linear
        adapted = [linear.group for linear in linears if views[linear.index] is not None]
        assert adapted
        assert set(adapted) == {group}


def test_views_do_not_overlap_and_start_on_cache_lines(base_model):
    factors = Layout(base_model("qwen3").linears, LoraConfig(rank=3)).zeros(CPU)
    tensors = [t for f in factors.by_linear if f is not None for t in (f.a_RD, f.b_NR)]
    for number, tensor in enumerate(tensors, start=1):
        assert tensor.storage_offset() % 16 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, start=1):
        assert bool((tensor == number).all())


def test_a_copy_keeps_its_weights(base_model):
    adapter = _fresh(base_model("llama"), rank=2, seed=0)
    copy = adapter.copy()
    adapter.weights.flat.add_(1)
    assert not torch.equal(copy.weights.flat, adapter.weights.flat)
    assert copy.compute is copy.weights


def test_a_narrower_base_computes_with_a_copy_that_refresh_renews(base_model):
    config = LoraConfig(rank=2, seed=0)
    adapter = fresh_adapter(base_model("llama").linears, config, CPU, torch.bfloat16)
    assert adapter.compute.flat.dtype == torch.bfloat16
    adapter.weights.flat.fill_(3)
    adapter.refresh()
    assert bool((adapter.compute.flat == 3).all())


def test_a_row_has_the_same_bits_in_a_segment_of_any_size(base_model):
    """Rows of one version come and go while others are sampled."""
    base = base_model("qwen3")
    adapter = _fresh(base, rank=8, seed=1)
    randomise(adapter, 2)
    hidden = torch.randn(64, base.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = base.logits(hidden, (Segment(0, 64, adapter),))
        for start, end in ((0, 1), (5, 8), (10, 25), (20, 64)):
            rows = base.logits(hidden, (Segment(start, end, adapter),))
            assert torch.equal(rows[start:end], whole[start:end])


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(rank=0),
        LoraConfig(alpha=math.inf),
        LoraConfig(train_attn=False, train_mlp=False, train_unembed=False),
    ],
)
def test_what_is_no_adapter_is_refused(base_model, config):
    with pytest.raises(UserError):
        fresh_adapter(base_model("llama").linears, config, CPU, torch.float32)
