"""Where the memory goes, decided at start-up, so that nobody finds out in the middle of a pass.

Base weights are there already; adapters and the KV cache have settings; what is left is for the
activations of a pass. A run that needs more than that computes its layers twice, which keeps a
tenth; when not even a short one would fit, start-up is refused with the sums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from openrl.errors import UserError

_SHORTEST_RUN = 256
"""Rows that must fit, with their layers computed twice."""
_HEADROOM = 0.9
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one base model: what a row keeps for the backward pass in all layers, of how many, and
    the logits of one chunk of the head with their copies."""

    row_bytes: int
    layers: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes. `free` is what there was once the base weights were loaded; None: unknown, and so
    no bound on activations, nor on adapters unless one is set."""

    free: int | None
    adapters: int | None
    kv_cache: int

    @property
    def activations(self) -> int | None:
        if self.free is None:
            return None
        return int(self.free * _HEADROOM) - (self.adapters or 0) - self.kv_cache

    def adapters_of(self, sharing: int) -> int | None:
        """The part of one of this many base models."""
        return None if self.adapters is None else self.adapters // sharing

    def kept(self, needs: Needs) -> int | None:
        """What a run of this model may keep for its backward pass."""
        return None if self.activations is None else max(0, self.activations - needs.head_bytes)


def make_plan(
    free: int | None, adapters: int | None, kv_cache: int, models: Sequence[Needs]
) -> Plan:
    """`adapters` None takes a quarter of what is free. Raises `UserError` when no pass would
    fit."""
    if adapters is None and free is not None:
        adapters = free // 4
    plan = Plan(free, adapters, kv_cache)
    least = max((_least(needs) for needs in models), default=0)
    if plan.activations is not None and plan.activations < least:
        raise UserError(
            f"memory does not suffice: {_mib(free or 0)} are free beside the base weights, of "
            f"which {_mib(adapters or 0)} are for adapters (engine.adapter_bytes), "
            f"{_mib(kv_cache)} for the KV cache (engine.kv_cache_bytes), and a pass needs at least "
            f"{_mib(least)}; lower one of the two, or serve a smaller model"
        )
    return plan


def _least(needs: Needs) -> int:
    """Layers computed twice keep their inputs and one layer's insides at a time."""
    per_row = needs.row_bytes // max(1, needs.layers) * 2
    return _SHORTEST_RUN * per_row + needs.head_bytes


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def free_bytes(device: torch.device, cgroup: Path = _CGROUP) -> int | None:
    """What can still be taken; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    names = getattr(os, "sysconf_names", {})
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in names:
        return None
    return min(_available(), _left_in(cgroup))


def _available() -> int:
    """Free memory and what the page cache would give back."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in(cgroup: Path) -> int:
    """What the container's limit leaves; cgroup v2."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        return (1 << 62) if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return 1 << 62
