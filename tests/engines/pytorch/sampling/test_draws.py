"""Draws follow the distribution that the parameters ask for, and depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openrl.engines.pytorch.sampling import draw, draw_rules, inverse_cdf, stream_of, uniforms
from openrl.types import SamplingParams

CPU = torch.device("cpu")
DRAWS = 20_000


def frequencies(logits_V: torch.Tensor, params: SamplingParams, draws: int = DRAWS) -> np.ndarray:
    """How often each token comes, over so many streams."""
    streams = np.array([stream_of(11, i) for i in range(draws)], dtype=np.uint64)
    u = uniforms(streams, np.zeros(draws, dtype=np.int64))
    rules = draw_rules([params] * draws, len(logits_V), CPU)
    tokens = draw(logits_V.expand(draws, -1), rules, u).tokens_R
    return np.bincount(tokens.numpy(), minlength=len(logits_V))


def expected(logits_V: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution written out in float64: temperature, then top-k, then top-p."""
    p = np.exp(logits_V.double().numpy() / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.8),
    ],
)
def test_frequencies_pass_a_chi_square_test(params: SamplingParams) -> None:
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 1.5
    p = expected(logits_V, params)
    seen = frequencies(logits_V, params)
    assert seen[p == 0].sum() == 0
    p, seen = p[p > 0], seen[p > 0]
    chi_square = ((seen - DRAWS * p) ** 2 / (DRAWS * p)).sum()
    degrees = len(p) - 1
    # Five standard deviations of the chi-square distribution above its mean.
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_a_nucleus_wider_than_the_quick_look_is_still_right() -> None:
    logits_V = torch.zeros(5000)
    logits_V[:10] = 0.5
    logits_V += torch.linspace(0, 0.5, 5000)  # no ties
    params = SamplingParams(top_p=0.5)
    seen = frequencies(logits_V, params, draws=500)
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(expected(logits_V, params)))


@pytest.mark.parametrize("vocab", [700, 2048, 5003])
def test_the_first_token_past_the_uniform_number_is_drawn(vocab: int) -> None:
    """Beside numpy, also at the ends, and where most weights are zero."""
    rng = np.random.default_rng(vocab)
    weights_RV = (rng.random((40, vocab)) ** 8).astype(np.float32)
    weights_RV[20:, rng.permutation(vocab)[: vocab * 9 // 10]] = 0
    weights_RV[30] = 0
    weights_RV[30, 650] = 1
    u_R = rng.random(40)
    u_R[[0, 20, 30]], u_R[[1, 21]] = 0.0, 1 - 2.0**-53
    got_R = inverse_cdf(torch.from_numpy(weights_RV), torch.from_numpy(u_R)).numpy()
    for weights_V, u, got in zip(weights_RV.astype(np.float64), u_R, got_R, strict=True):
        cdf_V = weights_V.cumsum()
        assert weights_V[got] > 0
        assert (cdf_V[got] - weights_V[got]) / cdf_V[-1] <= u + 1e-12
        assert u <= cdf_V[got] / cdf_V[-1] + 1e-12


def test_ties_at_the_kth_place_stay() -> None:
    logits_V = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    seen = frequencies(logits_V, SamplingParams(top_k=2))
    assert (seen > 0).tolist() == [False, True, True, True, False]


def test_logprobs_are_of_the_tempered_distribution_before_cuts() -> None:
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0, top_p=0.3),
    ]
    heat = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)[:, None]
    rules, u = draw_rules(params, 50, CPU), torch.full((3,), 0.4, dtype=torch.float64)
    for raw, reference_RV in ((False, logits_RV / heat), (True, logits_RV.double())):
        drawn = draw(logits_RV, rules, u, raw=raw)
        want = reference_RV.log_softmax(-1).gather(1, drawn.tokens_R[:, None])[:, 0]
        torch.testing.assert_close(drawn.logprobs_R.double(), want, atol=1e-5, rtol=0)
    assert drawn.tokens_R[1] == logits_RV[1].argmax()


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    generator = torch.Generator().manual_seed(5)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=7),
        SamplingParams(temperature=1.2, top_k=4, top_p=0.5),
    ]
    params = [kinds[i % 5] for i in range(50)]
    logits_RV = torch.randn(50, 3001, generator=generator)
    streams = np.array([stream_of(1, i) for i in range(50)], dtype=np.uint64)
    places = np.arange(50, dtype=np.int64)
    together = draw(logits_RV, draw_rules(params, 3001, CPU), uniforms(streams, places))
    for i in range(50):
        row = slice(i, i + 1)
        alone = draw(
            logits_RV[row],
            draw_rules(params[row], 3001, CPU),
            uniforms(streams[row], places[row]),
        )
        assert torch.equal(alone.tokens_R, together.tokens_R[row])
        assert torch.equal(alone.logprobs_R, together.logprobs_R[row])


def test_large_batches_are_drawn_in_groups_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits_RV = torch.randn(30, 200, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(top_k=5 if i % 3 else -1, temperature=i % 2) for i in range(30)]
    rules = draw_rules(params, 200, CPU)
    u = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = draw(logits_RV, rules, u)
    monkeypatch.setattr("openrl.engines.pytorch.sampling._ELEMENTS", 1400)
    grouped = draw(logits_RV, rules, u)
    assert torch.equal(whole.tokens_R, grouped.tokens_R)
    assert torch.equal(whole.logprobs_R, grouped.logprobs_R)


def test_uniform_numbers_are_uniform_and_streams_differ() -> None:
    streams = np.array([stream_of(0, i) for i in range(100)], dtype=np.uint64)
    assert len(set(streams.tolist())) == 100
    places = np.arange(200, dtype=np.int64)
    u = np.stack([uniforms(np.full(200, s), places).numpy() for s in streams])
    assert (u >= 0).all()
    assert (u < 1).all()
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 5 * np.sqrt(98)
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**64 + 5, -(2**63)])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert stream_of(seed, 0) == stream_of(seed, 0)
    assert stream_of(seed, 0) != stream_of(seed, 1)
    assert 0 <= stream_of(seed, 3) < 2**64


def test_without_a_seed_streams_differ() -> None:
    assert stream_of(None, 0) != stream_of(None, 0)


def test_logits_that_are_no_numbers_show_in_the_logprob() -> None:
    logits_RV = torch.zeros(3, 20)
    logits_RV[1] = float("nan")
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature)] * 3
        drawn = draw(logits_RV, draw_rules(params, 20, CPU), torch.rand(3, dtype=torch.float64))
        assert torch.isfinite(drawn.logprobs_R).tolist() == [True, False, True]


def test_a_tiny_temperature_is_greedy() -> None:
    logits_RV = torch.randn(4, 30, generator=torch.Generator().manual_seed(1)) * 50
    params = [SamplingParams(temperature=1e-30)] * 4
    drawn = draw(logits_RV, draw_rules(params, 30, CPU), torch.full((4,), 0.99).double())
    assert torch.equal(drawn.tokens_R, logits_RV.argmax(-1))
    assert torch.isfinite(drawn.logprobs_R).all()
