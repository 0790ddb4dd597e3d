"""English words into pig latin. The words of the test are in no training sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_TRAINING_WORDS = """
apple arm bag ball bank bath bed bell bird boat book bread brick bridge broom brush cake camp
card cat chair cheese child clock cloud coat cold corn crab crown cup dance desk dish dog door
dream dress drum ear earth egg eye face farm fish flag floor flower fly fork fox frog game gate
gift girl glass gold grape grass hair hand hat heart hill home hook horse ice ink iron island
jam jar juice key king kite lake lamp leaf leg lion lock map mask milk moon mouse nail neck nest
net nose oak ocean oil orange oven page paint park pen piano pig plant plate pond queen rain
rice ring river road rock roof rose sail salt sand school sea seed sheep shell ship shirt shoe
silk sky sleep snow soap song spoon spring star stone storm street sugar sun table tail tea
thumb tiger train tree truck uncle van wall watch water whale wheel wind wing wood yard year
"""
_TEST_WORDS = """
ant bear branch cave chalk cliff crow deer drop eagle field flame glove goat hammer honey jacket
kettle ladder lemon mirror needle onion owl paper pencil plum rabbit shelf skin smoke sock
spider stick thorn tooth umbrella violin wagon wheat wolf
"""
TRAINING, TEST = _TRAINING_WORDS.split(), _TEST_WORDS.split()


@dataclass(frozen=True)
class Question:
    words: tuple[str, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Pig latin: {' '.join(self.words)}"}]

    @property
    def answer(self) -> str:
        return " ".join(map(translated, self.words))


def translated(word: str) -> str:
    """Consonants before the first vowel go to the end, then "ay"; "way" after a vowel's word."""
    found = re.match(r"(qu|[^aeiouy]|^y)*", word)
    head = found.group() if found else ""
    return word + "way" if not head else word[len(head) :] + head + "ay"


def questions(seed: int | str, words: Sequence[str] = TRAINING) -> Iterator[Question]:
    """An endless stream of one to three words each."""
    rng = random.Random(f"pig latin:{seed}")
    while True:
        yield Question(tuple(rng.choices(words, k=rng.choice((1, 2, 3)))))


def score(question: Question, text: str) -> float:
    """The share of its words that stand right, in their places."""
    said = text.split()
    right = question.answer.split()
    return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(right), len(said))
