from __future__ import annotations

import numpy as np
import pytest
import torch
from support.torch_cases import DEFAULTS, RATIO_LOSSES, random_datum, written_out_loss

from openrl.engines.pytorch import losses
from openrl.engines.pytorch.metrics import likelihood_metrics, ratio_metrics


def _tensors(inputs):
    return {name: torch.from_numpy(v) for name, v in inputs.items() if v.dtype == np.float32}


def _ours(loss, lp, inputs, config):
    given = _tensors(inputs)
    if loss in losses.SEQUENCE_LOSSES:
        given["sequence_ratio"] = losses.sequence_ratio(lp, given)
    return losses.TOKEN_LOSSES[loss](lp, given, config)


@pytest.mark.parametrize("loss", DEFAULTS)
def test_terms_and_slopes_are_the_formulas_and_their_derivatives(loss):
    rng = np.random.default_rng(3)
    datum = random_datum(rng, 200, loss)
    lp = torch.from_numpy(rng.uniform(-8, -2, 200).astype(np.float32)).requires_grad_()
    expected = written_out_loss(loss, lp, datum.loss_inputs, DEFAULTS[loss])
    expected.backward()
    terms = _ours(loss, lp.detach(), datum.loss_inputs, DEFAULTS[loss])
    torch.testing.assert_close(terms.terms.sum(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.slopes, lp.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_thresholds_given_as_inputs_win_token_by_token(loss):
    rng = np.random.default_rng(4)
    datum = random_datum(rng, 100, loss)
    low = rng.uniform(0.1, 0.9, 100).astype(np.float32)
    high = rng.uniform(1.0, 3.0, 100).astype(np.float32)
    inputs = {**datum.loss_inputs, "clip_low_threshold": low, "clip_high_threshold": high}
    lp = torch.from_numpy(rng.uniform(-8, -2, 100).astype(np.float32)).requires_grad_()
    expected = written_out_loss(loss, lp, inputs, DEFAULTS[loss])
    expected.backward()
    terms = _ours(loss, lp.detach(), inputs, DEFAULTS[loss])
    torch.testing.assert_close(terms.slopes, lp.grad, rtol=1e-5, atol=1e-6)
    narrow = written_out_loss(loss, lp.detach(), datum.loss_inputs, DEFAULTS[loss])
    assert abs(float(terms.terms.sum()) - float(narrow)) > 1e-3


@pytest.mark.parametrize("loss", RATIO_LOSSES[:3])
def test_a_masked_token_adds_zero_whatever_its_ratio(loss):
    """exp(500) is infinite in fp32, and infinity * 0 would be NaN."""
    inputs = {
        "logprobs": np.array([-500, -1], np.float32),
        "advantages": np.array([0, 1], np.float32),
    }
    terms = _ours(loss, torch.tensor([0.0, -1.0]), inputs, DEFAULTS[loss])
    assert float(terms.terms[0]) == 0.0
    assert float(terms.slopes[0]) == 0.0
    assert bool(terms.terms.isfinite().all())


def test_a_zero_weight_masks_even_an_infinite_logprob():
    inputs = {"weights": np.array([0, 2], np.float32)}
    terms = _ours("cross_entropy", torch.tensor([-torch.inf, -3.0]), inputs, {})
    assert terms.terms.tolist() == [0.0, 6.0]


def test_an_overflowing_ratio_is_clipped_where_ppo_clips_it_and_shows_where_not():
    inputs = {
        "logprobs": np.array([-500, -500], np.float32),
        "advantages": np.array([1, -1], np.float32),
    }
    terms = _ours("ppo", torch.tensor([0.0, 0.0]), inputs, DEFAULTS["ppo"])
    assert terms.terms[0] == pytest.approx(-1.2)
    assert float(terms.slopes[0]) == 0.0
    assert not bool(terms.terms[1].isfinite())


def test_gspo_with_an_empty_mask_has_ratio_one():
    inputs = {
        "logprobs": torch.tensor([-3.0, -4.0]),
        "sequence_ratio_mask": torch.zeros(2),
    }
    ratio = losses.sequence_ratio(torch.tensor([-1.0, -1.0]), inputs)
    assert ratio.tolist() == [1.0, 1.0]


def test_ratio_metrics_by_hand():
    inputs = {
        "logprobs": np.array([[0.0], [-1.0], [-2.0]], np.float32),
        "advantages": np.array([[0.0], [1.0], [1.0]], np.float32),
    }
    lp = np.array([[-9.0], [-1.0 + np.log(2.0)], [-2.0]], np.float32)
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    terms = losses.ppo(torch.from_numpy(lp), tensors, DEFAULTS["ppo"])
    assert terms.clipped is not None
    found = ratio_metrics(lp, inputs, terms.clipped.numpy())
    log2 = np.log(2.0)
    assert found == {
        "active_tokens:sum": 2.0,
        "ratio:mean": pytest.approx(1.5),
        "ratio:max": pytest.approx(2.0),
        "sampler_kl_k1:mean": pytest.approx(-log2 / 2, rel=1e-6),
        "sampler_kl_k3:mean": pytest.approx((2 - 1 - log2) / 2, rel=1e-6),
        "sampler_logprob_gap:max": pytest.approx(log2, rel=1e-6),
        "entropy_estimate:mean": pytest.approx((3 - log2) / 2, rel=1e-6),
        "clip_fraction:mean": 0.5,
    }


def test_metrics_of_no_active_token_are_finite():
    nothing = np.zeros((3, 1), np.float32)
    found = ratio_metrics(nothing, {"logprobs": nothing, "advantages": nothing}, nothing)
    assert set(found.values()) == {0.0}
    assert set(likelihood_metrics(nothing, nothing).values()) == {0.0}


def test_likelihood_metrics_by_hand():
    lp = np.array([[-1.0, -5.0], [-3.0, -2.0]], np.float32)
    weights = np.array([[2.0, 0.0], [-0.5, 1.0]], np.float32)
    assert likelihood_metrics(lp, weights) == {
        "weights:sum": 2.5,
        "nll:mean": 2.0,
        "active_tokens:sum": 3.0,
    }
