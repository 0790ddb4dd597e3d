"""What a forward pass says about itself beside the loss, on the host, in float64.

Names are `name:reduction`, with exactly one colon: clients merge the parts of a request by the
reduction. Every metric of a loss is there for each of its atoms, since one that is missing in
one part is dropped from the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from openrl.types import ACTIVE_TOKENS, Array


def token_metrics(terms_SK: Array) -> dict[str, float]:
    """`loss:sum` and `num_tokens:sum`, which every request has."""
    return {"loss:sum": float(terms_SK.sum(dtype=np.float64)), "num_tokens:sum": len(terms_SK)}


def likelihood_metrics(logprobs_SK: Array, weights_SK: Array) -> dict[str, float]:
    """For cross-entropy: the sum of the weights, how many targets have one that is not zero, and
    the mean of -lp over these, each counted once."""
    counted = weights_SK != 0
    values = -logprobs_SK[counted].astype(np.float64)
    return {
        "weights:sum": float(weights_SK.sum(dtype=np.float64)),
        ACTIVE_TOKENS: float(counted.sum()),
        "nll:mean": float(values.mean()) if counted.any() else 0.0,
    }


def ratio_metrics(
    logprobs_S: Array, inputs: Mapping[str, Array], clipped_S: Array | None
) -> dict[str, float]:
    """How far the learner (lp) is from the sampler (q), over tokens whose advantage A is not zero.

    With r = exp(lp - q): the mean and the largest ratio; two estimates of KL(sampler, learner),
    k1 = q - lp and k3 = r - 1 - log r, which is never negative; the largest gap of a
    log-probability; -lp, whose mean over sampled tokens estimates the learner's entropy when the
    two are near; the fraction of tokens whose ratio a bound cut.
    """
    active = inputs["advantages"] != 0
    count = max(int(active.sum()), 1)
    lp = logprobs_S[active].astype(np.float64)
    gap = lp - inputs["logprobs"][active]
    with np.errstate(over="ignore"):
        ratio = np.exp(gap)
    found = {
        ACTIVE_TOKENS: float(active.sum()),
        "ratio:mean": float(ratio.sum()) / count,
        "ratio:max": float(ratio.max(initial=0.0)),
        "sampler_kl_k1:mean": -float(gap.sum()) / count,
        "sampler_kl_k3:mean": float((ratio - 1 - gap).sum()) / count,
        "sampler_logprob_gap:max": float(np.abs(gap).max(initial=0.0)),
        "entropy_estimate:mean": -float(lp.sum()) / count,
    }
    if clipped_S is not None:
        found["clip_fraction:mean"] = float((clipped_S[active] != 0).sum()) / count
    return found
