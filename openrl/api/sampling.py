"""Sampling sessions and samples. A bad sample is refused at once: nothing waits behind it."""

from __future__ import annotations

from aiohttp import web

from openrl.api import auth, codec, datums, schema, tensors
from openrl.api.samplers import Samplers, new_seq
from openrl.api.services import Services
from openrl.catalogue import Sampler
from openrl.config import Limits
from openrl.errors import UserError
from openrl.types import (
    Cells,
    RequestId,
    Sample,
    SamplingParams,
    SamplingSessionId,
    Stop,
    Work,
)

_SEEDS = range(-(2**63), 2**64)


class Sampling:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._samplers = Samplers(services)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/create_sampling_session", self.create_session),
            web.get("/api/v1/samplers/{sampler_id}", self.get_sampler),
            web.post("/api/v1/join_sampling_session", self.join),
            web.post("/api/v1/asample", self.sample),
        ]

    async def create_session(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.CreateSamplingSession)
        owner = auth.owner_of(request)
        session = self._services.live_session(body.session_id, owner)
        sampler = Sampler(
            sampling_session_id=SamplingSessionId(
                self._services.named(f"{session.session_id}:sample:{body.sampling_session_seq_id}")
            ),
            session_id=session.session_id,
            owner=owner,
            target=self._samplers.target(request, body.base_model, body.model_path),
            created_at=self._services.clock(),
        )
        standing = self._services.catalogue.add_sampler(sampler)
        if body.model_path is not None:
            checkpoint = self._services.readable(request, body.model_path)
            self._services.note_read(checkpoint, owner, "sampling")
        answer = {
            "type": "create_sampling_session",
            "sampling_session_id": standing.sampling_session_id,
        }
        return codec.answer(request, answer)

    async def join(self, request: web.Request) -> web.Response:
        """A number of its own for each client that was cloned from the sampler's first, which is 0:
        its samples are numbered from there."""
        body = await self._services.read(request, schema.JoinSamplingSession)
        sampler_id = self._services.check_id(body.sampling_session_id)
        number = self._services.catalogue.join_sampler(sampler_id, auth.owner_of(request))
        return codec.answer(request, {"type": "join_sampling_session", "client_counter": number})

    async def get_sampler(self, request: web.Request) -> web.Response:
        sampler_id = self._services.check_id(request.match_info["sampler_id"])
        sampler = self._services.catalogue.sampler(sampler_id, auth.owner_of(request))
        answer = {
            "sampler_id": sampler.sampling_session_id,
            "base_model": sampler.target.base_model,
            "model_path": sampler.target.path,
        }
        return codec.answer(request, answer)

    async def sample(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.Sample)
        operation = operation_of(body, self._services.config.limits)
        sampler, seq_id = self._addressed(request, body)
        self._services.live_session(sampler.session_id, sampler.owner)
        work = Work(
            request_id=RequestId(f"{sampler.sampling_session_id}:{seq_id}"),
            owner=sampler.owner,
            session_id=sampler.session_id,
            lane=sampler.sampling_session_id,
            seq_id=seq_id,
            operation=operation,
            target=sampler.target,
            deadline_seconds=self._services.deadline(request),
        )
        if body.sampling_session_id is not None:
            self._services.feeds.expect(sampler.sampling_session_id, seq_id)
        request_id = await self._services.admission.admit(work)
        promise = {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)],
        }
        return codec.answer(request, promise)

    # --- whose weights ---

    def _addressed(self, request: web.Request, body: schema.Sample) -> tuple[Sampler, int]:
        """The sampler, and the sample's number within it."""
        if body.sampling_session_id is None:
            # Nobody counts here, so every request is its own: repeats are not recognised.
            return self._samplers.direct(request, body.base_model, body.model_path), new_seq()
        if body.seq_id is None:
            raise UserError("seq_id is missing: it numbers the samples of a sampling session")
        sampler_id = self._services.check_id(body.sampling_session_id)
        return self._services.catalogue.sampler(sampler_id, auth.owner_of(request)), body.seq_id


def operation_of(body: schema.Sample, limits: Limits) -> Sample:
    """Raises `UserError` for what cannot be read; `engines.validation` looks at the values.

    `record_stability_info` changes no answer, and the only loss that would read what it records
    is refused."""
    try:
        prompt = datums.prompt_tokens(body.prompt)
    except ValueError as problem:
        raise UserError(f"prompt: {problem}") from problem
    return Sample(
        prompt=prompt,
        params=_params(body.sampling_params),
        num_samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs or 0,
        topk_sample_logprobs=body.topk_sample_logprobs or 0,
        target_prompt_logprobs=_targets(body.target_prompt_logprobs, limits),
        prompt_alt_tokens_k=body.prompt_alt_tokens_k or 0,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
    )


def _targets(given: schema.TensorData | None, limits: Limits) -> Cells | None:
    if given is None:
        return None
    if given.dtype != "int64":
        raise UserError(f"target_prompt_logprobs: token ids are int64, not {given.dtype}")
    try:
        return tensors.cells(
            given.data,
            given.dtype,
            given.shape,
            given.sparse_crow_indices,
            given.sparse_col_indices,
            tensors.ElementBudget(limits.tensor_elements),
        )
    except ValueError as problem:
        raise UserError(f"target_prompt_logprobs: {problem}") from problem


def _params(given: schema.SamplingParams) -> SamplingParams:
    if given.seed is not None and given.seed not in _SEEDS:
        raise UserError("sampling_params.seed must fit 64 bits")
    return SamplingParams(
        max_tokens=given.max_tokens,
        seed=given.seed,
        stop=_stop(given.stop),
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
    )


def _stop(given: str | list[int | str] | None) -> Stop:
    """An empty list is the one way to switch end-of-sequence tokens off."""
    if given is None:
        return Stop()
    stops = [given] if isinstance(given, str) else given
    return Stop(
        eos=bool(stops),
        tokens=tuple(stop for stop in stops if isinstance(stop, int)),
        strings=tuple(stop for stop in stops if isinstance(stop, str)),
    )
