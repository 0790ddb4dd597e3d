"""Text and tokens, for the routes that speak text. The tokenizer is the base model's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrl.config import ModelSource
from openrl.errors import UserError


class Text:
    """One base model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of transformers'."""
        self._tokenizer = tokenizer

    def encode(self, text: str, *, special: bool) -> NDArray[np.int32]:
        """`special` adds what the tokenizer puts around plain text; a chat template has done so."""
        ids = self._tokenizer.encode(text, add_special_tokens=special)
        return np.array(ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def piece(self, token: int) -> str:
        """One token by itself; half a character is the replacement character."""
        text: str = self._tokenizer.decode([token])
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        settings: Mapping[str, Any],
    ) -> str:
        """The prompt that the model's own template makes. Raises `UserError` for what it does not
        take, or when there is none."""
        try:
            prompt: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **settings,
            )
        except Exception as error:  # a template is a program of the model's: it may raise anything
            raise UserError(f"messages: the model's chat template refuses them: {error}") from error
        return prompt


class Tokenizers:
    """Each is loaded once, when it is first asked for, on a thread: it takes seconds."""

    def __init__(self, sources: Sequence[ModelSource]) -> None:
        self._sources = {source.name: source for source in sources}
        self._loaded: dict[str, Text] = {}
        self._loading = asyncio.Lock()

    async def of(self, base_model: str) -> Text:
        """Raises `UserError` for a model without a tokenizer."""
        async with self._loading:
            if base_model not in self._loaded:
                source = self._sources[base_model]
                place = source.name if source.path is None else str(source.path)
                self._loaded[base_model] = await asyncio.to_thread(
                    partial(_load, base_model, place)
                )
        return self._loaded[base_model]


@lru_cache(maxsize=16)
def _load(name: str, place: str) -> Text:
    transformers = import_module("transformers")
    try:
        return Text(transformers.AutoTokenizer.from_pretrained(place))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model {name} comes without a tokenizer here, so it takes tokens and no text: "
            f"{str(error).splitlines()[0]}"
        ) from error
