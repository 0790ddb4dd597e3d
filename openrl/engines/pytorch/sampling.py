"""Drawing tokens: stateless randomness per row, cuts of the distribution, log-probabilities.

Every function works row by row: what a row gets depends on its own logits, parameters, seed
and position alone, never on its neighbours, its place in the batch or when it arrived.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from openrl.types import SamplingParams, TopLogprobs

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_COARSEST_TEMPERATURE = 1e-6  # below it logits / T could overflow fp32; the draw is greedy anyway
EMPTY_LOGPROB = -99999.0
_HEAD = 1024  # top-p looks at this many best tokens before it sorts a whole row
_WIDE, _BLOCK = 2048, 64  # from so many tokens on, a vocabulary is summed in blocks of so many
_ELEMENTS = 1 << 23  # rows are worked on in groups of at most this many float64 cells


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2714064.2660195)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stream_of(seed: int | None, sample: int) -> int:
    """`seed_i = f(seed, i)`, 64 bits: the random stream of sample `i` of a request.
    Without a seed the stream is drawn from the system."""
    if seed is None:
        return secrets.randbits(64)
    return _mix((_mix((seed + _GOLDEN) & _MASK) + _GOLDEN * (sample + 1)) & _MASK)


def uniforms(streams_R: NDArray[np.uint64], positions_R: NDArray[np.int64]) -> Tensor:
    """Float64 [R] in [0, 1): the number of each stream at its position (SplitMix64 by counter,
    53 bits), so that a token can be drawn again without drawing those before it."""
    with np.errstate(over="ignore"):
        z = streams_R + (positions_R.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@dataclass(frozen=True, slots=True, eq=False)
class DrawRules:
    """How each row of a batch is drawn. A field is None where no row needs it.

    `temperature_R1` float32 holds 1 for greedy rows, whose log-probabilities are reported at
    temperature 1. `cut_rows` are the rows with top-k or top-p; `top_k` int64 and `top_p`
    float64 are aligned with it. `tops` are the rows that report their k best tokens, by k: a
    row's do not depend on what other rows ask for, also among equals.
    """

    temperature_R1: Tensor | None
    greedy_R: Tensor | None
    all_greedy: bool
    cut_rows: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    tops: Mapping[int, Tensor]

    def rows(self, start: int, stop: int) -> DrawRules:
        """The rules of a run of rows."""
        cut = self.cut_rows
        mine = None if cut is None else (cut >= start) & (cut < stop)
        if mine is not None and not bool(mine.any()):
            mine = None
        return DrawRules(
            None if self.temperature_R1 is None else self.temperature_R1[start:stop],
            None if self.greedy_R is None else self.greedy_R[start:stop],
            self.all_greedy,
            None if mine is None or cut is None else cut[mine] - start,
            None if mine is None or self.top_k is None else self.top_k[mine],
            None if mine is None or self.top_p is None else self.top_p[mine],
            {k: at[(at >= start) & (at < stop)] - start for k, at in self.tops.items()},
        )


def draw_rules(
    params: Sequence[SamplingParams],
    vocab: int,
    device: torch.device,
    top_logprobs: Sequence[int] = (),
) -> DrawRules:
    """`top_logprobs` says for each row how many of its best tokens are reported."""
    greedy = [p.temperature == 0 for p in params]
    heat = [
        1.0 if p.temperature == 0 else max(p.temperature, _COARSEST_TEMPERATURE) for p in params
    ]
    cut = [r for r, p in enumerate(params) if not greedy[r] and (_cuts_k(p, vocab) or p.top_p < 1)]

    def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return DrawRules(
        tensor(heat, torch.float32)[:, None] if any(h != 1 for h in heat) else None,
        tensor(greedy, torch.bool) if any(greedy) else None,
        all(greedy),
        tensor(cut, torch.int64) if cut else None,
        tensor([params[r].top_k if _cuts_k(params[r], vocab) else vocab for r in cut], torch.int64)
        if cut
        else None,
        tensor([params[r].top_p for r in cut], torch.float64) if cut else None,
        {
            k: tensor([r for r, wanted in enumerate(top_logprobs) if wanted == k], torch.int64)
            for k in sorted(set(top_logprobs) - {0})
        },
    )


def _cuts_k(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """`tokens_R` int64; `logprobs_R` float32, of the tempered distribution before cuts (or at
    temperature 1 when asked raw); it is not finite where a row's logits were not. `tops` are the
    best tokens of that distribution, [k], for the rows that report them."""

    tokens_R: Tensor
    logprobs_R: Tensor
    tops: Mapping[int, TopLogprobs]


def draw(logits_RV: Tensor, rules: DrawRules, uniforms_R: Tensor, *, raw: bool = False) -> Drawn:
    """One token per row: greedy, or the inverse of the distribution function at the uniform
    number. The distribution function is summed in float64: float32 would lose the rare tokens
    of a large vocabulary."""
    rows, vocab = logits_RV.shape
    group = max(1, _ELEMENTS // vocab)
    if rows <= group:
        return _draw_group(logits_RV, rules, uniforms_R, raw)
    starts = range(0, rows, group)
    parts = [
        _draw_group(
            logits_RV[a : a + group], rules.rows(a, a + group), uniforms_R[a : a + group], raw
        )
        for a in starts
    ]
    return Drawn(
        torch.cat([part.tokens_R for part in parts]),
        torch.cat([part.logprobs_R for part in parts]),
        {a + r: top for a, part in zip(starts, parts, strict=True) for r, top in part.tops.items()},
    )


def _draw_group(logits_RV: Tensor, rules: DrawRules, uniforms_R: Tensor, raw: bool) -> Drawn:
    logits_RV = logits_RV.float()
    tempered_RV = logits_RV
    if rules.temperature_R1 is not None:
        tempered_RV = logits_RV / rules.temperature_R1
    logprobs_RV = torch.log_softmax(tempered_RV, dim=-1)
    tokens_R = _choose(logits_RV, logprobs_RV, rules, uniforms_R)
    reported_RV = logprobs_RV
    if raw and rules.temperature_R1 is not None:
        reported_RV = torch.log_softmax(logits_RV, dim=-1)
    chosen_R = reported_RV.gather(1, tokens_R[:, None])[:, 0]
    return Drawn(tokens_R, chosen_R, _best(reported_RV, rules.tops) if rules.tops else {})


def _best(logprobs_RV: Tensor, tops: Mapping[int, Tensor]) -> dict[int, TopLogprobs]:
    """[k] for each row; cells beyond the vocabulary are empty."""
    found: dict[int, TopLogprobs] = {}
    for k, rows in tops.items():
        best = logprobs_RV.index_select(0, rows).topk(min(k, logprobs_RV.shape[1]), dim=-1)
        ids_NK = F.pad(best.indices, (0, k - best.indices.shape[1]))
        values_NK = F.pad(best.values, (0, k - best.values.shape[1]), value=EMPTY_LOGPROB)
        ids, values = ids_NK.cpu().numpy().astype(np.int32), values_NK.cpu().numpy()
        found |= {r: TopLogprobs(ids[n], values[n]) for n, r in enumerate(rows.tolist())}
    return found


def _choose(logits_RV: Tensor, logprobs_RV: Tensor, rules: DrawRules, uniforms_R: Tensor) -> Tensor:
    if rules.all_greedy:
        return logits_RV.argmax(dim=-1)
    weights_RV = logprobs_RV.exp()
    if rules.cut_rows is not None and rules.top_k is not None and rules.top_p is not None:
        cut = weights_RV.index_select(0, rules.cut_rows)
        cut = keep_top_p(keep_top_k(cut, rules.top_k), rules.top_p)
        weights_RV.index_copy_(0, rules.cut_rows, cut)
    drawn_R = inverse_cdf(weights_RV, uniforms_R)
    if rules.greedy_R is None:
        return drawn_R
    return torch.where(rules.greedy_R, logits_RV.argmax(dim=-1), drawn_R)


def inverse_cdf(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Int64 [R]: the first token whose summed weight passes the uniform number's share of the
    total. A token of weight 0 is never chosen. Of a large vocabulary only the blocks' sums and
    the chosen block are summed up one by one: a tenth of the time."""
    rows, vocab = weights_RV.shape
    if vocab < _WIDE:
        cdf_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
        return _first_past(cdf_RV, uniforms_R.to(cdf_RV.device) * cdf_RV[:, -1])[0]
    blocks_RBW = F.pad(weights_RV, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    cdf_RB = blocks_RBW.sum(dim=-1, dtype=torch.float64).cumsum_(dim=-1)
    block_R, rest_R = _first_past(cdf_RB, uniforms_R.to(cdf_RB.device) * cdf_RB[:, -1])
    block_R11 = block_R[:, None, None].expand(-1, 1, _BLOCK)
    chosen_RW = blocks_RBW.gather(1, block_R11)[:, 0]
    within_R, _ = _first_past(chosen_RW.cumsum(dim=-1, dtype=torch.float64), rest_R)
    return (block_R * _BLOCK + within_R).clamp_(max=vocab - 1)


def _first_past(cdf_RN: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each row that is past the target, and how much the target is past the
    place before. Rounding may have put the target at the total, or past it."""
    total_R = cdf_RN[:, -1]
    target_R = torch.minimum(target_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    place_R1 = torch.searchsorted(cdf_RN, target_R[:, None], right=True)
    place_R1.clamp_(max=cdf_RN.shape[1] - 1)  # only rows that are not finite get there
    before_R1 = cdf_RN.gather(1, (place_R1 - 1).clamp_(min=0)).masked_fill_(place_R1 == 0, 0)
    return place_R1[:, 0], target_R - before_R1[:, 0]


def keep_top_k(weights_NV: Tensor, top_k_N: Tensor) -> Tensor:
    """Weights below each row's k-th largest become 0. Ties with it stay, so that the result
    does not depend on an order among equals."""
    widest = int(top_k_N.max())
    if widest >= weights_NV.shape[1] and int(top_k_N.min()) >= weights_NV.shape[1]:
        return weights_NV
    limited_N = torch.where(top_k_N >= weights_NV.shape[1], 1, top_k_N)
    best_NK = weights_NV.topk(int(limited_N.max()), dim=-1).values
    kth_N1 = best_NK.gather(1, limited_N[:, None] - 1)
    kth_N1 = torch.where((top_k_N >= weights_NV.shape[1])[:, None], 0.0, kth_N1)
    return torch.where(weights_NV >= kth_N1, weights_NV, 0.0)


def keep_top_p(weights_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """The fewest largest weights whose sum reaches `top_p` of the row's total stay (at least
    one, and ties with the last); the others become 0."""
    wanted_N1 = weights_NV.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p_N[:, None]
    head = min(_HEAD, weights_NV.shape[1])
    best_NK = weights_NV.topk(head, dim=-1).values
    floor_N1, covered_N = _smallest_kept(best_NK, wanted_N1)
    if head < weights_NV.shape[1]:
        wide = torch.nonzero(~covered_N)[:, 0]
        if wide.numel():
            whole = weights_NV.index_select(0, wide).sort(dim=-1, descending=True).values
            floor_N1[wide] = _smallest_kept(whole, wanted_N1.index_select(0, wide))[0]
    floor_N1 = torch.where(top_p_N[:, None] >= 1, 0.0, floor_N1)
    return torch.where(weights_NV >= floor_N1, weights_NV, 0.0)


def _smallest_kept(sorted_NK: Tensor, wanted_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest weight that stays, and whether the sorted ones reach the wanted sum."""
    sums_NK = sorted_NK.cumsum(dim=-1, dtype=torch.float64)
    kept_N = ((sums_NK - sorted_NK) < wanted_N1).sum(dim=-1).clamp_(min=1)
    return sorted_NK.gather(1, kept_N[:, None] - 1), sums_NK[:, -1] >= wanted_N1[:, 0]
