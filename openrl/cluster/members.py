"""Who is there. A node that has said nothing for `away_seconds` is away until it speaks again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from openrl.cluster.placement import Report, choose
from openrl.errors import NotFound, Unavailable


class Members:
    """`now` is in seconds of a clock that never goes back. What this node has placed since another
    last spoke is counted on top of what that one said, so that a burst doesn't all go to one."""

    def __init__(self, node: str, away_seconds: float, now: float) -> None:
        self.node = node
        self._began = now
        self._away_seconds = away_seconds
        self._reports: dict[str, Report] = {}
        self._heard: dict[str, float] = {}
        self._placed: Counter[str] = Counter()

    def heard(self, report: Report, now: float) -> None:
        self._reports[report.node] = report
        self._heard[report.node] = now
        del self._placed[report.node]

    def lost(self, node: str) -> None:
        """Nobody listens where it was: it need not be waited for."""
        self._heard.pop(node, None)

    def address(self, node: str, now: float) -> str | None:
        """None for one that is away, or was never heard of."""
        return self._reports[node].address if self._is_here(node, now) else None

    def last_heard(self, node: str, now: float) -> float | None:
        """Seconds ago."""
        return now - self._heard[node] if node in self._heard else None

    def present(self, now: float) -> tuple[Report, ...]:
        """This one is always there, once it has reported."""
        return tuple(
            replace(report, models=report.models + more) if (more := self._placed[node]) else report
            for node, report in self._reports.items()
            if self._is_here(node, now)
        )

    def others(self, now: float) -> tuple[str, ...]:
        return tuple(report.node for report in self.present(now) if report.node != self.node)

    def away(self, now: float) -> frozenset[str]:
        """Those that were there once and are not."""
        return frozenset(node for node in self._reports if not self._is_here(node, now))

    def place(self, base: str, name: str, now: float, favourite: str | None = None) -> str:
        """`favourite` takes it if it can. Raises `NotFound`, and `Unavailable` while a node that
        may serve the base is away, or has not been heard of yet."""
        present = self.present(now)
        favoured = [r for r in present if r.node == favourite and base in r.bases]
        try:
            node = choose([r for r in favoured if not r.draining] or present, base, name)
        except NotFound:
            if away := [each for each in self.away(now) if base in self._reports[each].bases]:
                raise Unavailable(
                    f"{base!r} is served by {away[0]!r}, which is away", 5.0
                ) from None
            if now - self._began < self._away_seconds:
                raise Unavailable(f"no node that serves {base!r} is known yet", 1.0) from None
            raise
        self._placed[node] += 1
        return node

    def _is_here(self, node: str, now: float) -> bool:
        if node == self.node:
            return node in self._reports
        return node in self._heard and now - self._heard[node] < self._away_seconds
