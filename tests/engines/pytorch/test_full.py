"""Full-parameter training against plain transformers and torch's AdamW, one datum at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.torch_cases import (
    DEFAULTS,
    KEY,
    add_job,
    gradient_of,
    piece,
    plain_logprobs,
    random_datum,
    run,
    succeeded,
    written_out_loss,
)
from transformers import AutoModelForCausalLM

from openrl.engines.base import (
    CreateAdapter,
    LoadAdapter,
    OptimPass,
    OptimPiece,
    RestoreAdapter,
    SaveAdapter,
)
from openrl.engines.pytorch.paging import AdapterBudget, job_bytes
from openrl.engines.pytorch.snapshots import files_of_job
from openrl.engines.pytorch.trainer import Trainer
from openrl.engines.snapshots import SnapshotWriter
from openrl.errors import OutOfMemory, UserError
from openrl.types import AdamParams, Failed, LoraConfig, ModelId, OptimStepDone, RequestId

FULL = LoraConfig(full=True)
FULL_ID = ModelId("full")
ADAM = AdamParams(3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)


def _full(trainer, model="full"):
    trainer.create(CreateAdapter(ModelId(model), FULL))
    return trainer


def _step(trainer, *models, adam=ADAM):
    pieces = tuple(OptimPiece(RequestId(f"{m}:2"), ModelId(m), adam) for m in models)
    outcomes = trainer.optimize(OptimPass(KEY, pieces)).outcomes
    assert all(isinstance(outcome, OptimStepDone) for outcome in outcomes), outcomes
    return outcomes


def _flat(trainer, model="full"):
    return trainer.job(ModelId(model)).adapter.weights.flat.clone()


def _named(trainer, flat):
    return trainer.job(FULL_ID).adapter.layout.view(flat).tensors


def _trained(trainer, steps=1, start=0, beside=()):
    """A full model after some steps, with the pieces of others in every pass."""
    for seed in range(start, start + steps):
        rng = np.random.default_rng(seed)
        data = [random_datum(rng, n, "cross_entropy") for n in (20, 1, 37)]
        for outcome in run(trainer, piece("full", data, request=f"full:{seed}"), *beside):
            succeeded(outcome)
        _step(trainer, "full")


def _loss(plain, data, loss):
    total = torch.tensor(0.0)
    for datum in data:
        lp = plain_logprobs(plain, datum)
        total = total + written_out_loss(loss, lp, datum.loss_inputs, DEFAULTS[loss])
    return total


@pytest.mark.parametrize(
    ("family", "loss"),
    [(family, "cross_entropy") for family in ("llama", "qwen2", "gemma3")]
    + [("qwen3", loss) for loss in DEFAULTS],
)
def test_every_parameters_gradient(family, loss, base_model, plain_model):
    rng = np.random.default_rng(0)
    trainer, plain = _full(Trainer(base_model(family), family)), plain_model(family)
    plain.requires_grad_(True)
    data = [random_datum(rng, n, loss) for n in (20, 1, 37)]
    (outcome,) = run(trainer, piece("full", data, loss))
    total = _loss(plain, data, loss)
    total.backward()
    assert succeeded(outcome).metrics["loss:sum"] == pytest.approx(
        float(total.detach()), rel=1e-4, abs=1e-4
    )
    ours = _named(trainer, gradient_of(trainer, "full"))
    theirs = {name: value.grad for name, value in plain.named_parameters()}
    assert set(ours) == set(theirs)
    for name, grad in theirs.items():
        scale = float(grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(ours[name], grad, rtol=2e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_after_steps(family, base_model, plain_model):
    """All five hyper-parameters and clipping."""
    trainer, plain = _full(Trainer(base_model(family), family)), plain_model(family)
    fresh = _flat(trainer)
    plain.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        plain.parameters(),
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    for step in range(5):
        rng = np.random.default_rng(step)
        data = [random_datum(rng, n, "cross_entropy") for n in (12, 30)]
        (outcome,) = run(trainer, piece("full", data, request=f"full:{step}"))
        succeeded(outcome)
        _step(trainer, "full")
        optimizer.zero_grad()
        _loss(plain, data, "cross_entropy").backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), ADAM.grad_clip_norm)
        optimizer.step()
    assert float((_flat(trainer) - fresh).abs().max()) > 0.01
    ours = _named(trainer, _flat(trainer))
    for name, value in plain.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=0, atol=2e-5)


def test_company_changes_no_bit(base_model):
    """Neither of the full model nor of the adapter beside it, nor of the base."""
    base = base_model("qwen3")
    data = [random_datum(np.random.default_rng(9), n, "cross_entropy") for n in (8, 25)]
    before = base.head_weight_VD.clone()

    alone, lora_alone, together = (Trainer(base, "qwen3") for _ in range(3))
    _trained(_full(alone), steps=2)
    add_job(lora_alone, "lora")
    succeeded(run(lora_alone, piece("lora", data))[0])
    add_job(together, "lora")
    _trained(_full(together), steps=1, beside=[piece("lora", data)])
    gradient = gradient_of(together, "lora").clone()
    _trained(together, steps=1, start=1, beside=[piece("lora", data, forward_only=True)])

    assert torch.equal(_flat(together), _flat(alone))
    assert torch.equal(gradient, gradient_of(lora_alone, "lora"))
    assert torch.equal(base.head_weight_VD, before)


def test_two_full_models_have_weights_of_their_own(base_model):
    trainer = _full(_full(Trainer(base_model("llama"), "llama")), "other")
    fresh = _flat(trainer, "other")
    _trained(trainer)
    assert torch.equal(_flat(trainer, "other"), fresh)
    assert not torch.equal(_flat(trainer), fresh)


def test_a_fresh_one_has_the_bases_logprobs(base_model, plain_model):
    trainer = _full(Trainer(base_model("gemma3"), "gemma3"))
    datum = random_datum(np.random.default_rng(3), 30, "cross_entropy")
    (outcome,) = run(trainer, piece("full", [datum], forward_only=True))
    ours = torch.from_numpy(succeeded(outcome).outputs[0]["logprobs"])
    theirs = plain_logprobs(plain_model("gemma3"), datum)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-4)
    assert trainer.job(FULL_ID).gradient is None


def test_transformers_loads_a_checkpoint(base_model, tmp_path):
    trainer = _full(Trainer(base_model("qwen3"), "qwen3"))
    _trained(trainer, steps=2)
    trainer.save(SaveAdapter(FULL_ID, tmp_path, with_optimizer=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for name, value in _named(trainer, _flat(trainer)).items():
        assert torch.equal(theirs.get_parameter(name), value), name
    datum = random_datum(np.random.default_rng(3), 30, "cross_entropy")
    (outcome,) = run(trainer, piece("full", [datum], forward_only=True))
    ours = torch.from_numpy(succeeded(outcome).outputs[0]["logprobs"])
    torch.testing.assert_close(ours, plain_logprobs(theirs, datum).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["created", "loaded", "snapshot"])
def test_going_on_is_exact(how, base_model, tmp_path):
    base = base_model("qwen3")
    trainer, second = Trainer(base, "qwen3"), Trainer(base, "qwen3")
    _trained(_full(trainer), steps=2)
    directory = tmp_path / "kept"
    if how == "snapshot":
        writer = SnapshotWriter()
        writer.write(directory, lambda: files_of_job(trainer.job(FULL_ID), "same"))
        writer.finish()
        second.restore(RestoreAdapter(FULL_ID, FULL, directory), "same")
    else:
        directory.mkdir()
        trainer.save(SaveAdapter(FULL_ID, directory, with_optimizer=True))
        if how == "loaded":
            _trained(_full(second), start=7)
            second.load(LoadAdapter(FULL_ID, directory, with_optimizer=True))
        else:
            second.create(CreateAdapter(FULL_ID, FULL, directory, with_optimizer=True))
    for one in (trainer, second):
        _trained(one, steps=2, start=2)
    assert torch.equal(_flat(second), _flat(trainer))


def test_idle_ones_leave_memory_and_come_back(base_model, tmp_path):
    base = base_model("qwen3")
    free = _full(Trainer(base, "qwen3"))
    size = job_bytes(free.job(FULL_ID).adapter.layout, base.dtype)
    tight = _full(Trainer(base, "qwen3", AdapterBudget(device=size, disk=tmp_path)))
    _trained(free, steps=1)
    _trained(tight, steps=1)
    _full(tight, "other")
    assert tight.resident == 1
    _trained(free, start=1)
    _trained(tight, start=1)
    assert torch.equal(_flat(tight), _flat(free))
    with pytest.raises(OutOfMemory, match="a full model takes"):
        _full(Trainer(base, "qwen3", AdapterBudget(device=size - 1, disk=tmp_path)))


def test_a_failed_request_leaves_no_gradient(base_model):
    trainer = _full(Trainer(base_model("qwen3"), "qwen3"))
    rng = np.random.default_rng(4)
    good, bad = (random_datum(rng, 9, "cross_entropy") for _ in range(2))
    bad.loss_inputs["weights"][3] = np.nan
    (outcome,) = run(trainer, piece("full", [good, bad]))
    assert isinstance(outcome, Failed)
    assert trainer.job(FULL_ID).gradient is None


def test_checkpoints_of_the_other_kind_are_refused(base_model, tmp_path):
    trainer = _full(Trainer(base_model("qwen3"), "qwen3"))
    add_job(trainer, "lora")
    for model in ("full", "lora"):
        (tmp_path / model).mkdir()
        trainer.save(SaveAdapter(ModelId(model), tmp_path / model, with_optimizer=False))
    assert set(load_file(tmp_path / "full/model.safetensors")) >= {"model.norm.weight"}
    for model, other in (("full", "lora"), ("lora", "full")):
        before = _flat(trainer, model)
        with pytest.raises(UserError):
            trainer.load(LoadAdapter(ModelId(model), tmp_path / other, with_optimizer=False))
        assert torch.equal(_flat(trainer, model), before)
