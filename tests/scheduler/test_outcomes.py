"""Parts of a request become the answer that the whole would have been."""

import numpy as np
import pytest

from openrl.engines.base import WeightsKey
from openrl.engines.pytorch.metrics import likelihood_metrics, ratio_metrics
from openrl.errors import ServerError, UserError
from openrl.scheduler.outcomes import merge, outcome_of
from openrl.scheduler.pending import Pending
from openrl.types import (
    Failed,
    ForwardBackward,
    ForwardBackwardOutput,
    Operation,
    OwnerId,
    RequestId,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    SessionId,
    Work,
)


def part(records: int, **metrics: float) -> ForwardBackwardOutput:
    outputs = tuple({"logprobs": np.full(1, i, np.float32)} for i in range(records))
    return ForwardBackwardOutput(outputs, {k.replace("__", ":"): v for k, v in metrics.items()})


def pending(operation: Operation, atoms: int = 0) -> Pending:
    work = Work(RequestId("m:1"), OwnerId("o"), SessionId("s"), "m", 1, operation)
    return Pending(work, WeightsKey("w"), tuple((i, i + 1) for i in range(atoms)))


def test_metrics_merge_by_their_reduction() -> None:
    first = part(1, loss__sum=1.0, a__mean=1.0, b__min=3.0, c__max=3.0, d__unique=7.0, e__sum=1.0)
    second = part(3, loss__sum=2.0, a__mean=5.0, b__min=2.0, c__max=4.0, d__unique=8.0)
    merged = merge([first, second])
    assert merged.metrics == {
        "loss:sum": 3.0,
        "a:mean": (1 * 1.0 + 3 * 5.0) / 4,
        "b:min": 2.0,
        "c:max": 4.0,
        "d:unique": 7.0,
    }
    assert [float(o["logprobs"][0]) for o in merged.outputs] == [0, 0, 1, 2]


@pytest.mark.parametrize("cut", [0, 3, 17, 40])
def test_a_request_that_was_cut_has_the_metrics_of_the_whole(cut: int) -> None:
    draw = np.random.default_rng(cut)
    lp, q = draw.normal(-2, 1, (2, 40)).astype(np.float32)
    advantages = np.where(draw.random(40) < 0.4, 0, 1).astype(np.float32)
    clipped = (draw.random(40) < 0.5).astype(np.float32)

    def found(of: slice, records: int) -> ForwardBackwardOutput:
        inputs = {"logprobs": q[of], "advantages": advantages[of]}
        ratios = ratio_metrics(lp[of], inputs, clipped[of])
        likelihood = likelihood_metrics(lp[of], advantages[of])
        return part(records, **(ratios | likelihood))

    whole = found(slice(None), 4)
    merged = merge([found(slice(cut), 3), found(slice(cut, None), 1)])
    assert merged.metrics == pytest.approx(dict(whole.metrics))


def test_parts_are_put_in_order_whenever_they_came() -> None:
    request = pending(ForwardBackward((), "cross_entropy", {}), atoms=2)
    request.parts[1] = part(1, loss__sum=1.0)
    assert isinstance(outcome_of(request), Failed)  # one is missing
    request.parts[0] = part(2, loss__sum=2.0)
    outcome = outcome_of(request)
    assert isinstance(outcome, ForwardBackwardOutput)
    assert [float(o["logprobs"][0]) for o in outcome.outputs] == [0, 1, 0]


def test_a_failed_part_fails_the_whole() -> None:
    request = pending(ForwardBackward((), "cross_entropy", {}), atoms=3)
    request.parts[0] = part(1, loss__sum=1.0)
    request.parts[1] = Failed(UserError("datum 1"))
    assert outcome_of(request) is request.parts[1]


def sequence(token: int) -> SampledSequence:
    return SampledSequence(np.array([token], np.int32), np.zeros(1, np.float32), "stop")


def test_a_sample_is_its_rows_in_order_with_the_prompts_report() -> None:
    request = pending(Sample(np.array([1], np.int32), SamplingParams(), num_samples=2))
    logprobs = np.array([np.nan], np.float32)
    request.rows[1] = sequence(11)
    request.prompt = SampleOutput((), prompt_logprobs=logprobs, prompt_cache_hit_tokens=3)
    with pytest.raises(ServerError):
        raise outcome_of(request).error  # type: ignore[union-attr]
    request.rows[0] = sequence(10)
    outcome = outcome_of(request)
    assert isinstance(outcome, SampleOutput)
    assert [int(s.tokens[0]) for s in outcome.sequences] == [10, 11]
    assert outcome.prompt_logprobs is logprobs
    assert outcome.prompt_cache_hit_tokens == 3
    request.rows[1] = Failed(UserError("no"))
    assert outcome_of(request) is request.rows[1]
