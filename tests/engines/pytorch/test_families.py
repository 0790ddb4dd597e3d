"""Families of models, each made from a small random configuration of several layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from support.torch_cases import (
    KEY,
    add_job,
    gradient_of,
    peft_layers,
    piece,
    plain_logprobs,
    random_datum,
    randomise,
    run,
    succeeded,
    with_peft,
    written_out_loss,
)
from transformers import AutoConfig, AutoModelForCausalLM

from openrl.engines.base import AdapterSource, DecodePass, RowStart, SaveAdapter
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.checkpoint import read_adapter
from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.lora import Adapter, Layout, fresh_adapter
from openrl.engines.pytorch.merging import merge_adapter
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.engines.pytorch.sampler import Sampler
from openrl.engines.pytorch.trainer import Trainer
from openrl.errors import UserError
from openrl.types import (
    LoraConfig,
    ModelId,
    RequestId,
    Sample,
    SampledSequence,
    SamplingParams,
    Stop,
    VersionId,
)

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
SMALL: dict[str, object] = {
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
SMALL_CAPS = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0}
"""Gemma's own (50 and 30) would not show at this size."""
WINDOWED: dict[str, object] = {
    "sliding_window": 8,
    "layer_types": LOCAL_AND_GLOBAL,
    "query_pre_attn_scalar": 8,
}
SERVED: dict[str, tuple[str, dict[str, object]]] = {
    "Llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "SmolLM2": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "Qwen2, Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {}),
    "Gemma 3": ("gemma3_text", WINDOWED),
    "Gemma 2": ("gemma2", WINDOWED | SMALL_CAPS),
    "Mistral": ("mistral", {"sliding_window": 8}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}
REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3-MoE": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "Phi-3": ("phi3", {}),
    "GPT-OSS": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
ADAPTED = {
    "train_attn": {f"self_attn.{name}_proj" for name in "qkvo"},
    "train_mlp": {f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "train_unembed": {"unembed_tokens"},
}
"""What an adapter covers, in each layer and once for the head."""


def make(architecture: str, settings: dict[str, object]) -> transformers.PreTrainedModel:
    """Biases are made non-zero, so that losing one shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **(SMALL | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    return model


@dataclass(frozen=True)
class Family:
    directory: Path
    base: BaseModel

    def plain(self) -> Any:
        """The same weights as transformers serves them, fresh each time."""
        return load_plain(self.directory)


def load_plain(directory: Path) -> Any:
    """Eagerly: `sdpa`, transformers' default, ignores Gemma 2's soft-capping."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=SERVED)
def family(request, tmp_path_factory) -> Family:
    directory = tmp_path_factory.mktemp("family")
    make(*SERVED[request.param]).save_pretrained(directory)
    return Family(directory, load_base_model(directory, CPU, torch.float32))


def packed_and_plain(base: BaseModel, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of a few sequences, together and alone."""
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 101, n).astype(np.int32) for n in (30, 1, 9, 48)]
    rows = lay_out(sequences, CPU)
    with torch.no_grad():
        logits_TV = base.logits(base.hidden(training_batch(rows, ())), ())
        for span, tokens in zip(rows.spans, sequences, strict=True):
            expected_NV = model(torch.from_numpy(tokens).long()[None], use_cache=False).logits[0]
            yield logits_TV[span.start : span.end], expected_NV


def test_packed_logits_are_those_of_plain_transformers(family):
    for packed_NV, expected_NV in packed_and_plain(family.base, family.plain()):
        torch.testing.assert_close(packed_NV, expected_NV, rtol=1e-4, atol=1e-4)


def test_gradients_and_logprobs_are_those_of_peft(family):
    trainer = Trainer(family.base, "Org/Tiny")
    adapter = add_job(trainer, "a", LoraConfig(rank=4, alpha=8, seed=1))
    rng = np.random.default_rng(0)
    data = [random_datum(rng, n, "cross_entropy") for n in (20, 1, 37)]
    (outcome,) = run(trainer, piece("a", data))
    reference = with_peft(family.plain(), adapter)
    for datum, record in zip(data, succeeded(outcome).outputs, strict=True):
        expected_N = plain_logprobs(reference, datum)
        written_out_loss("cross_entropy", expected_N, datum.loss_inputs, {}).backward()
        torch.testing.assert_close(
            torch.from_numpy(record["logprobs"]), expected_N.detach(), rtol=1e-4, atol=1e-4
        )
    ours = adapter.layout.view(gradient_of(trainer, "a")).by_linear
    layers = peft_layers(reference, adapter)
    assert len(layers) == 3 * 7 + 1
    for index, _, layer in layers:
        mine = ours[index]
        assert mine is not None
        for gradient, side in ((mine.a_RD, layer.lora_A), (mine.b_NR, layer.lora_B)):
            expected = side["default"].weight.grad
            scale = float(expected.abs().max())
            assert scale > 0
            torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=1e-4 * scale)


def test_company_changes_no_bit(family):
    rng = np.random.default_rng(3)
    data = {name: [random_datum(rng, n, "cross_entropy") for n in (33, 7)] for name in "abc"}
    logprobs, gradients = [], []
    for names in ("a", "cab"):
        trainer = Trainer(family.base, "Org/Tiny")
        for name in names:
            add_job(trainer, name, LoraConfig(rank=4 + ord(name) % 3, seed=1))
        outcomes = run(trainer, *(piece(name, data[name]) for name in names))
        output = succeeded(outcomes[names.index("a")])
        logprobs.append(np.concatenate([record["logprobs"] for record in output.outputs]))
        gradients.append(gradient_of(trainer, "a"))
    assert np.array_equal(*logprobs)
    assert torch.equal(*gradients)


def sampled(base: BaseModel, adapter: Adapter, prompts: Sequence[Any]) -> list[SampledSequence]:
    """Greedy, all in one batch, by the adapter's version and the base in turn."""
    reader = partial(read_adapter, linears=base.linears, device=CPU, dtype=torch.float32)
    sampler = Sampler(
        base, kv_cache_bytes=1 << 22, eos_token_ids=(2,), detokenizer=None, read_adapter=reader
    )
    sampler.pin(VersionId("v"), adapter)
    params = SamplingParams(max_tokens=24, temperature=0.0, stop=Stop(eos=False))
    sources = (AdapterSource(VersionId("v")), None)
    starts = tuple(
        RowStart(RequestId(str(n)), Sample(prompt, params), sources[n % 2], (0,), 24)
        for n, prompt in enumerate(prompts)
    )
    ended: dict[str, SampledSequence] = {}
    report = sampler.run(DecodePass(KEY, admit=starts, steps=8))
    for _ in range(20):
        for row in report.rows:
            if row.ended is not None:
                assert isinstance(row.ended, SampledSequence), row.ended
                ended[row.row.request_id] = row.ended
        report = sampler.run(DecodePass(KEY, steps=8))
    return [ended[str(n)] for n in range(len(prompts))]


def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward(family):
    config = LoraConfig(rank=4, alpha=8, seed=1)
    adapter = fresh_adapter(family.base.linears, config, CPU, torch.float32)
    randomise(adapter, seed=2)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 101, n).astype(np.int32) for n in (30, 20, 1, 45)]
    together = sampled(family.base, adapter, prompts)
    models = (with_peft(family.plain(), adapter), family.plain())
    for n, (prompt, row) in enumerate(zip(prompts, together, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, row.tokens])).long()[None]
        with torch.no_grad():
            logits_NV = models[n % 2](ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        best_N = logits_NV.log_softmax(-1).max(-1)
        assert row.tokens.tolist() == best_N.indices.tolist()
        np.testing.assert_allclose(row.logprobs, best_N.values, atol=2e-4)
    (alone,) = sampled(family.base, adapter, prompts[:1])
    assert np.array_equal(alone.tokens, together[0].tokens)
    assert np.array_equal(alone.logprobs, together[0].logprobs)


@pytest.mark.parametrize("switch", ADAPTED)
def test_each_switch_adapts_what_it_says_in_every_layer(family, switch):
    config = LoraConfig(rank=2, **{other: other == switch for other in ADAPTED})
    factors = Layout(family.base.linears, config).zeros(CPU).by_linear
    names = [spec.name for spec in family.base.linears if factors[spec.index] is not None]
    if switch == "train_unembed":
        assert names == ["model.unembed_tokens"]
        return
    expected = {f"model.layers.{n}.{leaf}" for n in range(3) for leaf in ADAPTED[switch]}
    assert set(names) == expected
    modules = dict(family.plain().named_modules())
    assert all(isinstance(modules[name], torch.nn.Linear) for name in names)


@pytest.mark.parametrize("head", [False, True])
def test_peft_and_a_merged_model_give_our_logprobs(family, head, tmp_path):
    """Peft knows no head by our key: with one, the merged model alone is asked."""
    trainer = Trainer(family.base, "Org/Tiny")
    add_job(trainer, "m", LoraConfig(rank=4, alpha=8, seed=0, train_unembed=head))
    adapter, out = tmp_path / "adapter", tmp_path / "merged"
    for directory in (adapter, out):
        directory.mkdir()
    trainer.save(SaveAdapter(ModelId("m"), adapter, with_optimizer=False))
    merge_adapter(family.directory, adapter, out)
    datum = random_datum(np.random.default_rng(1), 25, "cross_entropy")
    (outcome,) = run(trainer, piece("m", [datum], forward_only=True))
    ours_N = torch.from_numpy(succeeded(outcome).outputs[0]["logprobs"])
    models = [load_plain(out)]
    if not head:
        models.append(PeftModel.from_pretrained(family.plain(), adapter))
    with torch.no_grad():
        for model in models:
            torch.testing.assert_close(ours_N, plain_logprobs(model, datum), rtol=1e-4, atol=2e-4)
        without_N = plain_logprobs(family.plain(), datum)
    assert (ours_N - without_N).abs().max() > 0.1, "the adapter does something"


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_linears_are_fused_is_refused(name, tmp_path):
    make(*REFUSED[name]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="mixtures of experts and fused projections"):
        load_base_model(tmp_path, CPU, torch.float32)


def test_the_page_on_models_names_what_is_tested():
    rows = re.findall(r"^\| ([^|]+) \| (yes|no) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == dict.fromkeys(SERVED, "yes") | dict.fromkeys(REFUSED, "no")
