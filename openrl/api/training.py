"""Everything that trains: each request becomes one work on its model's lane.

Bad content is accepted and fails through its future: see `docs/http.md`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiohttp import web

from openrl.api import auth, codec, datums, neighbours, schema
from openrl.api.malformed import or_malformed
from openrl.api.services import Services
from openrl.catalogue import Checkpoint
from openrl.encryption import check_recipients
from openrl.errors import NotFound, UserError
from openrl.paths import own_checkpoint
from openrl.types import (
    FULL,
    AdamParams,
    CreateModel,
    CreateModelFromCheckpoint,
    LoadWeights,
    LoraConfig,
    ModelId,
    OptimStep,
    RequestId,
    SamplingSessionId,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TrainingOperation,
    UnloadModel,
    Work,
)

FIRST_SEQ = 1

LARGE = 256 << 10
"""Bodies of more bytes are decoded beside the event loop: smaller ones take a few milliseconds at
most, less than a change of threads under load."""

_MODEL_ID = re.compile(r"(?P<session>.+):train:\d+")


class Training:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decoder")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/create_model", self.create_model),
            web.post("/api/v1/get_info", self.get_info),
            web.post("/api/v1/forward_backward", self.forward_backward),
            web.post("/api/v1/forward", self.forward),
            web.post("/api/v1/optim_step", self.optim_step),
            web.post("/api/v1/save_weights", self.save_weights),
            web.post("/api/v1/save_weights_for_sampler", self.save_weights_for_sampler),
            web.post("/api/v1/save_weights_external", self.save_weights_external),
            web.post("/api/v1/load_weights", self.load_weights),
            web.post("/api/v1/unload_model", self.unload_model),
        ]

    # --- making models ---

    async def create_model(self, request: web.Request) -> web.Response:
        """Refuses at once what is wrong: nothing can have been sent after it."""
        body = await self._services.read(request, schema.CreateModel)
        _check_optimizer(body.optimizer_config)
        metadata = self._services.metadata(body.user_metadata)
        operation = CreateModel(body.base_model, _lora_config(body.lora_config), metadata)
        return await self._create(request, body.session_id, body.model_seq_id, operation)

    async def _create_via_load(
        self, request: web.Request, body: schema.LoadWeights, session_id: str, model_seq_id: int
    ) -> web.Response:
        _check_optimizer(body.optimizer_config)
        checkpoint = self._loadable(request, body)
        operation = CreateModelFromCheckpoint(
            base_model=self._base_for(checkpoint, body.base_model),
            lora=checkpoint.lora,
            path=checkpoint.path,
            with_optimizer=body.optimizer,
            user_metadata=self._services.metadata(body.user_metadata),
            reader=self._services.reader(request, body.weights_access_token),
        )
        return await self._create(request, session_id, model_seq_id, operation)

    async def _create(
        self,
        request: web.Request,
        session_id: str,
        model_seq_id: int,
        operation: CreateModel | CreateModelFromCheckpoint,
    ) -> web.Response:
        self._services.live_session(session_id, auth.owner_of(request))
        model_id = ModelId(f"{session_id}:train:{model_seq_id}")
        return await self._submit(request, model_id, 0, operation)

    def _loadable(self, request: web.Request, body: schema.LoadWeights) -> Checkpoint:
        checkpoint = self._services.weights(request, body.path, body.weights_access_token)
        if body.optimizer and not checkpoint.with_optimizer:
            raise UserError(f"{body.path} holds no optimizer state: load it with optimizer false")
        self._services.note_read(checkpoint, auth.owner_of(request), "training")
        return checkpoint

    def _base_for(self, checkpoint: Checkpoint, wanted: str | None) -> str:
        """Another name for the same weights will do."""
        own = self._services.models.base(checkpoint.base_model)
        if wanted is None or wanted == own.name:
            return own.name
        if self._services.models.base(wanted).weights != own.weights:
            raise UserError(f"{checkpoint.path} was trained on {own.name}, not on {wanted}")
        return wanted

    async def get_info(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.GetInfo)
        model_id = self._services.check_id(body.model_id)
        run = self._services.catalogue.run(model_id, auth.owner_of(request))
        info = self._services.models.base(run.base_model)
        answer = {
            "type": "get_info",
            "model_id": run.model_id,
            "model_name": run.base_model,
            "model_data": {
                "arch": info.architecture,
                "model_name": run.base_model,
                "tokenizer_id": neighbours.tokenizer_id(request, info),
            },
            "is_lora": not run.lora.full,
            "lora_rank": run.lora.shown_rank,
        }
        return codec.answer(request, answer)

    # --- training ---

    async def forward_backward(self, request: web.Request) -> web.Response:
        return await self._forward_backward(request, forward_only=False)

    async def forward(self, request: web.Request) -> web.Response:
        """SDKs before 0.25."""
        return await self._forward_backward(request, forward_only=True)

    async def _forward_backward(self, request: web.Request, *, forward_only: bool) -> web.Response:
        limits = self._services.config.limits
        raw = await self._services.body(request)
        decode = partial(datums.decode, raw, codec.encoding_of(request), forward_only, limits)
        call = await self._aside(decode) if len(raw) > LARGE else decode()
        return await self._train(request, call.model_id, call.seq_id, call.operation)

    async def _aside(self, decode: Callable[[], datums.Call]) -> datums.Call:
        """Thousands of datums take a tenth of a second: meanwhile the loop answers others. What
        the same model sends after it may arrive before it, and is put in order by its lane."""
        return await asyncio.get_running_loop().run_in_executor(self._decoder, decode)

    async def optim_step(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.OptimStep)

        def operation() -> OptimStep:
            _check_optimizer(body.optimizer_params)
            return OptimStep(adam_of(body.adam_params or schema.AdamParams()))

        return await self._train(request, body.model_id, body.seq_id, or_malformed(operation))

    # --- weights ---

    async def save_weights(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.SaveWeights)

        def operation() -> SaveWeights:
            metadata = self._services.metadata(body.user_metadata)
            return SaveWeights(body.path, body.overwrite, body.ttl_seconds, metadata)

        return await self._train(request, body.model_id, body.seq_id, or_malformed(operation))

    async def save_weights_for_sampler(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.SaveWeightsForSampler)

        def operation() -> SaveWeightsForSampler:
            metadata = self._services.metadata(body.user_metadata)
            sampler = self._sampler_id(body.model_id, body.sampling_session_seq_id)
            inflight = body.kind == "inflight"
            return SaveWeightsForSampler(body.path, sampler, body.ttl_seconds, metadata, inflight)

        return await self._train(request, body.model_id, body.seq_id, or_malformed(operation))

    def _sampler_id(self, model_id: str, seq: int | None) -> SamplingSessionId | None:
        """Ephemeral samplers count together with the session's other sampling sessions."""
        if seq is None:
            return None
        return SamplingSessionId(self._services.named(f"{_session_of(model_id)}:sample:{seq}"))

    async def save_weights_external(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.SaveWeightsExternal)

        def operation() -> SaveWeightsExternal:
            recipients = check_recipients(body.age_encryption_recipients)
            metadata = self._services.metadata(body.user_metadata)
            return SaveWeightsExternal(body.path, recipients, body.ttl_seconds, metadata)

        return await self._train(request, body.model_id, body.seq_id, or_malformed(operation))

    async def load_weights(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.LoadWeights)
        if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
            return await self._create_via_load(request, body, body.session_id, body.model_seq_id)
        if body.model_id is None or body.seq_id is None or body.session_id is not None:
            raise UserError(
                "load_weights takes model_id and seq_id, or session_id and model_seq_id"
            )

        model_id = body.model_id

        def operation() -> LoadWeights:
            reader = self._services.reader(request, body.weights_access_token)
            try:
                path = self._loadable(request, body).path
            except NotFound:  # it may be what the model saves before this: its turn will tell
                path = own_checkpoint(body.path, model_id)
            return LoadWeights(path, body.optimizer, reader)

        return await self._train(request, model_id, body.seq_id, or_malformed(operation))

    async def unload_model(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.UnloadModel)
        return await self._train(request, body.model_id, body.seq_id, UnloadModel())

    # --- the one way in ---

    async def _train(
        self, request: web.Request, model_id: str, seq_id: int, operation: TrainingOperation
    ) -> web.Response:
        if seq_id < FIRST_SEQ:
            raise UserError("seq_id must be at least 1: 0 is the making of the model")
        return await self._submit(request, model_id, seq_id, operation)

    async def _submit(
        self, request: web.Request, model_id: str, seq_id: int, operation: TrainingOperation
    ) -> web.Response:
        """Answers with the promise once the work is accepted; a repeat gets the same one."""
        owner = auth.owner_of(request)
        session_id = _session_of(self._services.check_id(model_id))
        session = self._services.live_session(session_id, owner)
        work = Work(
            request_id=RequestId(f"{model_id}:{seq_id}"),
            owner=owner,
            session_id=session.session_id,
            lane=model_id,
            seq_id=seq_id,
            operation=operation,
            deadline_seconds=self._services.deadline(request),
        )
        request_id = await self._services.admission.admit(work)
        promise = {"request_id": self._services.named(request_id), "model_id": model_id}
        return codec.answer(request, promise)


def _session_of(model_id: str) -> str:
    parsed = _MODEL_ID.fullmatch(model_id)
    if parsed is None:
        raise NotFound(f"no model {model_id!r}")
    return parsed["session"]


def _lora_config(given: schema.LoraConfig | None) -> LoraConfig:
    """Without one, all parameters are to be trained."""
    if given is None:
        return FULL
    return LoraConfig(
        rank=given.rank,
        seed=given.seed,
        train_attn=given.train_attn,
        train_mlp=given.train_mlp,
        train_unembed=given.train_unembed,
        alpha=given.alpha,
    )


def _check_optimizer(given: schema.OptimizerConfig | None) -> None:
    if given is not None and given.type != "adamw":
        raise UserError(f"optimizer {given.type!r} is not offered by this server: adamw alone")


def adam_of(given: schema.AdamParams) -> AdamParams:
    return AdamParams(
        learning_rate=given.learning_rate,
        beta1=given.beta1,
        beta2=given.beta2,
        eps=given.eps,
        weight_decay=given.weight_decay,
        grad_clip_norm=given.grad_clip_norm,
    )
