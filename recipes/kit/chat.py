"""Chat messages as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Up to where the assistant begins to speak."""
    return tokenizer.encode(_render(tokenizer, messages, ask=True), add_special_tokens=False)


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: str
) -> list[int]:
    """What the assistant should say after `prompt_tokens`, with the token that ends its turn.

    Raises `ValueError` for a chat template whose prompt is not the beginning of the dialogue.
    """
    asked = _render(tokenizer, messages, ask=True)
    whole = _render(tokenizer, [*messages, {"role": "assistant", "content": answer}], ask=False)
    if not whole.startswith(asked):
        raise ValueError("this chat template does not end its prompts where answers begin")
    tokens = tokenizer.encode(whole[len(asked) :], add_special_tokens=False)
    ends = [i for i, token in enumerate(tokens) if token in tokenizer.all_special_ids]
    return tokens[: ends[-1] + 1] if ends else [*tokens, tokenizer.eos_token_id]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, ask: bool) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
