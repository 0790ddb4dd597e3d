"""One frozen set of weights to sample from."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from openrl.client import codec
from openrl.client.many import as_they_come
from openrl.errors import Gone, OpenRLError
from openrl.types import SampleOutput

if TYPE_CHECKING:
    from openrl.client.transport import Transport

CANCEL_SECONDS = 2.0
MOST_ATTEMPTS = 5


class Sampler:
    """Any number of samples may be asked for at once; they run in one batch on the server, in
    no particular order."""

    def __init__(self, transport: Transport, sampling_session_id: str) -> None:
        self.sampling_session_id = sampling_session_id
        self._transport = transport
        self._seq = itertools.count()

    def __repr__(self) -> str:
        return f"<Sampler {self.sampling_session_id}>"

    async def sample(
        self,
        prompt: ArrayLike,
        num_samples: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        deadline_seconds: float | None = None,
    ) -> SampleOutput:
        """Sequences of `prompt` [P], each with its tokens and their logprobs.

        `max_tokens` None goes up to the context. `temperature` 0 is greedy. `stop` None ends at
        the model's end-of-sequence tokens, strings or ids end there as well, and `[]` never.
        The same `seed` gives the same samples, which differ from one another. Raises `UserError`
        for a prompt or parameters that cannot be served, and when it was not done within
        `deadline_seconds` of the server's taking it.
        """
        params = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "stop": stop if stop is None or isinstance(stop, str) else list(stop),
        }
        body = {
            "prompt": codec.tokens_to_wire(prompt),
            "num_samples": num_samples,
            "sampling_params": params,
            "prompt_logprobs": prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
        }
        return codec.read(await self._run(body, deadline_seconds), codec.sample_output)

    async def sample_many(
        self, prompts: Iterable[ArrayLike], num_samples: int = 1, **params: Any
    ) -> AsyncIterator[tuple[int, SampleOutput]]:
        """Samples all prompts at once, with the arguments of `sample`, and gives each one's place
        and output as soon as it is there. With a `seed`, prompt i is sampled with `seed + i`. The
        first failure is raised, and what is left then, or when the loop is left, is cancelled."""
        seed = params.pop("seed", None)
        samples = (
            self.sample(prompt, num_samples, seed=None if seed is None else seed + place, **params)
            for place, prompt in enumerate(prompts)
        )
        async with contextlib.aclosing(as_they_come(samples)) as answers:
            async for answer in answers:
                yield answer

    async def compute_logprobs(self, prompt: ArrayLike) -> NDArray[np.float32]:
        """float32 [P] at temperature 1: each token given those before it, NaN for the first."""
        output = await self.sample(prompt, max_tokens=1, prompt_logprobs=True)
        if output.prompt_logprobs is None:
            raise OpenRLError("the server sent no prompt logprobs")
        return output.prompt_logprobs

    async def _run(self, body: dict[str, Any], deadline_seconds: float | None) -> codec.Body:
        """A sample that the server lost with a restart (410) is asked for again."""
        for attempt in itertools.count(1):
            identity = {
                "sampling_session_id": self.sampling_session_id,
                "seq_id": next(self._seq),
            }
            named = {**identity, **body}
            promise = await self._transport.submit("asample", named, deadline_seconds)
            try:
                return await self._result(codec.read(promise, _request_id))
            except Gone:
                if attempt == MOST_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _result(self, request_id: str) -> codec.Body:
        try:
            return await self._transport.result(request_id)
        except asyncio.CancelledError:
            with contextlib.suppress(OpenRLError):
                await self._transport.once(
                    "cancel_future", {"request_id": request_id}, CANCEL_SECONDS
                )
            raise


def _request_id(answer: codec.Body) -> str:
    return str(answer["request_id"])
