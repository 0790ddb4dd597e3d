"""The low-rank products of many versions at once, for sampling.

Versions with rows in the batch lie stacked in a `Bank`; a linear's low-rank product for all of
them is two batched products over rows gathered by version. Each version's rows are padded to a
common count of at least `MIN_ROWS`, from which on a batched product's rows depend on neither
the count nor the other versions, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from openrl.engines.pytorch.lora import Adapter, LinearSpec
from openrl.engines.pytorch.segments import MIN_ROWS, StackedAdapters
from openrl.types import VersionId

_NARROWEST = 2  # a product with one column takes another kernel, whose bits depend on the rows
_WASTE = 3  # one batched product may pad the rows to this many times their number


class BankKey(NamedTuple):
    """Adapters of one rank and one choice of targets share a bank: a product's shape must be
    the version's own."""

    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


def bank_key(adapter: Adapter) -> BankKey:
    c = adapter.config
    return BankKey(c.rank, c.train_attn, c.train_mlp, c.train_unembed)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a linear lies in the stacks of its group: rows `rank` of both, columns `out` of B."""

    first: int
    rank: slice
    out: slice


class Bank:
    """Stacked factors, of linears with one input together, at the first one's index: A as
    `a` [S, G * R, D], and `b` [S, G * R, N], N all of their outputs, with each B in its own block
    and times alpha / rank. So one pair of products serves all of them. Versions take the first
    slots without holes. (A the other way round would do as well, but for the bits: products with
    six columns of that order depend on where in the batch a row lies.)"""

    def __init__(self, linears: Sequence[LinearSpec], like: Adapter) -> None:
        self._like = like
        self._capacity = 0
        self.versions: list[VersionId] = []
        self.a: dict[int, Tensor] = {}
        self.b: dict[int, Tensor] = {}
        self.places: dict[int, _Place] = {}
        self._rank = max(like.layout.rank, _NARROWEST)
        for first, members in groupby(linears, key=lambda linear: linear.first):
            if like.compute.by_linear[first] is not None:
                self._lay_out(first, list(members))

    def _lay_out(self, first: int, members: Sequence[LinearSpec]) -> None:
        start = 0
        for number, linear in enumerate(members):
            rank = slice(number * self._rank, (number + 1) * self._rank)
            out = slice(start, start + linear.out_features)
            self.places[linear.index] = _Place(first, rank, out)
            start += linear.out_features
        flat = self._like.compute.flat
        columns = self._rank * len(members)
        self.a[first] = flat.new_zeros(0, columns, members[0].in_features)
        self.b[first] = flat.new_zeros(0, columns, start)

    def hold(self, wanted: Mapping[VersionId, Adapter]) -> bool:
        """Makes the bank hold exactly `wanted`, true when that changed it; what is there
        already is not copied again."""
        if wanted.keys() == set(self.versions):
            return False
        for version in [v for v in self.versions if v not in wanted]:
            self._remove(version)
        missing = [v for v in wanted if v not in self.versions]
        self._grow(len(self.versions) + len(missing))
        for version in missing:
            self._load(len(self.versions), wanted[version])
            self.versions.append(version)
        return True

    def _grow(self, count: int) -> None:
        if count <= self._capacity:
            return
        self._capacity = max(1, 1 << (count - 1).bit_length())
        for stacks in (self.a, self.b):
            for first, old in stacks.items():
                stacks[first] = old.new_zeros(self._capacity, *old.shape[1:])
                stacks[first][: old.shape[0]] = old

    def _load(self, slot: int, adapter: Adapter) -> None:
        rank = adapter.layout.rank
        for index, place in self.places.items():
            factor = adapter.compute.by_linear[index]
            assert factor is not None, "a bank's adapters have the same targets"
            start = place.rank.start
            self.a[place.first][slot, start : start + rank] = factor.a_RD
            into = self.b[place.first][slot, start : start + rank, place.out]
            torch.mul(factor.b_NR.T, adapter.scale, out=into)

    def _remove(self, version: VersionId) -> None:
        hole, last = self.versions.index(version), len(self.versions) - 1
        for stack in (*self.a.values(), *self.b.values()):
            if hole != last:
                stack[hole] = stack[last]
        self.versions[hole] = self.versions[last]
        self.versions.pop()


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Slots `start … stop` of a bank with `count` gathered rows each.

    `gather_P` names the batch row of each of the (stop - start) * count padded rows (None: the
    whole batch belongs to one version and is taken as it is); `rows_R` are the batch rows that
    get a result (None: all), and `back_R` where in the padded rows it lies.
    """

    bank: Bank
    start: int
    stop: int
    gather_P: Tensor | None
    rows_R: Tensor | None
    back_R: Tensor | None

    def gather(self, x_TD: Tensor) -> Tensor:
        """[slots, count, D]."""
        x_PD = x_TD if self.gather_P is None else x_TD.index_select(0, self.gather_P)
        return x_PD.view(self.stop - self.start, -1, x_PD.shape[1])

    def add_to(self, y_TN: Tensor, x_SCD: Tensor, index: int) -> None:
        """Of one linear."""
        if (place := self.bank.places.get(index)) is not None:
            a = self.bank.a[place.first][:, place.rank]
            self._add(y_TN, x_SCD, a, self.bank.b[place.first][:, place.rank, place.out])

    def add_joined(self, y_TN: Tensor, x_SCD: Tensor, first: int) -> None:
        """Of all linears with one input."""
        if first in self.bank.a:
            self._add(y_TN, x_SCD, self.bank.a[first], self.bank.b[first])

    def _add(self, y_TN: Tensor, x_SCD: Tensor, a_SRD: Tensor, b_SRN: Tensor) -> None:
        low = torch.bmm(x_SCD, a_SRD[self.start : self.stop].mT)
        delta_PN = torch.bmm(low, b_SRN[self.start : self.stop]).flatten(0, 1)
        if self.back_R is not None:
            delta_PN = delta_PN.index_select(0, self.back_R)
        if self.rows_R is None:
            y_TN.add_(delta_PN)
        else:
            y_TN.index_copy_(0, self.rows_R, y_TN.index_select(0, self.rows_R).add_(delta_PN))


class RowAdapters(StackedAdapters):
    """Which version each row of one batch has. Linears with one input (q, k and v; gate and up)
    share what was gathered of it."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._groups = groups
        self._input: Tensor | None = None  # held, so that its address cannot be another's
        self._stamp: tuple[int, int, torch.Size] | None = None
        self._gathered: list[Tensor] = []

    def add_to(self, y_TN: Tensor, x_TD: Tensor, index: int) -> None:
        if not self._groups:
            return
        stamp = (x_TD.data_ptr(), x_TD._version, x_TD.shape)
        if stamp != self._stamp:
            self._input, self._stamp = x_TD, stamp
            self._gathered = [group.gather(x_TD) for group in self._groups]
        for group, x_SCD in zip(self._groups, self._gathered, strict=True):
            group.add_to(y_TN, x_SCD, index)

    def add_joined(self, y_TN: Tensor, x_TD: Tensor, first: int) -> None:
        for group in self._groups:
            group.add_joined(y_TN, group.gather(x_TD), first)


class Banks:
    """All banks of one base model."""

    def __init__(self, linears: Sequence[LinearSpec], device: torch.device) -> None:
        self._linears = linears
        self._device = device
        self._banks: dict[BankKey, Bank] = {}

    def hold(self, adapters: Mapping[VersionId, Adapter]) -> bool:
        """Stacks exactly these versions; true when that changed anything."""
        by_key: dict[BankKey, dict[VersionId, Adapter]] = {}
        for version, adapter in adapters.items():
            by_key.setdefault(bank_key(adapter), {})[version] = adapter
        unused = [key for key in self._banks if key not in by_key]
        for key in unused:
            del self._banks[key]
        changed = bool(unused)
        for key, wanted in by_key.items():
            if key not in self._banks:
                self._banks[key] = Bank(self._linears, next(iter(wanted.values())))
            changed |= self._banks[key].hold(wanted)
        return changed

    def rows(self, versions: Sequence[VersionId | None], total_rows: int) -> RowAdapters:
        """For a batch whose first rows have these versions (None: plain) and which has
        `total_rows` with its fillers. Every version is held."""
        places: dict[VersionId, list[int]] = {}
        for row, version in enumerate(versions):
            if version is not None:
                places.setdefault(version, []).append(row)
        groups: list[_Group] = []
        for bank in self._banks.values():
            mine = [places.get(version, []) for version in bank.versions]
            if any(mine):
                groups += self._groups(bank, mine, len(versions), total_rows)
        return RowAdapters(groups)

    def _groups(
        self, bank: Bank, places: Sequence[list[int]], rows: int, total_rows: int
    ) -> list[_Group]:
        if len(places) == 1 and len(places[0]) == rows:
            return [_Group(bank, 0, 1, None, None, None)]  # fillers share the product, unread
        widest = max(len(mine) for mine in places)
        padded = max(widest, MIN_ROWS) * len(places)
        if padded <= _WASTE * sum(max(len(mine), MIN_ROWS) for mine in places if mine):
            return [self._group(bank, 0, places, total_rows)]
        return [
            self._group(bank, slot, [mine], total_rows) for slot, mine in enumerate(places) if mine
        ]

    def _group(
        self, bank: Bank, start: int, places: Sequence[list[int]], total_rows: int
    ) -> _Group:
        count = max(MIN_ROWS, *(len(mine) for mine in places))
        gather: list[int] = []
        back: dict[int, int] = {}
        for slot, mine in enumerate(places):
            gather += mine + [mine[0] if mine else 0] * (count - len(mine))
            back.update((row, slot * count + i) for i, row in enumerate(mine))
        rows = sorted(back)
        whole = len(rows) == total_rows
        return _Group(
            bank,
            start,
            start + len(places),
            self._index(gather),
            None if whole else self._index(rows),
            self._index([back[row] for row in rows]),
        )

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
