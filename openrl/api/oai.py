"""The OpenAI-compatible routes, under `/oai/api/v1`.

`model` is a base model's name, the path of a checkpoint, or `NAME;PATH`. A stream carries each
choice's text in one piece when it is finished: the engine hands out whole sequences.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from openrl.api import auth, chat, generation, oai_answers, oai_schema, tensors
from openrl.api.chat import opens_thought
from openrl.api.oai_answers import Asked
from openrl.api.samplers import Samplers
from openrl.api.services import Services
from openrl.api.shapes import Plain
from openrl.api.text import Text, Tokenizers
from openrl.catalogue import Sampler
from openrl.errors import OpenRLError, UserError
from openrl.types import Sample, SampleOutput, SamplingParams, Stop

ROOT = "/oai/api/v1"
DEFAULT_TOKENS = 16
"""Of a completion that names no `max_tokens`, as at OpenAI; a chat goes on to the context's end."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: NDArray[np.int32]
    thinking: bool = False


class OpenAI:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._samplers = Samplers(services)

    @cached_property
    def _tokenizers(self) -> Tokenizers:
        return Tokenizers(self._services.config.models)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(f"{ROOT}/models", self.models),
            web.post(f"{ROOT}/completions", self.completions),
            web.post(f"{ROOT}/chat/completions", self.chat),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """The base models, then the caller's sampler checkpoints."""
        owner, now = auth.owner_of(request), int(self._services.clock())
        names = [(name, now, "openrl") for name in self._services.models.bases]
        saved = self._services.catalogue.checkpoints(owner, limit=-1).items
        names += [(c.path, int(c.created_at), owner) for c in saved if c.kind == "sampler_weights"]
        data = [
            {"id": name, "object": "model", "created": made, "owned_by": by}
            for name, made, by in names
        ]
        return web.json_response({"object": "list", "data": data})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._services.read(request, oai_schema.Completion)
        _refuse_set(body)
        if body.best_of not in (None, 1, body.n):
            raise UserError("best_of is not offered by this server")
        sampler, text = await self._model(request, body.model)
        prompts = [Prompt(tokens) for tokens in _prompts(body.prompt, text)]
        wanted = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        nothing = wanted == 0 and bool(body.echo)  # the prompt alone, scored
        asked = Asked(
            kind="text_completion",
            model=body.model,
            stop=_stop(body.stop),
            top=body.logprobs,
            echo=bool(body.echo),
            nothing=nothing,
        )
        params = _params(body, asked.stop, max(wanted, 1) if nothing else wanted)
        return await self._answer(request, body, sampler, text, prompts, asked, params)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._services.read(request, oai_schema.Chat)
        _refuse_set(body)
        if body.top_logprobs and not body.logprobs:
            raise UserError("top_logprobs needs logprobs: true")
        tools = chat.offered_tools(body)
        messages = chat.template_messages(body.messages)
        sampler, text = await self._model(request, body.model)
        prompt = text.chat(messages, tools, body.chat_template_kwargs or {})
        asked = Asked(
            kind="chat.completion",
            model=body.model,
            stop=_stop(body.stop),
            top=(body.top_logprobs or 0) if body.logprobs else None,
            tools=bool(tools),
        )
        tokens = text.encode(prompt, special=False)
        wanted = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        params = _params(body, asked.stop, wanted)
        prompts = [Prompt(tokens, opens_thought(prompt))]
        return await self._answer(request, body, sampler, text, prompts, asked, params)

    # --- from a prompt to an answer ---

    async def _model(self, request: web.Request, model: str) -> tuple[Sampler, Text]:
        sampler = self._samplers.named(request, model)
        return sampler, await self._tokenizers.of(sampler.target.base_model)

    async def _answer(
        self,
        request: web.Request,
        body: oai_schema.Common,
        sampler: Sampler,
        text: Text,
        prompts: Sequence[Prompt],
        asked: Asked,
        params: SamplingParams,
    ) -> web.StreamResponse:
        scored = asked.echo and asked.top is not None
        samples = [
            Sample(
                prompt=prompt.tokens,
                params=params,
                num_samples=body.n or 1,
                prompt_logprobs=scored,
                topk_prompt_logprobs=(asked.top or 0) if scored else 0,
                topk_sample_logprobs=asked.top or 0,
            )
            for prompt in prompts
        ]
        ids = await generation.submit(self._services, sampler, samples)
        if not body.stream:
            outputs = await generation.outcomes(self._services, request, sampler, ids)
            return web.json_response(self._whole(sampler, text, prompts, outputs, asked, ids[0]))
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        await response.prepare(request)

        async def beat() -> None:
            """A comment of the event stream: it keeps proxies from closing it."""
            await response.write(b": waiting\n\n")

        try:
            outputs = await generation.outcomes(self._services, request, sampler, ids, beat)
            whole = self._whole(sampler, text, prompts, outputs, asked, ids[0])
            usage = body.stream_options is not None and body.stream_options.include_usage
            for chunk in oai_answers.chunks(whole, usage):
                await _send(response, json.dumps(chunk))
            await _send(response, "[DONE]")
        except OpenRLError as error:  # the status has gone out already
            await _send(response, json.dumps(oai_answers.failure(error.message, error.status)))
        await response.write_eof()
        return response

    def _whole(
        self,
        sampler: Sampler,
        text: Text,
        prompts: Sequence[Prompt],
        outputs: Sequence[SampleOutput],
        asked: Asked,
        request_id: str,
    ) -> Plain:
        eos = self._services.models.base(sampler.target.base_model).eos_token_ids
        choices: list[Plain] = []
        sampled = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            for sequence in output.sequences:
                written = generation.write(sequence, asked.stop, eos, text)
                sampled += 0 if asked.nothing else written.tokens
                choices.append(
                    oai_answers.choice(
                        len(choices), written, sequence, output, prompt.tokens, text, asked,
                        thinking=prompt.thinking,
                    )
                )  # fmt: skip
        usage = oai_answers.usage(sum(len(prompt.tokens) for prompt in prompts), sampled)
        made = int(self._services.clock())
        return oai_answers.whole(asked, request_id, made, choices, usage)


async def _send(response: web.StreamResponse, data: str) -> None:
    await response.write(f"data: {data}\n\n".encode())


def _prompts(given: Any, text: Text) -> list[NDArray[np.int32]]:
    """Raises `UserError` for a list of neither texts nor tokens."""
    if isinstance(given, str):
        return [text.encode(given, special=True)]
    if not given:
        raise UserError("prompt is empty")
    if all(isinstance(each, int) for each in given):
        return [_tokens(given)]
    if all(isinstance(each, str) for each in given):
        return [text.encode(each, special=True) for each in given]
    if all(isinstance(each, list) for each in given):
        return [_tokens(each) for each in given]
    raise UserError("prompt mixes texts and tokens")


def _tokens(given: list[int]) -> NDArray[np.int32]:
    try:
        return tensors.tokens(given)
    except ValueError as problem:
        raise UserError(f"prompt: {problem}") from problem


def _refuse_set(body: oai_schema.Common) -> None:
    for name, neutral in oai_schema.NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            raise UserError(f"{name} is not offered by this server")


def _stop(given: str | list[str] | None) -> Stop:
    strings = [given] if isinstance(given, str) else given or []
    return Stop(strings=tuple(strings))


def _params(body: oai_schema.Common, stop: Stop, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=body.seed,
        stop=stop,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=-1 if body.top_k is None else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
    )
