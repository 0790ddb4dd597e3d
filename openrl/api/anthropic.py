"""The Anthropic-compatible routes, under `/anthropic/api/v1`; `model` as in `oai`.

A stream carries each block in one piece when the message is finished.
"""

from __future__ import annotations

import json
from functools import cached_property

from aiohttp import web

from openrl.api import generation
from openrl.api.anthropic_schema import Count, Messages
from openrl.api.anthropic_turns import conversation, events, message, offered_tools
from openrl.api.chat import opens_thought, read_answer
from openrl.api.samplers import Samplers
from openrl.api.services import Services
from openrl.api.shapes import Plain
from openrl.api.text import Text, Tokenizers
from openrl.catalogue import Sampler
from openrl.errors import OpenRLError, UserError
from openrl.types import RequestId, Sample, SampleOutput, SamplingParams, Stop

ROOT = "/anthropic/api/v1"

_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ERRORS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


def failure(text: str, status: int) -> Plain:
    default = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": _ERRORS.get(status, default), "message": text}}


class Anthropic:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._samplers = Samplers(services)

    @cached_property
    def _tokenizers(self) -> Tokenizers:
        return Tokenizers(self._services.config.models)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(f"{ROOT}/messages", self.messages),
            web.post(f"{ROOT}/messages/count_tokens", self.count_tokens),
        ]

    async def count_tokens(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, Count)
        _, text = await self._model(request, body.model)
        prompt = text.chat(conversation(body), offered_tools(body), {})
        return web.json_response({"input_tokens": len(text.encode(prompt, special=False))})

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await self._services.read(request, Messages)
        if body.thinking is not None and body.thinking.get("type") != "disabled":
            raise UserError("thinking is not offered by this server: the model's template decides")
        sampler, text = await self._model(request, body.model)
        prompt = text.chat(conversation(body), offered_tools(body), {})
        sample = Sample(text.encode(prompt, special=False), _params(body))
        ids = await generation.submit(self._services, sampler, [sample])

        def told(output: SampleOutput) -> Plain:
            eos = self._services.models.base(sampler.target.base_model).eos_token_ids
            written = generation.write(output.sequences[0], sample.params.stop, eos, text)
            tools = offered_tools(body) is not None
            said = read_answer(written.text, thinking=opens_thought(prompt), tools=tools)
            return message(ids[0], body.model, len(sample.prompt), written, said)

        if not body.stream:
            [output] = await generation.outcomes(self._services, request, sampler, ids)
            return web.json_response(told(output))
        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        try:
            for event in events(told(await self._awaited(request, response, sampler, ids))):
                await _send(response, event)
        except OpenRLError as error:  # the status has gone out already
            await _send(response, failure(error.message, error.status))
        await response.write_eof()
        return response

    async def _awaited(
        self,
        request: web.Request,
        response: web.StreamResponse,
        sampler: Sampler,
        ids: list[RequestId],
    ) -> SampleOutput:
        async def beat() -> None:
            await _send(response, {"type": "ping"})

        [output] = await generation.outcomes(self._services, request, sampler, ids, beat)
        return output

    async def _model(self, request: web.Request, model: str) -> tuple[Sampler, Text]:
        sampler = self._samplers.named(request, model)
        return sampler, await self._tokenizers.of(sampler.target.base_model)


def _params(body: Messages) -> SamplingParams:
    return SamplingParams(
        max_tokens=body.max_tokens,
        stop=Stop(strings=tuple(body.stop_sequences or ())),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=-1 if body.top_k is None else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
    )


async def _send(response: web.StreamResponse, event: Plain) -> None:
    await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
