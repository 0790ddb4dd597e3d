"""The sampler against plain transformers and peft, and its rules for rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from openrl.engines.base import AdapterSource, RowId
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.checkpoint import write_adapter
from openrl.errors import Gone, OutOfMemory, ServerError, UserError
from openrl.types import Failed, SampledSequence, Stop, VersionId

EOS = 2
FAMILIES = ("llama", "qwen3", "gemma3")


def plain_logprobs(model: Any, prompt: list[int], tokens: np.ndarray, heat: float) -> torch.Tensor:
    """log p_T of each sampled token, from one plain forward."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    logits_NV = model(ids).logits[0, len(prompt) - 1 : -1].float() / heat
    return logits_NV.log_softmax(-1).gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(
    family: str, drive: Any, start: Any, prompt: Any, plain_model: Callable[[str], Any]
) -> None:
    prompts = [prompt(i, n) for i, n in enumerate((1, 5, 40, 70, 33, 64))]
    got = drive(family).all(
        *(
            start(f"r{i}", p, n=2, max_tokens=50, temperature=0.0, stop=Stop())
            for i, p in enumerate(prompts)
        )
    )
    model = plain_model(family)
    for i, p in enumerate(prompts):
        ids = torch.tensor([p])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=50,
            do_sample=False,
            eos_token_id=EOS,
        )[0, len(p) :]
        for k in range(2):
            row = got[RowId(f"r{i}", k)]
            assert row.tokens.tolist() == want.tolist()
            assert row.stop_reason == ("stop" if want[-1] == EOS else "length")


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_plain_forward_with_adapters(
    family: str,
    drive: Any,
    start: Any,
    prompt: Any,
    trained: Any,
    base_model: Callable[[str], BaseModel],
    plain_model: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    """Two ranks, one choice of targets fewer, and the plain base, all in one batch; one version
    is pinned in memory, one read from its checkpoint. The head's adapter is left to the
    trainer's tests, since peft knows none by our key."""
    base = base_model(family)
    kinds = {
        "a": trained(base, 1, 4, train_unembed=False),
        "b": trained(base, 2, 8, train_unembed=False, train_mlp=False),
    }
    d = drive(family)
    for name, adapter in kinds.items():
        (tmp_path / name).mkdir()
        write_adapter(adapter, tmp_path / name, "base")
    d.sampler.pin(VersionId("a"), kinds["a"])
    sources = {
        "a": AdapterSource(VersionId("a")),
        "b": AdapterSource(VersionId("b"), tmp_path / "b"),
        "plain": None,
    }
    heat = {"a": 1.0, "b": 0.7, "plain": 1.5}
    prompts = {"a": prompt(1, 37), "b": prompt(2, 6), "plain": prompt(3, 50)}
    got = d.all(
        *(
            start(k, prompts[k], n=5, max_tokens=40, temperature=heat[k], version=sources[k])
            for k in sources
        )
    )
    for k in sources:
        model = plain_model(family)
        if k != "plain":
            model = PeftModel.from_pretrained(model, tmp_path / k)
        gaps = [
            torch.from_numpy(got[RowId(k, i)].logprobs)
            - plain_logprobs(model, prompts[k], got[RowId(k, i)].tokens, heat[k])
            for i in range(5)
        ]
        gap = torch.cat(gaps).abs()
        assert gap.max() < 1e-4, (k, gap.max())
        assert gap.mean() < 1e-5, (k, gap.mean())


def test_the_heads_adapter_counts(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any, plain_model: Any
) -> None:
    adapter = trained(base_model("llama"), 5, train_attn=False, train_mlp=False)
    d = drive("llama")
    d.sampler.pin(VersionId("v"), adapter)
    p = prompt(1, 9)
    row = d.all(start("r", p, max_tokens=12, version=AdapterSource(VersionId("v"))))[RowId("r", 0)]
    model = plain_model("llama")
    factor = adapter.weights.by_linear[base_model("llama").head_index]
    model.lm_head.weight += adapter.scale * factor.b_NR @ factor.a_RD
    want = plain_logprobs(model, p, row.tokens, 1.0)
    torch.testing.assert_close(torch.from_numpy(row.logprobs), want, atol=1e-4, rtol=0)


def test_seeds_repeat_and_samples_differ(drive: Any, start: Any, prompt: Any) -> None:
    p = prompt(4, 12)
    rows = drive().all(
        start("a", p, n=6, seed=7), start("b", p, n=6, seed=7), start("c", p, n=6, seed=8)
    )
    tokens = {key: tuple(row.tokens.tolist()) for key, row in rows.items()}
    assert all(tokens[RowId("a", i)] == tokens[RowId("b", i)] for i in range(6))
    assert len({tokens[RowId("a", i)] for i in range(6)}) == 6
    assert tokens[RowId("a", 0)] != tokens[RowId("c", 0)]
    unseeded = drive().all(start("d", p, n=6, seed=None))
    assert len({tuple(row.tokens.tolist()) for row in unseeded.values()}) == 6


def test_first_tokens_follow_the_softmax(
    drive: Any, start: Any, prompt: Any, plain_model: Any
) -> None:
    p, draws = prompt(5, 10), 4000
    rows = drive(kv_tokens=1 << 18).all(start("r", p, n=draws, max_tokens=1, temperature=1.5))
    seen = np.bincount([int(row.tokens[0]) for row in rows.values()], minlength=101)
    logits_V = plain_model("qwen3")(torch.tensor([p])).logits[0, -1].double() / 1.5
    want = logits_V.softmax(-1).numpy() * draws
    common = want > 5
    chi_square = ((seen - want)[common] ** 2 / want[common]).sum()
    degrees = int(common.sum())
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)
    assert abs(seen[~common].sum() - want[~common].sum()) < 5 * np.sqrt(want[~common].sum() + 1)


def test_prompt_logprobs(drive: Any, start: Any, prompt: Any, plain_model: Any) -> None:
    p = prompt(6, 75)
    d = drive()
    d.all(start("warm", p))  # its cached prefix must not be used for scores
    d.all(
        start(
            "r", p, n=2, asked={"prompt_logprobs": True, "topk_prompt_logprobs": 3}, temperature=0.3
        )
    )
    out = d.prompts["r"]
    logprobs_PV = plain_model("qwen3")(torch.tensor([p])).logits[0].log_softmax(-1)
    want = logprobs_PV[:-1].gather(1, torch.tensor(p)[1:, None])[:, 0]
    assert out.prompt_logprobs.shape == (75,)
    assert np.isnan(out.prompt_logprobs[0])
    np.testing.assert_allclose(out.prompt_logprobs[1:], want, atol=1e-4)
    best = logprobs_PV[:-1].topk(3, dim=-1)
    np.testing.assert_array_equal(out.topk_prompt_logprobs.token_ids[1:], best.indices)
    np.testing.assert_allclose(out.topk_prompt_logprobs.logprobs[1:], best.values, atol=1e-4)
    assert (out.topk_prompt_logprobs.token_ids[0] == 0).all()
    assert (out.topk_prompt_logprobs.logprobs[0] == -99999.0).all()
    assert out.prompt_cache_hit_tokens == 0
    assert d.prompts["warm"].prompt_logprobs is None


def test_stop_rules(drive: Any, start: Any, prompt: Any) -> None:
    p = prompt(7, 8)
    free = drive().all(start("r", p, max_tokens=30, temperature=3.0))[RowId("r", 0)]
    token = int(free.tokens[9])
    first = free.tokens.tolist().index(token)
    rows = drive().all(
        start("ids", p, max_tokens=30, temperature=3.0, stop=Stop(eos=False, tokens=(token,))),
        start("one", p, max_tokens=1, temperature=3.0),
        start("last", p, max_tokens=first + 1, temperature=3.0, stop=Stop(tokens=(token,))),
    )
    stopped = rows[RowId("ids", 0)]
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.stop_reason == "stop"
    assert np.array_equal(stopped.logprobs, free.logprobs[: first + 1])
    assert rows[RowId("one", 0)].stop_reason == "length"
    assert len(rows[RowId("one", 0)].tokens) == 1
    assert rows[RowId("last", 0)].stop_reason == "stop"


class Letters:
    """Token n is one letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


def test_stop_strings_end_a_row(drive: Any, start: Any, prompt: Any) -> None:
    p = prompt(8, 5)
    free = drive().all(start("r", p, max_tokens=40, temperature=3.0))[RowId("r", 0)]
    text = Letters().decode(free.tokens.tolist())
    wanted = text[20:23]
    end = text.index(wanted) + 3
    d = drive(detokenizer=Letters())
    stop = Stop(eos=False, strings=("nowhere to be found", wanted))
    row = d.all(start("r", p, max_tokens=40, temperature=3.0, stop=stop))[RowId("r", 0)]
    assert row.tokens.tolist() == free.tokens[:end].tolist()
    assert row.stop_reason == "stop"


class NoTokenizer:
    def decode(self, ids: list[int]) -> str:
        raise UserError("no tokenizer")


def test_a_request_that_cannot_start_fails_alone(drive: Any, start: Any, prompt: Any) -> None:
    d = drive(detokenizer=NoTokenizer())
    report = d.turn(
        admit=(
            start("strings", prompt(1, 4), n=2, stop=Stop(strings=("x",))),
            start("gone", prompt(1, 4), version=AdapterSource(VersionId("never"))),
            start("good", prompt(1, 4)),
        )
    )
    d.finish()
    assert len({row.row for row in report.rows}) == 4
    assert isinstance(d.ended[RowId("strings", 1)].error, UserError)
    assert isinstance(d.ended[RowId("gone", 0)].error, Gone)
    assert isinstance(d.ended[RowId("good", 0)], SampledSequence)


def test_weights_that_give_no_numbers_fail_their_rows_alone(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any
) -> None:
    base = base_model("qwen3")
    broken = trained(base, 1)
    broken.weights.flat.fill_(float("nan"))
    p = prompt(2, 20)
    want = drive().all(start("good", p, n=3))
    d = drive()
    d.sampler.pin(VersionId("broken"), broken)
    d.turn(
        admit=(
            start("good", p, n=3),
            start("bad", p, n=2, version=AdapterSource(VersionId("broken"))),
        )
    )
    d.finish()
    for i in range(2):
        failed = d.ended[RowId("bad", i)]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, ServerError)
        assert "not finite" in failed.error.message
    for row, sequence in want.items():
        assert np.array_equal(d.ended[row].logprobs, sequence.logprobs)
    # Neither a slot nor a cached prefix of theirs harms whoever comes next.
    again = d.all(start("next", p, n=8))
    assert np.array_equal(again[RowId("next", 0)].logprobs, want[RowId("good", 0)].logprobs)


def test_pinned_versions_do_not_change_and_may_be_dropped_while_in_use(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any
) -> None:
    adapter = trained(base_model("qwen3"), 1)
    source, p = AdapterSource(VersionId("v1")), prompt(3, 40)
    d = drive(steps=2)
    d.sampler.pin(VersionId("v1"), adapter)
    before = d.all(start("before", p, version=source))[RowId("before", 0)]
    adapter.weights.flat.mul_(3)
    after = d.all(start("after", p, version=source))[RowId("after", 0)]
    assert np.array_equal(before.logprobs, after.logprobs)
    d.turn(admit=(start("running", p, version=source),))
    d.sampler.drop_version(VersionId("v1"))
    d.finish()
    assert np.array_equal(d.ended[RowId("running", 0)].logprobs, before.logprobs)
    d.turn(admit=(start("late", p, version=source),))
    assert isinstance(d.ended[RowId("late", 0)].error, Gone)
    assert d.sampler.memory.allocated == 0


def test_a_row_larger_than_the_memory_fails_with_sizes(drive: Any, start: Any, prompt: Any) -> None:
    d = drive(kv_tokens=192)
    d.turn(admit=(start("large", prompt(1, 180)), start("small", prompt(1, 20))))
    d.finish()
    failed = d.ended[RowId("large", 0)]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, OutOfMemory)
    assert "192" in failed.error.message
    assert isinstance(d.ended[RowId("small", 0)], SampledSequence)


def test_a_slice_ends_when_its_time_is_up(drive: Any, start: Any, prompt: Any) -> None:
    """After the step that is running; the rows go on with the next slice."""
    d = drive()
    report = d.turn(admit=(start("r", prompt(1, 5), max_tokens=20),), steps=50, seconds=0.0)
    assert [row.new_tokens for row in report.rows] == [2]  # of the prompt, and one step
    d.turn(steps=50, seconds=60.0)
    assert len(d.ended[RowId("r", 0)].tokens) == 20
