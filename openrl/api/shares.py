"""What each owner holds of one thing at this moment, with a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from openrl.errors import Overloaded
from openrl.types import OwnerId


class Shares:
    def __init__(self, what: str) -> None:
        self._what = what
        self._held: Counter[OwnerId] = Counter()

    def held(self) -> dict[OwnerId, int]:
        return dict(self._held)

    @contextmanager
    def holding(self, owner: OwnerId, amount: int, most: int) -> Iterator[None]:
        """One alone is let in, however large it is. Raises `Overloaded`."""
        held = self._held[owner]
        if held and held + amount > most:
            raise Overloaded(
                f"you have {held} {self._what}, at most {most} together: try again", retry_after=1.0
            )
        self._held[owner] += amount
        try:
            yield
        finally:
            self._held[owner] -= amount
            if not self._held[owner]:
                del self._held[owner]
