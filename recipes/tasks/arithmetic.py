"""Sums whose answers a line of Python can check."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    a: int
    b: int
    sign: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self.a} {self.sign} {self.b} ="}]

    @property
    def answer(self) -> str:
        return str(self.a + self.b if self.sign == "+" else self.a - self.b)


def questions(seed: int | str, largest: int) -> Iterator[Question]:
    """An endless stream of sums and differences of numbers up to `largest`. A seventh of all pairs
    of numbers is asked by the seed "test" alone."""
    rng = random.Random(f"arithmetic:{seed}")
    while True:
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        if ((a * 31 + b) % 7 == 0) == (seed == "test"):
            yield Question(a, b, rng.choice("+-"))


def reward(question: Question, text: str) -> float:
    """1.0 when the last number in the text is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == question.answer)
