"""Between a conversation and text: what the template is given, and what an answer's text says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrl.api.oai_schema import Chat, Message
from openrl.errors import UserError

ROLES = {"system": "system", "developer": "system", "user": "user"}
ROLES |= {"assistant": "assistant", "tool": "tool"}

_THINK, _THOUGHT = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises `UserError` naming the message and field."""
    return [_template_message(f"messages[{i}]", each) for i, each in enumerate(messages)]


def _template_message(where: str, message: Message) -> dict[str, Any]:
    if message.role not in ROLES:
        raise UserError(f"{where}.role must be one of {', '.join(ROLES)}, not {message.role!r}")
    given: dict[str, Any] = {
        "role": ROLES[message.role],
        "content": _plain(f"{where}.content", message.content),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            given[name] = value
    if message.tool_calls is not None:
        given["tool_calls"] = [_call_given(where, call) for call in message.tool_calls]
    return given


def _plain(where: str, content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = str(part.get("type"))[:40]
                raise UserError(f"{where}[{number}] is {kind!r}: this server takes text alone")
        return "".join(part["text"] for part in content)
    return content or ""


def _call_given(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """Templates want the arguments as an object; the wire has them as text."""
    try:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}.tool_calls holds a call that cannot be read: {error!r}"
        ) from error
    return {"type": "function", "function": function}


def offered_tools(body: Chat) -> list[dict[str, Any]] | None:
    """Raises `UserError` for a choice that the sampler could not be held to."""
    if body.tool_choice not in (None, "auto", "none"):
        raise UserError("tool_choice is not offered by this server, except auto and none")
    return None if body.tool_choice == "none" else body.tools


# --- what came back ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]  # name and arguments, as JSON


def read_answer(text: str, *, thinking: bool, tools: bool) -> Said:
    """`thinking`: the prompt has opened a thought. Calls are read as Qwen and Hermes write them; a
    call that is not whole stays text."""
    reasoning, content = _split_thought(text, thinking)
    calls = _calls(content) if tools else ()
    if calls:
        content = _CALL.sub("", content).strip()
    return Said(content, reasoning, calls)


def opens_thought(prompt: str) -> bool:
    return prompt.rstrip().endswith(_THINK)


def _split_thought(text: str, thinking: bool) -> tuple[str | None, str]:
    opened = thinking or text.lstrip().startswith(_THINK)
    if not opened:
        return None, text
    thought, _, rest = text.partition(_THOUGHT)
    return thought.lstrip().removeprefix(_THINK).strip(), rest.lstrip("\n")


def _calls(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for written in _CALL.findall(text):
        try:
            call = json.loads(written)
            arguments = call.get("arguments", {})
            found.append((str(call["name"]), json.dumps(arguments)))
        except (ValueError, KeyError, AttributeError):
            return ()
    return tuple(found)
