"""What the OpenAI-compatible routes answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from openrl.api.chat import Said, read_answer
from openrl.api.generation import Written
from openrl.api.results import EMPTY_LOGPROB
from openrl.api.shapes import Plain
from openrl.api.text import Text
from openrl.types import SampledSequence, SampleOutput, Stop, TopLogprobs


@dataclass(frozen=True, slots=True)
class Asked:
    """`top`: how many best tokens go with each logprob, None for no logprobs. `echo` puts the
    prompt first; with `nothing` there is only the prompt."""

    kind: Literal["chat.completion", "text_completion"]
    model: str
    stop: Stop
    top: int | None
    tools: bool = False
    echo: bool = False
    nothing: bool = False


def failure(message: str, status: int) -> Plain:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def usage(prompt: int, sampled: int) -> Plain:
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}


def whole(asked: Asked, request_id: str, made: int, choices: list[Plain], used: Plain) -> Plain:
    return {
        "id": request_id,
        "object": asked.kind,
        "created": made,
        "model": asked.model,
        "choices": choices,
        "usage": used,
    }


def choice(
    index: int,
    written: Written,
    sequence: SampledSequence,
    output: SampleOutput,
    prompt: NDArray[np.int32],
    text: Text,
    asked: Asked,
    *,
    thinking: bool,
) -> Plain:
    if asked.kind == "text_completion":
        return {
            "index": index,
            "text": _echoed(written, prompt, text, asked),
            "logprobs": None
            if asked.top is None
            else _table(_scored(sequence, output, prompt, asked), text, asked.top),
            "finish_reason": "length" if asked.nothing else written.reason,
        }
    said = read_answer(written.text, thinking=thinking, tools=asked.tools)
    scored = [Scored(*each) for each in _sampled(sequence)]
    return {
        "index": index,
        "message": _message(said),
        "logprobs": None if asked.top is None else {"content": [_entry(s, text) for s in scored]},
        "finish_reason": "tool_calls" if said.calls else written.reason,
    }


def _echoed(written: Written, prompt: NDArray[np.int32], text: Text, asked: Asked) -> str:
    before = text.decode(prompt.tolist()) if asked.echo else ""
    return before if asked.nothing else before + written.text


def _message(said: Said) -> Plain:
    message: Plain = {"role": "assistant", "content": said.content}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["content"] = said.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(said.calls)
        ]
    return message


# --- logprobs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logprob, None where nothing precedes it, and the best in its place."""

    token: int
    logprob: float | None
    best: tuple[tuple[int, float], ...]


def _sampled(sequence: SampledSequence) -> Iterator[tuple[int, float, Any]]:
    pairs = zip(sequence.tokens.tolist(), sequence.logprobs.tolist(), strict=True)
    for at, (token, logprob) in enumerate(pairs):
        yield token, logprob, _best(sequence.topk_logprobs, at)


def _scored(
    sequence: SampledSequence, output: SampleOutput, prompt: NDArray[np.int32], asked: Asked
) -> list[Scored]:
    scored: list[Scored] = []
    if asked.echo and output.prompt_logprobs is not None:
        for at, token in enumerate(prompt.tolist()):
            logprob = float(output.prompt_logprobs[at])
            best = _best(output.topk_prompt_logprobs, at)
            scored.append(Scored(token, logprob if isfinite(logprob) else None, best))
    return scored if asked.nothing else scored + [Scored(*each) for each in _sampled(sequence)]


def _best(top: TopLogprobs | None, at: int) -> tuple[tuple[int, float], ...]:
    if top is None:
        return ()
    row = zip(top.token_ids[at].tolist(), top.logprobs[at].tolist(), strict=True)
    return tuple((token, logprob) for token, logprob in row if logprob > EMPTY_LOGPROB)


def _entry(scored: Scored, text: Text) -> Plain:
    best = [_token(token, logprob, text) for token, logprob in scored.best]
    return {**_token(scored.token, scored.logprob, text), "top_logprobs": best}


def _token(token: int, logprob: float | None, text: Text) -> Plain:
    piece = text.piece(token)
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}


def _table(scored: Sequence[Scored], text: Text, top: int) -> Plain:
    pieces = [text.piece(each.token) for each in scored]
    offsets = [sum(map(len, pieces[:at])) for at in range(len(pieces))]
    best = [
        None if each.logprob is None else {text.piece(t): logprob for t, logprob in each.best}
        for each in scored
    ]
    return {
        "tokens": pieces,
        "token_logprobs": [each.logprob for each in scored],
        "top_logprobs": best if top else None,
        "text_offset": offsets,
    }


# --- streams ------------------------------------------------------------------------------------


def chunks(answer: Plain, with_usage: bool) -> Iterator[Plain]:
    """The same answer in pieces: for each choice what it says, then why it ended."""
    chat = answer["object"] == "chat.completion"
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    for each in answer["choices"]:
        for part in _parts(each) if chat else [each]:
            yield {**head, "choices": [part]}
    if with_usage:
        yield {**head, "choices": [], "usage": answer["usage"]}


def _parts(one: Plain) -> Iterator[Plain]:
    message = dict(one["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
    common = {"index": one["index"]}
    yield {**common, "delta": message, "logprobs": one["logprobs"], "finish_reason": None}
    yield {**common, "delta": {}, "logprobs": None, "finish_reason": one["finish_reason"]}
