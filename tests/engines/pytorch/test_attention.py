from __future__ import annotations

import pytest
import torch

from openrl.engines.pytorch.attention import BucketedAttention, Span, length_class

CPU = torch.device("cpu")
H, K, D = 4, 2, 8


def _spans(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [Span(end - n, end) for n, end in zip(lengths, ends, strict=True)]


def _inputs(total, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(total, heads, D, generator=generator) for heads in (H, K, K)]


def _one_by_one(q, k, v, spans, window, softcap, scaling=0.3):
    """Row by row, head by head."""
    out = torch.zeros_like(q)
    for span in spans:
        for i in range(span.start, span.end):
            low = span.start if window is None else max(span.start, i - window + 1)
            for h in range(H):
                scores = (k[low : i + 1, h * K // H] @ q[i, h]) * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[i, h] = scores.softmax(0) @ v[low : i + 1, h * K // H]
    return out


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_buckets_equal_attention_written_out(window, softcap):
    spans = _spans([3, 20, 1, 17, 33])
    q, k, v = _inputs(74)
    attend = BucketedAttention(spans, CPU)
    out = attend(0, q, k, v, scaling=0.3, sliding_window=window, softcap=softcap)
    expected = _one_by_one(q, k, v, spans, window, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_gradient_is_that_of_attention_written_out(window, softcap):
    spans = _spans([3, 18])
    ours = [x.requires_grad_() for x in _inputs(21)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    weight = torch.randn(21, H, D)
    attend = BucketedAttention(spans, CPU)
    out = attend(0, *ours, scaling=0.3, sliding_window=window, softcap=softcap)
    (out * weight).sum().backward()
    (_one_by_one(*theirs, spans, window, softcap) * weight).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def _with_gradient(q, k, v, spans, weight, window, softcap):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = BucketedAttention(spans, CPU)(
        0, *inputs, scaling=0.3, sliding_window=window, softcap=softcap
    )
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sequence_has_the_same_bits_in_any_company(window, softcap):
    spans = _spans([40, 7, 300, 35, 12])
    q, k, v = _inputs(394, seed=1)
    weight = torch.randn(394, H, D)
    together = _with_gradient(q, k, v, spans, weight, window, softcap)
    for span in spans:
        rows = slice(*span)
        own = [Span(0, span.end - span.start)]
        alone = _with_gradient(q[rows], k[rows], v[rows], own, weight[rows], window, softcap)
        for mine, other in zip(alone, together, strict=True):
            assert torch.equal(mine, other[rows])


def test_a_length_class_holds_its_length_and_is_less_than_its_double():
    classes = [length_class(n) for n in range(1, 3000)]
    assert all(padded >= n for n, padded in enumerate(classes, start=1))
    assert all(padded <= max(16, 2 * n) for n, padded in enumerate(classes, start=1))
    assert classes == sorted(classes)


def test_nan_stays_in_its_sequence():
    spans = _spans([10, 12])
    q, k, v = _inputs(22)
    k[3] = float("nan")
    out = BucketedAttention(spans, CPU)(0, q, k, v, scaling=0.3, sliding_window=None, softcap=None)
    assert bool(out[10:].isfinite().all())
    assert not bool(out[:10].isfinite().all())
