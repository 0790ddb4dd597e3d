from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from openrl import demo
from openrl.engines.pytorch.base_model import PACKED
from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.errors import UserError

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_those_of_plain_transformers(family, base_model, plain_model):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 101, n).astype(np.int32) for n in (30, 1, 9, 16)]
    base, plain = base_model(family), plain_model(family)
    rows = lay_out(sequences, CPU)
    with torch.no_grad():
        logits_TV = base.logits(base.hidden(training_batch(rows, ())), ())
        for span, tokens in zip(rows.spans, sequences, strict=True):
            expected_NV = plain(torch.from_numpy(tokens).long()[None]).logits[0]
            torch.testing.assert_close(
                logits_TV[span.start : span.end], expected_NV, rtol=1e-4, atol=1e-4
            )


def test_a_few_rows_are_filled_up_and_the_filler_is_nobodys():
    rows = lay_out([np.array([5, 6], np.int32)], CPU)
    assert rows.token_ids_T.shape == (16,)
    assert [tuple(span) for span in rows.spans] == [(0, 2)]
    assert [tuple(span) for span in rows.all_spans] == [(0, 2), (2, 16)]
    assert rows.position_ids_T[:2].tolist() == [0, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_are_listed_once_with_the_head_last(family, base_model):
    linears = base_model(family).linears
    assert [linear.index for linear in linears] == list(range(15))
    assert linears[-1].name == "model.unembed_tokens"
    assert (linears[-1].in_features, linears[-1].out_features) == (48, 101)
    assert linears[0].name == "model.layers.0.self_attn.q_proj"


def test_base_weights_never_want_gradients(base_model):
    base = base_model("llama")
    assert not any(parameter.requires_grad for parameter in base.decoder.parameters())


def test_a_mixture_of_experts_is_refused(tmp_path):
    config = Qwen3MoeConfig(
        **SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, head_dim=16
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="mixtures of experts"):
        load_base_model(tmp_path, CPU, torch.float32)


def test_a_family_whose_packed_form_differs_is_refused(tmp_path):
    """Granite divides its logits after the head, which nothing here knows."""
    torch.manual_seed(0)
    GraniteForCausalLM(
        GraniteConfig(**SMALL, logits_scaling=4.0, initializer_range=0.3)
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"granite is not served: packed log-probabilities differ"):
        load_base_model(tmp_path, CPU, torch.float32)


def test_a_rotary_embedding_that_looks_at_the_batch_is_refused(tmp_path, model_directory):
    directory = tmp_path / "dynamic"
    shutil.copytree(model_directory("llama"), directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="rotary embedding"):
        load_base_model(directory, CPU, torch.float32)


def test_files_that_are_no_model_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(UserError, match="cannot be loaded"):
        load_base_model(tmp_path, CPU, torch.float32)


def test_weights_that_are_cut_short_say_so(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(demo.model_directory(), model)
    (model / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(UserError, match=f"{model} cannot be loaded by transformers"):
        load_base_model(model, CPU, torch.float32)


def test_attention_refuses_what_it_would_ignore():
    packed = AttentionInterface()[PACKED]
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UserError, match="s_aux"):
        packed(torch.nn.Identity(), x, x, x, None, 1.0, attend=print, s_aux=torch.zeros(2))
