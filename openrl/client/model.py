"""One training run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from openrl.client import codec
from openrl.client.pending import Pending
from openrl.client.sampler import Sampler
from openrl.errors import UserError
from openrl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepDone

if TYPE_CHECKING:
    from openrl.client.client import Client

T = TypeVar("T")

DEFAULT_ADAM = AdamParams()


class Model:
    """Operations run on the server in the order in which they were called here.

    `forward_backward`, `forward` and `optim_step` come back as soon as the server has the
    request, with a `Pending` for its result: submit the next before awaiting the last, and the
    server never waits for the network. The others come back when they are done. Each raises
    `UserError` or `ServerError` when the operation failed, which leaves the model as it was. One
    that was sent with `deadline_seconds` fails with `UserError` when it was not done so long after
    the server took it; what was sent after it runs, an optim_step without that gradient too.
    """

    def __init__(self, client: Client, model_id: str, base_model: str) -> None:
        self.model_id = model_id
        self.base_model = base_model
        self._client = client
        self._next_seq = 1
        self._order = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Model {self.model_id} of {self.base_model}>"

    async def forward_backward(
        self,
        data: Iterable[Datum],
        loss_fn: str = "cross_entropy",
        config: Mapping[str, float | str] | None = None,
        *,
        deadline_seconds: float | None = None,
    ) -> Pending[ForwardBackwardOutput]:
        """Adds the gradient of the loss, summed over tokens and datums, to the model's."""
        return await self._loss("forward_backward", data, loss_fn, config, deadline_seconds)

    async def forward(
        self,
        data: Iterable[Datum],
        loss_fn: str = "cross_entropy",
        config: Mapping[str, float | str] | None = None,
        *,
        deadline_seconds: float | None = None,
    ) -> Pending[ForwardBackwardOutput]:
        """The same outputs and metrics, and no gradient."""
        return await self._loss("forward", data, loss_fn, config, deadline_seconds)

    async def optim_step(
        self, adam: AdamParams = DEFAULT_ADAM, *, deadline_seconds: float | None = None
    ) -> Pending[OptimStepDone]:
        """One AdamW step on the gradients so far, which are zero afterwards."""
        params = {name: getattr(adam, name) for name in AdamParams.__slots__}
        body = {"adam_params": params}
        return await self._submit("optim_step", body, codec.optim_step_done, deadline_seconds)

    async def save_state(
        self,
        name: str,
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Weights and optimizer as a checkpoint; its tinker path."""
        body = {
            "path": name,
            "overwrite": overwrite,
            "ttl_seconds": ttl_seconds,
            "user_metadata": user_metadata,
        }
        return await (await self._submit("save_weights", body, _path))

    async def load_state(self, path: str, *, optimizer: bool = False) -> None:
        """Replaces the weights; `optimizer` brings back its state too, else it starts afresh."""
        body = {"path": path, "optimizer": optimizer}
        await (await self._submit("load_weights", body, _nothing))

    async def sampler(self) -> Sampler:
        """A sampler of the weights as they are after the operations called so far. It keeps
        them while training goes on, and lives as long as the client's session."""
        body = {"sampling_session_seq_id": self._client.next_sampling_seq()}
        pending = await self._submit("save_weights_for_sampler", body, _sampling_session)
        return Sampler(self._client.transport, await pending)

    async def save_sampler(
        self,
        name: str,
        *,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """The weights alone as a checkpoint to sample from; its tinker path."""
        body = {"path": name, "ttl_seconds": ttl_seconds, "user_metadata": user_metadata}
        return await (await self._submit("save_weights_for_sampler", body, _path))

    async def log_metrics(self, metrics: Mapping[str, float], *, step: float | None = None) -> None:
        """Numbers of your own, a reward say, for the model's curves on the dashboard: up to 32
        names, finite values. They are kept in the server's memory alone. `step` None is the number
        of optim_steps that the model has had. Raises `UserError` for what cannot be drawn."""
        body = {"metrics": {name: float(value) for name, value in metrics.items()}, "step": step}
        await self._client.transport.submit(f"openrl/models/{self.model_id}/metrics", body)

    async def unload(self) -> None:
        """Frees what the server holds for the model, after the operations called so far. Saved
        checkpoints stay."""
        await (await self._submit("unload_model", {}, _nothing))

    async def _loss(
        self,
        route: str,
        data: Iterable[Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        deadline_seconds: float | None,
    ) -> Pending[ForwardBackwardOutput]:
        body = {
            f"{route}_input": {
                "data": [codec.datum_to_wire(datum) for datum in data],
                "loss_fn": loss_fn,
                "loss_fn_config": config and dict(config),
            }
        }
        return await self._submit(route, body, codec.forward_backward_output, deadline_seconds)

    async def _submit(
        self,
        route: str,
        body: Mapping[str, Any],
        reader: Callable[[codec.Body], T],
        deadline_seconds: float | None = None,
    ) -> Pending[T]:
        """One POST of this model at a time, so that they arrive in order.

        A refused request was never taken, and its seq_id serves the next. One that is cancelled
        here, or given up, may have been: its seq_id is spent, and the server tolerates the hole.
        """
        async with self._order:
            seq_id = self._next_seq
            self._next_seq += 1
            named = {"model_id": self.model_id, "seq_id": seq_id, **body}
            try:
                return await self._client.submit(route, named, reader, deadline_seconds)
            except UserError:
                self._next_seq = seq_id
                raise


def _path(answer: codec.Body) -> str:
    return str(answer["path"])


def _sampling_session(answer: codec.Body) -> str:
    return str(answer["sampling_session_id"])


def _nothing(_: codec.Body) -> bool:
    """True, since a `Pending` without a value would fetch again."""
    return True
