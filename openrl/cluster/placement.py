"""Which node a new model goes to: the one with the most room of those that serve its base."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from openrl.errors import NotFound, Unavailable


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of itself. `address` is the URL by which others reach it; `bases` it
    serves, `ready` are those whose weights are loaded; `models` are alive on it. `draining`: it
    takes no new models."""

    node: str
    address: str
    bases: tuple[str, ...]
    ready: tuple[str, ...] = ()
    models: int = 0
    draining: bool = False


def choose(present: Iterable[Report], base: str, name: str) -> str:
    """The node for the model or sampler `name`. Weights that are there come first, then fewer
    models; equals share names evenly, and without agreeing on it.
    Raises `NotFound` for a base that none serves, and `Unavailable` when all that do are draining.
    """
    everyone = tuple(present)
    serving = [report for report in everyone if base in report.bases]
    if not serving:
        served = ", ".join(sorted({b for r in everyone for b in r.bases})) or "none"
        raise NotFound(f"base model {base!r} is not served by any node that is there: {served} are")
    open_ones = [report for report in serving if not report.draining]
    if not open_ones:
        raise Unavailable(f"every node that serves {base!r} is draining", retry_after=5.0)
    least = min(_burden(report, base) for report in open_ones)
    equals = [report.node for report in open_ones if _burden(report, base) == least]
    return max(equals, key=lambda node: hashlib.sha256(f"{node}\n{name}".encode()).digest())


def _burden(report: Report, base: str) -> tuple[bool, int]:
    return (base not in report.ready, report.models)
