"""One sample from its submission to its text, for routes whose answer is the result itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from openrl.api.samplers import new_seq
from openrl.api.services import Services
from openrl.api.text import Text
from openrl.catalogue import Sampler
from openrl.errors import Cancelled
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


async def submit(services: Services, sampler: Sampler, sample: Sample) -> RequestId:
    """Raises what admission raises."""
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


async def outcome(
    services: Services, request: web.Request, sampler: Sampler, request_id: RequestId
) -> SampleOutput:
    """Waits for it; gives the work back when the caller has gone. Raises what the sample failed
    with, and `Cancelled`."""
    entry = services.futures.find(request_id, sampler.owner)
    while (found := await services.futures.wait(entry, _LOOK_SECONDS)) is None:
        if request.transport is None or request.transport.is_closing():
            services.admission.cancel(request_id, sampler.owner)
            raise Cancelled("the caller has gone")
    if isinstance(found, Failed):
        raise found.error
    assert isinstance(found, SampleOutput)
    return found


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence as text: what comes before the stop. `tokens` counts all that were sampled."""

    text: str
    reason: StopReason
    tokens: int


def write(sequence: SampledSequence, stop: Stop, eos: Sequence[int], text: Text) -> Written:
    tokens = sequence.tokens.tolist()
    kept = tokens
    if sequence.stop_reason == "stop" and tokens and tokens[-1] in (*eos, *stop.tokens):
        kept = tokens[:-1]
    written = text.decode(kept)
    found = [at for string in stop.strings if (at := written.find(string)) >= 0]
    return Written(written[: min(found)] if found else written, sequence.stop_reason, len(tokens))
