"""Families of models, each made from a small random configuration of several layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.errors import UserError

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = {"sliding_window": 8, "layer_types": LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 8}
SERVED = {
    "llama": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": WINDOWED,
    "gemma2": WINDOWED,
    "mistral": {"sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
REFUSED = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def plain(family: str, settings: dict[str, object]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize("family", SERVED)
def test_packed_logits_are_those_of_plain_transformers(family, tmp_path):
    model = plain(family, SERVED[family])
    model.save_pretrained(tmp_path)
    base = load_base_model(tmp_path, CPU, torch.float32)
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 101, n).astype(np.int32) for n in (30, 1, 9, 48)]
    rows = lay_out(sequences, CPU)
    with torch.no_grad():
        logits_TV = base.logits(base.hidden(training_batch(rows, ())), ())
        for span, tokens in zip(rows.spans, sequences, strict=True):
            expected_NV = model(torch.from_numpy(tokens).long()[None], use_cache=False).logits[0]
            torch.testing.assert_close(
                logits_TV[span.start : span.end], expected_NV, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_linears_are_fused_is_refused(family, tmp_path):
    plain(family, REFUSED[family]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="mixtures of experts and fused projections"):
        load_base_model(tmp_path, CPU, torch.float32)
