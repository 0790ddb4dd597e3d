"""Bodies of the OpenAI-compatible routes. A field that is not here is refused by name; one that
is here and refused when set says so in `NEUTRAL`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from openrl.api.schema import Id, Strict

Choices = Annotated[int, Meta(ge=1)]

NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True,),
    "suffix": ("",),
    "store": (False,),
}
"""What these fields may be besides null: what changes nothing."""


class StreamOptions(Strict, frozen=True):
    include_usage: bool = False


class Common(Strict, frozen=True):
    """`top_k` and `chat_template_kwargs` are additions that other servers have too; `user` and
    `metadata` are taken and not kept."""

    model: Id
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: Choices | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    service_tier: str | None = None
    store: bool | None = None


class Completion(Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class Message(Strict, frozen=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class Chat(Common, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
