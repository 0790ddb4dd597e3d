"""Between Anthropic's messages and a chat template's, and from text to a message."""

from __future__ import annotations

import json
from collections.abc import Iterator

from openrl.api.anthropic_schema import Count, Turn, plain
from openrl.api.chat import Said
from openrl.api.generation import Written
from openrl.api.shapes import Plain
from openrl.errors import UserError


def conversation(body: Count) -> list[Plain]:
    """Raises `UserError` naming the block that is not taken."""
    given: list[Plain] = []
    if body.system:
        given.append({"role": "system", "content": plain("system", body.system)})
    for number, turn in enumerate(body.messages):
        given += _turn(f"messages[{number}]", turn)
    return given


def _turn(where: str, turn: Turn) -> Iterator[Plain]:
    """Results of tools are messages of their own; a call is part of the assistant's."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts: list[str] = []
    calls: list[Plain] = []
    for number, block in enumerate(turn.content):
        place = f"{where}.content[{number}]"
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text", "")))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input", {})}
                calls.append({"type": "function", "function": function})
            case "tool_result":
                yield {"role": "tool", "content": plain(place, block.get("content", ""))}
            case "thinking":
                pass  # templates leave earlier thoughts out too
            case other:
                raise UserError(f"{place} is {str(other)[:40]!r}: this server takes text and tools")
    if texts or calls:
        message: Plain = {"role": turn.role, "content": "".join(texts)}
        yield message | ({"tool_calls": calls} if calls else {})


def offered_tools(body: Count) -> list[Plain] | None:
    """In the form that templates know. Raises `UserError` for what nobody here could hold to."""
    choice = (body.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise UserError("tool_choice is not offered by this server, except auto and none")
    if not body.tools or choice == "none":
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in body.tools
    ]


# --- answers ----------------------------------------------------------------------------------


def message(name: str, model: str, prompt_tokens: int, written: Written, said: Said) -> Plain:
    content: list[Plain] = []
    if said.reasoning is not None:
        content.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
    if said.content or not said.calls:
        content.append({"type": "text", "text": said.content})
    for number, (tool, arguments) in enumerate(said.calls):
        call = {"id": f"toolu_{number}", "name": tool, "input": json.loads(arguments)}
        content.append({"type": "tool_use", **call})
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _reason(written, said),
        "stop_sequence": written.stopped_by,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": written.tokens},
    }


def _reason(written: Written, said: Said) -> str:
    if said.calls:
        return "tool_use"
    if written.stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if written.reason == "length" else "end_turn"


def events(whole: Plain) -> Iterator[Plain]:
    """The same message as a stream tells it."""
    used = {**whole["usage"], "output_tokens": 0}
    unsaid: Plain = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
    yield {"type": "message_start", "message": whole | unsaid}
    for index, block in enumerate(whole["content"]):
        empty, delta = _opened(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _opened(block: Plain) -> tuple[Plain, Plain]:
    """A block with nothing in it yet, and what fills it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": ""}, delta
        case _:
            written = json.dumps(block["input"])
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
