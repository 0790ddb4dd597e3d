from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.torch_cases import KEY, add_job, gradient_of, piece, plain_logprobs, random_datum, run

from openrl.engines.base import CreateAdapter, LoadAdapter, OptimPass, OptimPiece, SaveAdapter
from openrl.engines.pytorch.checkpoint import read_adapter
from openrl.engines.pytorch.trainer import Trainer
from openrl.errors import UserError
from openrl.types import AdamParams, LoraConfig, ModelId, RequestId

CPU = torch.device("cpu")
M, N = ModelId("m"), ModelId("n")


def _train(trainer, model, seed, steps=1):
    rng = np.random.default_rng(seed)
    for step in range(steps):
        data = [random_datum(rng, 12, "cross_entropy")]
        run(trainer, piece(model, data, request=f"{model}:{seed}:{step}"))
        adam = AdamParams(learning_rate=1e-2, weight_decay=0.01)
        trainer.optimize(OptimPass(KEY, (OptimPiece(RequestId("o"), ModelId(model), adam),)))


@pytest.fixture
def trainer(base_model):
    trainer = Trainer(base_model("qwen3"), "Qwen/Tiny")
    add_job(trainer, "m", LoraConfig(rank=4, alpha=12, seed=0))
    _train(trainer, "m", seed=0, steps=3)
    return trainer


def _weights(trainer, model):
    return trainer.job(model).adapter.weights.flat


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_peft_loads_the_directory_and_gives_the_same_logits(
    family, tmp_path, base_model, plain_model
):
    trainer = Trainer(base_model(family), "Org/Tiny")
    add_job(trainer, "m", LoraConfig(rank=4, alpha=12, seed=0, train_unembed=False))
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=False))
    datum = random_datum(np.random.default_rng(1), 25, "cross_entropy")
    model = peft.PeftModel.from_pretrained(plain_model(family), tmp_path)
    (outcome,) = run(trainer, piece("m", [datum], forward_only=True))
    with torch.no_grad():
        expected = plain_logprobs(model, datum)
    torch.testing.assert_close(
        torch.from_numpy(outcome.outputs[0]["logprobs"]), expected, rtol=1e-4, atol=1e-4
    )


def test_the_head_is_keyed_unembed_tokens_and_read_as_lm_head_too(tmp_path, trainer):
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=False))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.model.model.unembed_tokens.lora_B.weight"
    assert tensors[key].shape == (101, 4)
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight" in tensors
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 12)
    assert config["base_model_name_or_path"] == "Qwen/Tiny"
    renamed = {k.replace("model.unembed_tokens", "lm_head"): v for k, v in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path)
    adapter = read_adapter(tmp_path, trainer._base.linears, CPU, torch.float32)
    assert torch.equal(adapter.weights.flat, _weights(trainer, M))


@pytest.mark.parametrize("switches", [{}, {"train_mlp": False}, {"train_unembed": False}])
def test_what_is_read_is_what_was_written(tmp_path, base_model, switches):
    trainer = Trainer(base_model("llama"), "x")
    adapter = add_job(trainer, "m", LoraConfig(rank=2, alpha=7.5, seed=3, **switches))
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=False))
    again = read_adapter(tmp_path, trainer._base.linears, CPU, torch.float32)
    assert torch.equal(again.weights.flat, adapter.weights.flat)
    assert again.scale == adapter.scale
    for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"):
        assert getattr(again.config, name) == getattr(adapter.config, name)


def test_training_goes_on_bit_for_bit_with_the_optimizer_and_not_without(tmp_path, trainer):
    lora = trainer.job(M).adapter.config
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=True))
    trainer.create(CreateAdapter(N, lora, source=tmp_path, with_optimizer=True))
    bare = ModelId("bare")
    trainer.create(CreateAdapter(bare, lora, source=tmp_path))
    assert trainer.job(N).version == 3
    for model in (M, N, bare):
        _train(trainer, model, seed=5, steps=2)
    assert torch.equal(_weights(trainer, M), _weights(trainer, N))
    assert not torch.equal(_weights(trainer, M), _weights(trainer, bare))


def test_an_accumulated_gradient_is_kept_with_the_optimizer(tmp_path, trainer):
    run(trainer, piece("m", [random_datum(np.random.default_rng(6), 9, "cross_entropy")]))
    lora = trainer.job(M).adapter.config
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=True))
    trainer.create(CreateAdapter(N, lora, source=tmp_path, with_optimizer=True))
    assert torch.equal(gradient_of(trainer, "m"), gradient_of(trainer, "n"))


def test_loading_replaces_weights_and_optimizer_and_drops_gradients(tmp_path, trainer):
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=True))
    saved = _weights(trainer, M).clone()
    _train(trainer, "m", seed=7, steps=2)
    run(trainer, piece("m", [random_datum(np.random.default_rng(8), 9, "cross_entropy")]))
    trainer.load(LoadAdapter(M, tmp_path, with_optimizer=True))
    assert torch.equal(_weights(trainer, M), saved)
    assert trainer.job(M).gradient is None
    moments = trainer.job(M).optimizer.moments
    assert moments is not None
    assert moments.step == 3
    trainer.load(LoadAdapter(M, tmp_path, with_optimizer=False))
    assert trainer.job(M).optimizer.moments is None


def _broken(directory, change):
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


KEY_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(KEY_A.replace("lora_A", "lora_B")), "is missing"),
        (lambda t: t.update({KEY_A: torch.zeros(4, 7)}), "has shape"),
        (lambda t: t.update({KEY_A: torch.full((4, 48), torch.nan)}), "not finite"),
        (lambda t: t.update({"more": torch.zeros(1)}), "no place for more"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, trainer, change, words):
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=True))
    _broken(tmp_path, change)
    _train(trainer, "m", seed=9)
    before = _weights(trainer, M).clone()
    with pytest.raises(UserError, match=words):
        trainer.load(LoadAdapter(M, tmp_path, with_optimizer=True))
    assert torch.equal(_weights(trainer, M), before)


def test_other_settings_than_the_models_are_refused_by_name(tmp_path, trainer):
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=False))
    for name, lora in (
        ("rank", LoraConfig(rank=8, alpha=12)),
        ("alpha", LoraConfig(rank=4, alpha=32)),
        ("train_unembed", LoraConfig(rank=4, alpha=12, train_unembed=False)),
    ):
        with pytest.raises(UserError, match=f"incompatible.* {name} "):
            trainer.create(CreateAdapter(N, lora, source=tmp_path))
    lora = trainer.job(M).adapter.config
    with pytest.raises(UserError, match=r"no optimizer\.safetensors"):
        trainer.create(CreateAdapter(N, lora, source=tmp_path, with_optimizer=True))
    assert trainer.count == 1


def test_an_empty_directory_and_rslora_are_refused(tmp_path, trainer):
    with pytest.raises(UserError, match="there is no adapter_model"):
        trainer.load(LoadAdapter(M, tmp_path, with_optimizer=False))
    trainer.save(SaveAdapter(M, tmp_path, with_optimizer=False))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    with pytest.raises(UserError, match="use_rslora"):
        trainer.load(LoadAdapter(M, tmp_path, with_optimizer=False))
