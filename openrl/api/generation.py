"""One sample from its submission to its text, for routes whose answer is the result itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from openrl.api.samplers import new_seq
from openrl.api.services import Services
from openrl.api.text import Text
from openrl.catalogue import Sampler
from openrl.errors import Cancelled, OpenRLError, copied
from openrl.types import (
    Failed,
    RequestId,
    Sample,
    SampledSequence,
    SampleOutput,
    Stop,
    StopReason,
    Work,
)

_LOOK_SECONDS = 1.0
"""How often it is looked whether the caller is still there."""


async def submit(
    services: Services, sampler: Sampler, samples: Sequence[Sample]
) -> list[RequestId]:
    """All or none. Raises what admission raises."""
    ids: list[RequestId] = []
    try:
        for sample in samples:
            ids.append(await _submit(services, sampler, sample))  # noqa: PERF401 - taken back below
    except OpenRLError:
        take_back(services, sampler, ids)
        raise
    return ids


async def _submit(services: Services, sampler: Sampler, sample: Sample) -> RequestId:
    seq_id = new_seq()
    work = Work(
        request_id=RequestId(f"{sampler.sampling_session_id}:{seq_id}"),
        owner=sampler.owner,
        session_id=sampler.session_id,
        lane=sampler.sampling_session_id,
        seq_id=seq_id,
        operation=sample,
        target=sampler.target,
    )
    return await services.admission.admit(work)


async def outcomes(
    services: Services,
    request: web.Request,
    sampler: Sampler,
    ids: Sequence[RequestId],
    beat: Callable[[], Awaitable[None]] | None = None,
) -> list[SampleOutput]:
    """Waits for all of them, calling `beat` about once a second. When one fails or the caller has
    gone, the others are given back. Raises what the sample failed with, and `Cancelled`."""
    try:
        return [await _outcome(services, request, sampler, each, beat) for each in ids]
    except (OpenRLError, ConnectionError):
        take_back(services, sampler, ids)
        raise


def take_back(services: Services, sampler: Sampler, ids: Sequence[RequestId]) -> None:
    for each in ids:
        services.admission.cancel(each, sampler.owner)


async def _outcome(
    services: Services,
    request: web.Request,
    sampler: Sampler,
    request_id: RequestId,
    beat: Callable[[], Awaitable[None]] | None,
) -> SampleOutput:
    entry = services.futures.find(request_id, sampler.owner)
    while (found := await services.futures.wait(entry, _LOOK_SECONDS)) is None:
        if request.transport is None or request.transport.is_closing():
            raise Cancelled("the caller has gone")
        if beat is not None:
            await beat()
    if isinstance(found, Failed):
        raise copied(found.error)
    assert isinstance(found, SampleOutput)
    return found


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence as text: what comes before the stop. `tokens` counts all that were sampled."""

    text: str
    reason: StopReason
    tokens: int
    stopped_by: str | None = None  # the string, if one did


def write(sequence: SampledSequence, stop: Stop, eos: Sequence[int], text: Text) -> Written:
    tokens = sequence.tokens.tolist()
    kept = tokens
    if sequence.stop_reason == "stop" and tokens and tokens[-1] in (*eos, *stop.tokens):
        kept = tokens[:-1]
    written = text.decode(kept)
    found = [(at, string) for string in stop.strings if (at := written.find(string)) >= 0]
    if not found:
        return Written(written, sequence.stop_reason, len(tokens))
    at, string = min(found)
    return Written(written[:at], sequence.stop_reason, len(tokens), string)
