"""What a client asks before anything else: is the server there, and what does it do."""

from __future__ import annotations

from aiohttp import web

from openrl.api import codec, schema, versions
from openrl.api.services import Services


class Service:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
            web.get("/api/v1/healthz", self.healthz),
            web.get("/api/v1/readyz", self.readyz),
            web.post("/api/v1/client/config", self.client_config),
            web.post("/api/v1/client/dynamic_config", self.dynamic_config),
            web.get("/api/v1/get_server_capabilities", self.capabilities),
            web.post("/api/v1/telemetry", self.telemetry),
        ]

    async def healthz(self, request: web.Request) -> web.Response:
        return codec.answer(request, {"status": "ok"})

    async def readyz(self, request: web.Request) -> web.Response:
        """200 as soon as the door is open: requests wait for weights, clients need not. 503 when
        the engine is lost; "degraded" says that some base models could not be loaded. The growth
        of `engine_seconds` over a time is how busy the engine was in it."""
        models = {
            each.name: {
                "state": each.state,
                "stage": each.stage,
                "fraction": each.fraction,
                "error": each.error,
            }
            for each in self._services.status()
        }
        busy = round(self._services.engine_seconds(), 3)
        failed = [each.state == "failed" for each in self._services.status()]
        lost = bool(failed) and all(failed)
        summary = "failed" if lost else "degraded" if any(failed) else "ok"
        answer = {"status": summary, "models": models, "engine_seconds": busy}
        status = web.HTTPServiceUnavailable.status_code if lost else web.HTTPOk.status_code
        return codec.answer(request, answer, status)

    async def client_config(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.ClientConfig)
        said = body.sdk_version
        version = versions.parse(said) if said else versions.sdk_version(request)
        return codec.answer(
            request, versions.client_config(version, self._services.config.issue_jwts)
        )

    async def dynamic_config(self, request: web.Request) -> web.Response:
        config = {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }
        return codec.answer(request, config)

    async def capabilities(self, request: web.Request) -> web.Response:
        models = [
            {
                "model_name": info.name,
                "max_context_length": info.context_length,
                "trainable": True,
                "sampleable": True,
            }
            for info in self._services.models.bases.values()
        ]
        return codec.answer(request, {"supported_models": models})

    async def telemetry(self, request: web.Request) -> web.Response:
        """Accepted and dropped: it holds stack traces of the caller's own code."""
        await self._services.body(request)
        return codec.answer(request, {"status": "accepted"})
