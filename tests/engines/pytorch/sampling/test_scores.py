"""What a sample may ask about its prompt and its tokens, against plain transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.base import AdapterSource, RowId
from openrl.types import Cells, SampledSequence, SampleOutput, VersionId


def plain(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """fp32 [N, V]: row t is the distribution of what follows token t."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_best_sampled_tokens(
    temperature: float, drive: Any, start: Any, prompt: Any, plain_model: Any
) -> None:
    p, k = prompt(1, 9), 5
    d = drive()
    asked = {"topk_sample_logprobs": k}
    rows = d.all(
        start("r", p, n=2, max_tokens=7, temperature=temperature, asked=asked),
        start("q", p, n=1, max_tokens=7),
        start("s", p, n=1, max_tokens=7, temperature=0.3, asked={"topk_sample_logprobs": 2}),
    )
    assert rows[RowId("q", 0)].topk_logprobs is None
    other = rows[RowId("s", 0)].topk_logprobs
    assert other is not None
    assert other.logprobs.shape == (7, 2)
    row = rows[RowId("r", 1)]
    top = row.topk_logprobs
    assert top is not None
    assert top.token_ids.shape == (7, k)
    want = plain(plain_model("qwen3"), [*p, *row.tokens.tolist()], temperature or 1.0)[8:-1].topk(k)
    assert np.array_equal(top.token_ids, want.indices.numpy())
    assert np.allclose(top.logprobs, want.values.numpy(), atol=1e-4)
    own = [t.tolist().index(i) for t, i in zip(top.token_ids, row.tokens, strict=True) if i in t]
    assert temperature or own == [0] * 7


def test_the_best_of_a_vocabulary_smaller_than_k(drive: Any, start: Any, prompt: Any) -> None:
    d = drive()
    rows = d.all(start("r", prompt(1, 4), asked={"topk_sample_logprobs": 120}))
    top = rows[RowId("r", 0)].topk_logprobs
    assert top is not None
    assert top.logprobs.shape == (8, 120)
    assert (top.logprobs[:, 101:] == -99999.0).all()
    assert (top.logprobs[:, :101] > -99).all()


def scored(d: Any, request: Any) -> SampleOutput:
    d.all(request)
    return d.prompts[request.request_id]  # type: ignore[no-any-return]


@pytest.mark.parametrize("sparse", [False, True])
def test_named_tokens(sparse: bool, drive: Any, start: Any, prompt: Any, plain_model: Any) -> None:
    p = prompt(2, 70)
    if sparse:
        crow = np.zeros(70, np.int64)
        crow[40:] = 2
        crow[69:] = 3
        ids, col = np.array([5, -1, 9]), np.array([3, 70, 0])
        targets = Cells(ids, (69, 128), crow, col)
        wanted = [(39, 5), None, (68, 9)]
    else:
        table = np.full((69, 2), -1, np.int64)
        table[0, 1], table[33, 0], table[68] = 7, 8, (9, 10)
        targets = Cells(table.reshape(-1), (69, 2))
        wanted = [None] * 138
        wanted[1], wanted[66], wanted[136], wanted[137] = (0, 7), (33, 8), (68, 9), (68, 10)
    asked = {"target_prompt_logprobs": targets}
    got = scored(drive(), start("r", p, temperature=0.5, asked=asked)).target_prompt_logprobs
    want = plain(plain_model("qwen3"), p)
    values = [0.0 if cell is None else float(want[cell]) for cell in wanted]
    assert got is not None
    assert got.values.dtype == np.float32
    assert np.allclose(got.values, values, atol=1e-4)
    assert got.shape == targets.shape
    assert got.crow is targets.crow
    assert got.col is targets.col


def test_the_last_prompt_tokens_alone_use_the_cache(drive: Any, start: Any, prompt: Any) -> None:
    d, p = drive(), prompt(3, 100)
    everything = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    whole = scored(d, start("whole", p, asked=everything))
    assert whole.prompt_cache_hit_tokens == 0
    last = scored(d, start("last", p, asked=everything | {"prompt_logprobs_last_n": 20}))
    assert last.prompt_cache_hit_tokens == 64  # position 80 is scored by token 79
    assert last.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert np.isnan(last.prompt_logprobs[:80]).all()
    assert np.array_equal(last.prompt_logprobs[80:], whole.prompt_logprobs[80:])
    top, all_top = last.topk_prompt_logprobs, whole.topk_prompt_logprobs
    assert top is not None
    assert all_top is not None
    assert (top.logprobs[:80] == -99999.0).all()
    assert (top.token_ids[:80] == 0).all()
    assert np.array_equal(top.logprobs[80:], all_top.logprobs[80:])


def test_alternatives_follow_the_softmax(
    drive: Any, start: Any, prompt: Any, plain_model: Any
) -> None:
    p, k, temperature = prompt(4, 40), 100, 0.7
    asked = {"prompt_alt_tokens_k": k}
    draws = [
        scored(drive(), start("r", p, temperature=temperature, seed=s, top_k=1, asked=asked))
        for s in range(20)
    ]
    model = plain_model("qwen3")
    hot, cold = plain(model, p, temperature), plain(model, p)
    alts = [draw.prompt_alt_tokens for draw in draws]
    for alt in alts:
        assert alt is not None
        assert alt.token_ids.shape == (39, k)
        want = cold[:-1].gather(1, torch.from_numpy(alt.token_ids.astype(np.int64)))
        assert np.allclose(alt.logprobs, want.numpy(), atol=1e-4)
    for row in (0, 38):
        counts = Counter(t for alt in alts if alt is not None for t in alt.token_ids[row].tolist())
        chance = hot[row].exp().double().numpy()
        seen = np.array([counts[t] for t in range(101)])
        big = chance * 2000 >= 5
        chi = ((seen - 2000 * chance)[big] ** 2 / (2000 * chance)[big]).sum()
        assert chi < big.sum() + 5 * (2 * big.sum()) ** 0.5


def test_a_shorter_list_of_alternatives_is_the_same_list(
    drive: Any, start: Any, prompt: Any
) -> None:
    p = prompt(4, 40)
    few = scored(drive(), start("r", p, asked={"prompt_alt_tokens_k": 2})).prompt_alt_tokens
    many = scored(drive(), start("r", p, asked={"prompt_alt_tokens_k": 5})).prompt_alt_tokens
    cold = scored(
        drive(), start("r", p, temperature=0.0, asked={"prompt_alt_tokens_k": 2})
    ).prompt_alt_tokens
    assert few is not None
    assert many is not None
    assert cold is not None
    assert np.array_equal(few.token_ids, many.token_ids[:, :2])
    assert np.array_equal(cold.token_ids[:, 0], cold.token_ids[:, 1])


def test_asking_changes_no_token(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any
) -> None:
    p = prompt(5, 70)
    asked = {
        "prompt_logprobs": True,
        "topk_sample_logprobs": 4,
        "prompt_alt_tokens_k": 3,
        "target_prompt_logprobs": Cells(np.full(69, 3), (69, 1)),
    }
    version = AdapterSource(VersionId("v"))
    sequences: list[SampledSequence] = []
    for more in ({}, asked):
        d = drive()
        d.sampler.pin(VersionId("v"), trained(base_model("qwen3"), 1))
        rows = d.all(start("r", p, n=2, version=version, asked=more))
        sequences.append(rows[RowId("r", 1)])
    assert np.array_equal(sequences[0].tokens, sequences[1].tokens)
    assert np.array_equal(sequences[0].logprobs, sequences[1].logprobs)
