"""Bodies of the Anthropic-compatible routes. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from openrl.api.schema import Id, Strict
from openrl.errors import UserError

Block: TypeAlias = dict[str, Any]


class Turn(Strict, frozen=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(Strict, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class Count(Strict, frozen=True):
    model: Id
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: dict[str, Any] | None = None


class Messages(Count, frozen=True, kw_only=True):
    """`metadata` is taken and not kept."""

    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


def plain(where: str, content: str | list[Block]) -> str:
    """Raises `UserError` for a block that is no text."""
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.get("type") != "text":
            raise UserError(f"{where}[{number}] is {str(block.get('type'))[:40]!r}: text alone")
    return "".join(str(block.get("text", "")) for block in content)
