"""A merged model is what peft's `merge_and_unload` makes, also with tied heads and many files."""

from __future__ import annotations

import json
import shutil

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.torch_cases import KEY, add_job, piece, random_datum, run
from transformers import AutoModelForCausalLM

from openrl.engines.base import OptimPass, OptimPiece, SaveAdapter
from openrl.engines.pytorch.merging import merge_adapter
from openrl.engines.pytorch.trainer import Trainer
from openrl.errors import UserError
from openrl.types import AdamParams, LoraConfig, ModelId, RequestId

M = ModelId("m")
TOKENS = torch.arange(1, 30)[None] % 101


def trained(base, directory, **config):
    """A checkpoint whose factors are all far from zero."""
    trainer = Trainer(base, "Org/Tiny")
    add_job(trainer, M, LoraConfig(rank=4, alpha=12, seed=0, **config))
    for step in range(3):
        data = [random_datum(np.random.default_rng(step), 12, "cross_entropy")]
        run(trainer, piece(M, data, request=f"r{step}"))
        trainer.optimize(OptimPass(KEY, (OptimPiece(RequestId("o"), M, AdamParams(0.05)),)))
    directory.mkdir()
    trainer.save(SaveAdapter(M, directory, with_optimizer=False))
    return directory


def by_peft(model, adapter, scratch):
    """Peft looks for the head under its own name, and merging into a tied one would change the
    embeddings as well: it gets a head of its own first."""
    shutil.copytree(adapter, scratch)
    tensors = load_file(scratch / "adapter_model.safetensors")
    renamed = {name.replace("model.unembed_tokens", "lm_head"): t for name, t in tensors.items()}
    save_file(renamed, scratch / "adapter_model.safetensors")
    config = json.loads((scratch / "adapter_config.json").read_text())
    names = {name.replace("unembed_tokens", "lm_head") for name in config["target_modules"]}
    (scratch / "adapter_config.json").write_text(
        json.dumps(config | {"target_modules": sorted(names)})
    )
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.config.tie_word_embeddings = False
    return peft.PeftModel.from_pretrained(model, scratch).merge_and_unload()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("head", [True, False])
def test_the_logits_are_those_of_peft(
    family, head, tmp_path, base_model, model_directory, plain_model
):
    adapter = trained(base_model(family), tmp_path / "adapter", train_unembed=head)
    (tmp_path / "out").mkdir()
    changed = merge_adapter(model_directory(family), adapter, tmp_path / "out")
    assert changed == 2 * 7 + head
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = by_peft(plain_model(family), adapter, tmp_path / "peft")
    with torch.no_grad():
        ours, theirs = merged.eval()(TOKENS).logits, expected.eval()(TOKENS).logits
        plain = plain_model(family)(TOKENS).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - plain).abs().max() > 0.1, "the adapter does something"
    assert torch.equal(merged.get_input_embeddings().weight,
                       plain_model(family).get_input_embeddings().weight)  # fmt: skip
    assert merged.config.tie_word_embeddings == (family != "llama" and not head)


def test_a_model_of_many_files_keeps_them(tmp_path, base_model, plain_model):
    plain_model("qwen3").save_pretrained(tmp_path / "base", max_shard_size="40KB")
    adapter = trained(base_model("qwen3"), tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    merge_adapter(tmp_path / "base", adapter, tmp_path / "out")
    files = [sorted(f.name for f in (tmp_path / d).glob("*.safetensors")) for d in ("base", "out")]
    assert len(files[0]) > 1
    assert files[0] == files[1]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = by_peft(plain_model("qwen3"), adapter, tmp_path / "peft")
    with torch.no_grad():
        torch.testing.assert_close(
            merged.eval()(TOKENS).logits, expected.eval()(TOKENS).logits, rtol=1e-4, atol=1e-4
        )


def test_weights_keep_their_type(tmp_path, base_model, plain_model):
    plain_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    adapter = trained(base_model("llama"), tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    merge_adapter(tmp_path / "base", adapter, tmp_path / "out")
    kinds = {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}


def test_an_adapter_of_another_model_is_refused(tmp_path, base_model, model_directory):
    adapter = trained(base_model("qwen3"), tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    wrong = tensors | {name: torch.zeros(4, 7)}
    elsewhere = {k.replace("layers.1", "layers.5"): v for k, v in tensors.items()}
    for place, (given, said) in enumerate(((wrong, "q_proj"), (elsewhere, r"layers\.5"))):
        save_file(given, adapter / "adapter_model.safetensors")
        (tmp_path / f"out{place}").mkdir()
        with pytest.raises(UserError, match=said):
            merge_adapter(model_directory("qwen3"), adapter, tmp_path / f"out{place}")


def test_what_cannot_be_merged_is_refused(tmp_path, base_model, model_directory):
    adapter = trained(base_model("llama"), tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UserError, match="use_dora"):
        merge_adapter(model_directory("llama"), adapter, tmp_path)


def test_a_full_model_needs_no_merging(tmp_path, model_directory):
    """The checkpoint of a model that trained all its parameters."""
    whole = model_directory("llama")
    with pytest.raises(UserError, match="full model, with nothing to merge"):
        merge_adapter(whole, whole, tmp_path)
