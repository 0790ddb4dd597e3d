"""The trainer against plain transformers + peft, one datum at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.torch_cases import (
    DEFAULTS,
    KEY,
    add_job,
    gradient_of,
    peft_layers,
    piece,
    plain_logprobs,
    random_datum,
    run,
    succeeded,
    with_peft,
    written_out_loss,
)

from openrl.engines.base import OptimPass, OptimPiece
from openrl.engines.pytorch import logprobs
from openrl.engines.pytorch.trainer import Trainer
from openrl.types import AdamParams, LoraConfig, ModelId, OptimStepDone, RequestId

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def _check_against_peft(trainer, plain, adapter, model, data, loss, output):
    """Log-probabilities, loss and the gradient of every factor."""
    reference = with_peft(plain, adapter)
    total = torch.tensor(0.0)
    for datum, record in zip(data, output.outputs, strict=True):
        lp = plain_logprobs(reference, datum)
        torch.testing.assert_close(
            torch.from_numpy(record["logprobs"]), lp.detach(), rtol=1e-4, atol=1e-4
        )
        total = total + written_out_loss(loss, lp, datum.loss_inputs, DEFAULTS[loss])
    assert output.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-4)
    total.backward()
    ours = adapter.layout.view(gradient_of(trainer, model)).by_linear
    for index, _, layer in peft_layers(reference, adapter):
        for mine, theirs in (
            (ours[index].a_RD, layer.lora_A["default"].weight.grad),
            (ours[index].b_NR, layer.lora_B["default"].weight.grad),
        ):
            scale = float(theirs.abs().max())
            assert scale > 0
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_cross_entropy_on_each_family(family, base_model, plain_model):
    rng = np.random.default_rng(0)
    trainer = Trainer(base_model(family), family)
    adapter = add_job(trainer, "a", LoraConfig(rank=4, alpha=16, seed=1))
    data = [random_datum(rng, n, "cross_entropy") for n in (20, 1, 37)]
    (outcome,) = run(trainer, piece("a", data))
    _check_against_peft(
        trainer, plain_model(family), adapter, "a", data, "cross_entropy", succeeded(outcome)
    )


@pytest.mark.parametrize("loss", [name for name in DEFAULTS if name != "cross_entropy"])
def test_each_loss(loss, base_model, plain_model):
    rng = np.random.default_rng(1)
    trainer = Trainer(base_model("qwen3"), "qwen3")
    adapter = add_job(trainer, "a")
    data = [random_datum(rng, n, loss) for n in (20, 9)]
    (outcome,) = run(trainer, piece("a", data, loss))
    _check_against_peft(trainer, plain_model("qwen3"), adapter, "a", data, loss, succeeded(outcome))


@pytest.mark.parametrize("loss", ["cross_entropy", "gspo"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_many_head_chunks(family, loss, base_model, plain_model, monkeypatch):
    """16 rows a chunk instead of as many as fit 64 MiB."""
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", 1)
    rng = np.random.default_rng(2)
    trainer = Trainer(base_model(family), family)
    adapter = add_job(trainer, "a")
    data = [random_datum(rng, n, loss) for n in (40, 23)]
    (outcome,) = run(trainer, piece("a", data, loss))
    _check_against_peft(trainer, plain_model(family), adapter, "a", data, loss, succeeded(outcome))


def test_several_targets_for_each_token_and_different_numbers_of_them(base_model, plain_model):
    rng = np.random.default_rng(3)
    trainer = Trainer(base_model("qwen3"), "qwen3")
    adapter = add_job(trainer, "a")
    data = [random_datum(rng, 12, "cross_entropy", k) for k in (3, None, 5)]
    (outcome,) = run(trainer, piece("a", data))
    output = succeeded(outcome)
    assert [record["logprobs"].shape for record in output.outputs] == [(12, 3), (12,), (12, 5)]
    assert [record["elementwise_loss"].shape for record in output.outputs] == [(12,)] * 3
    _check_against_peft(trainer, plain_model("qwen3"), adapter, "a", data, "cross_entropy", output)


@pytest.mark.parametrize(
    "switches",
    [
        {"train_mlp": False, "train_unembed": False},
        {"train_attn": False, "train_unembed": False},
        {"train_attn": False, "train_mlp": False},
    ],
)
def test_each_choice_of_targets(switches, base_model, plain_model):
    rng = np.random.default_rng(4)
    trainer = Trainer(base_model("llama"), "llama")
    adapter = add_job(trainer, "a", LoraConfig(rank=2, seed=0, **switches))
    data = [random_datum(rng, 18, "cross_entropy")]
    (outcome,) = run(trainer, piece("a", data))
    _check_against_peft(
        trainer, plain_model("llama"), adapter, "a", data, "cross_entropy", succeeded(outcome)
    )


def test_metrics_and_elementwise_loss(base_model):
    rng = np.random.default_rng(5)
    trainer = Trainer(base_model("llama"), "llama")
    add_job(trainer, "a")
    data = [random_datum(rng, n, "cross_entropy") for n in (5, 6)]
    (outcome,) = run(trainer, piece("a", data))
    output = succeeded(outcome)
    losses = np.concatenate([record["elementwise_loss"] for record in output.outputs])
    assert output.metrics["loss:sum"] == pytest.approx(float(losses.sum()), rel=1e-5)
    assert output.metrics["num_tokens:sum"] == 11
    for datum, record in zip(data, output.outputs, strict=True):
        expected = -datum.loss_inputs["weights"] * record["logprobs"]
        np.testing.assert_allclose(record["elementwise_loss"], expected, rtol=1e-5, atol=1e-6)
        assert record["logprobs"].dtype == np.float32
    (outcome,) = run(trainer, piece("a", [random_datum(rng, 9, "ppo")], "ppo"))
    metrics = succeeded(outcome).metrics
    assert {"loss:sum", "num_tokens:sum", "ratio:mean", "clip_fraction:mean"} <= metrics.keys()
    assert all(name.count(":") == 1 for name in metrics)


def test_equal_datums_of_one_call_get_equal_logprobs(base_model):
    datum = random_datum(np.random.default_rng(6), 21, "cross_entropy")
    trainer = Trainer(base_model("qwen3"), "qwen3")
    add_job(trainer, "a")
    (outcome,) = run(trainer, piece("a", [datum] * 4))
    first, *others = succeeded(outcome).outputs
    for other in others:
        assert np.array_equal(first["logprobs"], other["logprobs"])


def test_forward_only_leaves_gradients_alone_and_mixes(base_model):
    rng = np.random.default_rng(7)
    data = [random_datum(rng, n, "cross_entropy") for n in (12, 15)]
    trainer = Trainer(base_model("qwen3"), "qwen3")
    for model in "ab":
        add_job(trainer, model, LoraConfig(rank=2, seed=3))
    forward, both = run(
        trainer,
        piece("a", data, request="a:1", forward_only=True),
        piece("b", data, request="b:1"),
    )
    assert trainer.job(ModelId("a")).gradient is None
    assert trainer.job(ModelId("b")).gradient is not None
    (alone,) = run(trainer, piece("a", data, request="a:2"))
    for mine, other in zip(succeeded(forward).outputs, succeeded(alone).outputs, strict=True):
        assert np.array_equal(mine["logprobs"], other["logprobs"])
    assert succeeded(both).metrics["loss:sum"] != succeeded(forward).metrics["loss:sum"]


def test_accumulation_over_calls_and_atoms_equals_one_call(base_model):
    rng = np.random.default_rng(8)
    data = [random_datum(rng, n, "cross_entropy") for n in (12, 5, 30, 7)]
    trainer = Trainer(base_model("llama"), "llama")
    for model in ("one", "calls", "atoms"):
        add_job(trainer, model, LoraConfig(rank=4, seed=9))
        trainer.job(ModelId(model)).adapter.weights.flat.copy_(
            trainer.job(ModelId("one")).adapter.weights.flat
        )
    run(trainer, piece("one", data))
    for start in range(4):
        run(trainer, piece("calls", data[start : start + 1], request=f"calls:{start}"))
    run(trainer, piece("atoms", data[:1], last=False))
    assert trainer.job(ModelId("atoms")).gradient is None  # not before the last atom
    run(
        trainer,
        piece("atoms", data[1:3], start=1, last=False),
        piece("atoms", data[3:], start=3, last=True),
    )
    whole = gradient_of(trainer, "one")
    for model in ("calls", "atoms"):
        torch.testing.assert_close(gradient_of(trainer, model), whole, rtol=1e-4, atol=1e-5)


def _step(trainer, model, **adam):
    work = OptimPass(
        KEY, (OptimPiece(RequestId(f"{model}:9"), ModelId(model), AdamParams(**adam)),)
    )
    (outcome,) = trainer.optimize(work).outcomes
    return outcome


def test_a_step_takes_the_gradient_and_touches_one_job(base_model):
    rng = np.random.default_rng(10)
    trainer = Trainer(base_model("llama"), "llama")
    a, b = add_job(trainer, "a"), add_job(trainer, "b")
    run(trainer, *(piece(m, [random_datum(rng, 9, "cross_entropy")]) for m in "ab"))
    gradient = gradient_of(trainer, "a").clone()
    expected = torch.nn.Parameter(a.weights.flat.clone())
    reference = torch.optim.AdamW([expected], lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0)
    expected.grad = gradient
    reference.step()
    before_b = b.weights.flat.clone(), gradient_of(trainer, "b").clone()
    outcome = _step(trainer, "a", learning_rate=1e-2)
    assert isinstance(outcome, OptimStepDone)
    assert outcome.version == 1
    assert outcome.metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    torch.testing.assert_close(a.weights.flat, expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(b.weights.flat, before_b[0])
    assert torch.equal(gradient_of(trainer, "b"), before_b[1])


def test_a_step_without_gradients_changes_nothing(base_model):
    trainer = Trainer(base_model("llama"), "llama")
    adapter = add_job(trainer, "a")
    run(trainer, piece("a", [random_datum(np.random.default_rng(0), 9, "cross_entropy")]))
    _step(trainer, "a", learning_rate=1e-2)
    before = adapter.weights.flat.clone()
    outcome = _step(trainer, "a", learning_rate=1e-2, weight_decay=0.5)
    assert isinstance(outcome, OptimStepDone)
    assert outcome.metrics == {"skipped_no_gradients": 1.0}
    assert outcome.version == 1
    assert torch.equal(adapter.weights.flat, before)
    moments = trainer.job(ModelId("a")).optimizer.moments
    assert moments is not None
    assert moments.step == 1


def test_training_lowers_the_loss(base_model):
    trainer = Trainer(base_model("qwen3"), "qwen3")
    add_job(trainer, "a", LoraConfig(rank=8, seed=0))
    datum = random_datum(np.random.default_rng(11), 16, "cross_entropy")
    datum.loss_inputs["weights"][:] = 1
    losses = []
    for step in range(12):
        (outcome,) = run(trainer, piece("a", [datum], request=f"a:{step}"))
        losses.append(succeeded(outcome).metrics["loss:sum"])
        _step(trainer, "a", learning_rate=2e-2)
    assert losses[-1] < 0.2 * losses[0]
