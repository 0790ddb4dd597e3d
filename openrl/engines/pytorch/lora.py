"""Low-rank adapters: what they are made of and how they lie in memory.

An adapter's factors lie in ONE flat fp32 buffer, with views per linear; a gradient or an
optimizer moment is another flat buffer of the same layout. So optimizing, clipping, copying
and saving an adapter are operations on one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from openrl.errors import UserError
from openrl.types import LoraConfig

ALIGN = 16
"""Views start at multiples of 64 bytes, as fresh tensors do."""

Group = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear that can be adapted. `index` is its place in every list of factors; `name` is its
    path in the model, as PEFT's keys have it after `base_model.model.`. `first` is the index of
    the first linear that takes the same input (q for q, k and v; gate for gate and up): such
    linears follow each other, and their A factors lie in one matrix."""

    index: int
    name: str
    group: Group
    in_features: int
    out_features: int
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """`a_RD` [rank, in_features] and `b_NR` [out_features, rank]: views into a flat buffer.

    B lies there transposed, row by row of [rank, out_features]: products with a thin matrix of
    that order are five to ten times faster than with the other.
    """

    a_RD: Tensor
    b_NR: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The factors of G linears with one input: A as one matrix [G * rank, in_features], and each
    B; both ways round, since making a view takes as long as a small product."""

    a_RD: Tensor
    a_DR: Tensor
    b_NR: tuple[Tensor, ...]
    b_RN: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A flat buffer and its views by linear index; None for a linear that is not adapted.
    `joined` has, at the index of the first of several linears with one input, all of theirs."""

    flat: Tensor
    by_linear: tuple[Factor | None, ...]
    joined: tuple[Joined | None, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    a: int
    b: int


class Layout:
    """Where each factor of an adapter lies in its flat buffer. Gaps stay zero."""

    def __init__(self, linears: Sequence[LinearSpec], config: LoraConfig) -> None:
        self.linears = tuple(linears)
        self.config = config
        self.rank = config.rank
        self.size = 0
        self._places: list[_Place | None] = [None] * len(self.linears)
        for first, members in groupby(self.linears, key=lambda linear: linear.first):
            if getattr(config, f"train_{self.linears[first].group}"):
                self._place(list(members))

    def _place(self, members: Sequence[LinearSpec]) -> None:
        """The A factors of linears with one input, then the B factor of each."""
        size = self.rank * members[0].in_features
        a = self._reserve(size * len(members))
        for place, linear in enumerate(members):
            b = self._reserve(self.rank * linear.out_features)
            self._places[linear.index] = _Place(a + place * size, b)

    def _reserve(self, count: int) -> int:
        start = self.size
        self.size += math.ceil(count / ALIGN) * ALIGN
        return start

    def view(self, flat: Tensor) -> Factors:
        """The factors that lie in `flat` [size]."""
        factors = tuple(self._factor(flat, linear) for linear in self.linears)
        joined: list[Joined | None] = [None] * len(self.linears)
        for first, members in groupby(self.linears, key=lambda linear: linear.first):
            mine = [factors[linear.index] for linear in members]
            joined[first] = self._joined(flat, first, [f.b_NR for f in mine if f is not None])
        return Factors(flat, factors, tuple(joined))

    def _factor(self, flat: Tensor, linear: LinearSpec) -> Factor | None:
        place = self._places[linear.index]
        if place is None:
            return None
        r, d, n = self.rank, linear.in_features, linear.out_features
        a_RD = flat[place.a : place.a + r * d].view(r, d)
        return Factor(a_RD, flat[place.b : place.b + n * r].view(r, n).T)

    def _joined(self, flat: Tensor, first: int, b_NR: Sequence[Tensor]) -> Joined | None:
        place = self._places[first]
        if place is None:
            return None
        rows, d = len(b_NR) * self.rank, self.linears[first].in_features
        a_RD = flat[place.a : place.a + rows * d].view(rows, d)
        return Joined(a_RD, a_RD.T, tuple(b_NR), tuple(b.T for b in b_NR))

    def weights(self, flat: Tensor, dtype: torch.dtype) -> Adapter:
        """What trains in `flat` [size], fp32."""
        return Adapter(self, self.view(flat), dtype)

    def zeros(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Factors:
        return self.view(torch.zeros(self.size, device=device, dtype=dtype))


class Adapter:
    """The weights of one adapter: what a forward pass needs, and nothing of training.

    `weights` are the fp32 masters; `compute` are what products use: the masters themselves for
    an fp32 base model, else a copy in the base model's dtype that `refresh` renews after the
    masters changed. `scale` is alpha / rank.
    """

    def __init__(self, layout: Layout, weights: Factors, dtype: torch.dtype) -> None:
        self.layout = layout
        self.config = layout.config
        self.scale = layout.config.alpha / layout.rank
        self.weights = weights
        self.compute = weights
        if dtype != torch.float32:
            self.compute = layout.view(weights.flat.to(dtype))

    def refresh(self) -> None:
        if self.compute is not self.weights:
            self.compute.flat.copy_(self.weights.flat)

    def copy(self) -> Adapter:
        """An independent copy on the same device, for a version that must not change."""
        flat = self.weights.flat.clone()
        return self.layout.weights(flat, self.compute.flat.dtype)


def fresh_adapter(
    linears: Sequence[LinearSpec], config: LoraConfig, device: torch.device, dtype: torch.dtype
) -> Adapter:
    """A drawn as peft draws it (Kaiming-uniform with a = sqrt(5), which is U(-1/sqrt(in),
    1/sqrt(in))), on the CPU from `config.seed` whatever the device; B zero.

    Raises `UserError` for a rank or a choice of targets that makes no adapter.
    """
    check_config(config)
    layout = Layout(linears, config)
    weights = layout.zeros(torch.device("cpu"))
    generator = torch.Generator()
    if config.seed is None:
        generator.seed()
    else:
        generator.manual_seed(config.seed)
    for factor in weights.by_linear:
        if factor is not None:
            bound = 1 / math.sqrt(factor.a_RD.shape[1])
            factor.a_RD.uniform_(-bound, bound, generator=generator)
    return Adapter(layout, layout.view(weights.flat.to(device)), dtype)


def check_config(config: LoraConfig) -> None:
    """Raises `UserError` for what is no LoRA at all; limits are the caller's to check."""
    if config.rank < 1:
        raise UserError(f"lora_config.rank must be positive, not {config.rank}")
    if not math.isfinite(config.alpha):
        raise UserError(f"lora_config.alpha must be finite, not {config.alpha}")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise UserError("at least one of train_unembed, train_mlp, or train_attn must be true")
