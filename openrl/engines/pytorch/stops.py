"""When a sequence ends: stop ids, EOS, and strings in the decoded text.

The token that completes a stop is part of the sequence and is never trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from openrl.errors import UserError
from openrl.types import Stop

_CONTEXT = 6  # prompt tokens decoded along, so that the first word keeps its leading space
_BROKEN = "�"  # what a decoder puts for bytes that are no character yet


class Detokenizer(Protocol):
    def decode(self, ids: list[int]) -> str: ...


class LazyDetokenizer:
    """The tokenizer in a model's directory (or by its hub name), read on the first use.

    Special tokens are part of the text: a stop such as `<|im_end|>` must fire.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokenizer: object | None = None

    def decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        text = self._tokenizer.decode(  # type: ignore[attr-defined]
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _load(self) -> object:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._source)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise _no_tokenizer() from error
        # Without files, some families give a tokenizer of nothing but its special tokens.
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise _no_tokenizer()
        return tokenizer


def _no_tokenizer() -> UserError:
    return UserError(
        "stop strings need the model's tokenizer, and there is none with the model's files: "
        "use stop token ids, or add the tokenizer's files"
    )


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the samples of one request; `ids` holds EOS too, unless it is switched off."""

    ids: frozenset[int]
    strings: tuple[str, ...]

    @staticmethod
    def of(stop: Stop, eos_token_ids: Sequence[int]) -> StopRule:
        eos = tuple(eos_token_ids) if stop.eos else ()
        return StopRule(frozenset((*eos, *stop.tokens)), tuple(s for s in stop.strings if s))


@dataclass(slots=True)
class StringWatch:
    """Finds stop strings in one sequence's text as its tokens come.

    Only a window of ids is ever decoded: from `_start` (text up to `_read` is known from
    there), so a token costs the same however long the sequence is. Characters whose bytes
    are not complete wait for the next token; those before them in the same token do not.
    """

    rule: StopRule
    text: Detokenizer
    prompt_tail: Sequence[int] = ()
    _ids: list[int] = field(init=False)
    _start: int = field(init=False, default=0)
    _read: int = field(init=False)
    _known: str = field(init=False)
    _tail: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._ids = [int(token) for token in self.prompt_tail[-_CONTEXT:]]
        self._read = len(self._ids)
        self._known = self.text.decode(self._ids) if self._ids else ""

    def push(self, token: int) -> bool:
        """True when this token completes a stop string."""
        self._ids.append(token)
        window = self.text.decode(self._ids[self._start :])
        whole = window.rstrip(_BROKEN)
        seen = self._tail + whole[len(self._known) :]
        if any(stop in seen for stop in self.rule.strings):
            return True
        if len(whole) == len(window) and len(window) > len(self._known):
            self._advance(seen)
        return False

    def _advance(self, seen: str) -> None:
        longest = max(len(stop) for stop in self.rule.strings)
        self._tail = seen[-(longest - 1) :] if longest > 1 else ""
        self._start, self._read = self._read, len(self._ids)
        del self._ids[: self._start]
        self._read -= self._start
        self._start = 0
        self._known = self.text.decode(self._ids)
