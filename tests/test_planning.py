"""The planner's counts against models that transformers builds, and its sums written out."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from openrl.errors import UserError
from openrl.planning import ACCELERATORS, GIB, Shape, Wish, plan

CONFIGS = [
    LlamaConfig(),  # 7 B, as it was first
    Qwen2Config(tie_word_embeddings=True),
    Qwen3Config(num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, head_dim=128),
    Gemma3TextConfig(),
    Qwen3MoeConfig(num_hidden_layers=4),
]


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_are_counted(config) -> None:
    model = on_meta(config)
    counted = sum({id(p): p.numel() for p in model.parameters()}.values())
    assert Shape.of(config.to_dict()).parameters == pytest.approx(counted, rel=2e-3)


@pytest.mark.parametrize("config", CONFIGS[:4], ids=lambda config: config.model_type)
def test_adapters_are_counted_as_peft_makes_them(config) -> None:
    config.num_hidden_layers = 2
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:2]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.device("meta"):
        model = get_peft_model(on_meta(config), LoraConfig(r=8, target_modules=targets))
    in_layers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    head = 8 * (config.hidden_size + config.vocab_size)
    assert Shape.of(config.to_dict()).adapter_parameters(8) == in_layers + head


def test_the_parts_of_a_plan_written_out() -> None:
    config = Qwen3Config(
        num_hidden_layers=36,
        hidden_size=2560,
        intermediate_size=9728,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        vocab_size=151936,
    )
    shape = Shape.of(config.to_dict())
    made = plan(shape, ACCELERATORS["H100"], Wish(jobs=8, rank=32, context=8192, rows=16))
    sizes = {part.name: part.size for part in made.parts}
    assert sizes["base weights"] == 2 * shape.parameters
    assert sizes["adapters"] == 8 * shape.adapter_parameters(32) * 22
    assert sizes["keys and values"] == 16 * 8192 * 36 * 2 * 8 * 128 * 2
    assert made.memory < 80 * GIB
    assert made.fits == (sum(sizes.values()) <= made.memory)
    # One job more than fit would not.
    job = shape.adapter_parameters(32) * (22 + 12)
    fixed = sizes["base weights"] + sizes["keys and values"] + sizes["activations"]
    assert fixed + made.jobs_at_once * job <= made.memory < fixed + (made.jobs_at_once + 1) * job


def test_a_small_batch_decodes_at_the_memorys_speed_and_training_at_the_arithmetics() -> None:
    shape = Shape.of(LlamaConfig().to_dict())
    gpu = ACCELERATORS["A100-80"]
    made = plan(shape, gpu, Wish(jobs=1, rank=1, context=1, rows=1))
    read = (
        2 * (shape.active_parameters + shape.adapter_parameters(1)) + shape.kv_bytes_per_token / 2
    )
    assert made.decode_rate == pytest.approx(0.6 * gpu.bandwidth / read, rel=1e-3)
    train = 0.4 * gpu.flops / (4 * shape.active_parameters)
    assert made.train_rate == pytest.approx(train, rel=1e-3)


def test_a_mixture_reads_few_experts_and_holds_all() -> None:
    shape = Shape.of(Qwen3MoeConfig().to_dict())
    assert shape.active_parameters < shape.parameters / 4


def test_what_is_no_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="num_attention_heads"):
        Shape.of({"model_type": "resnet"})
