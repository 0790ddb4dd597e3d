"""What the sampler knows of a request and of each of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from openrl.engines.base import RowId
from openrl.engines.pytorch.kvcache import Slot
from openrl.engines.pytorch.lora import Adapter
from openrl.engines.pytorch.stops import StopRule, StringWatch
from openrl.engines.scores import first_scored
from openrl.types import (
    Failed,
    RequestId,
    Sample,
    SampledSequence,
    StopReason,
    TopLogprobs,
    VersionId,
)


@dataclass(slots=True, eq=False)
class Request:
    """`keys` name the prompt's shareable chunks. `scored` turns true when the outputs that go
    with sample 0's prefill have been reported."""

    id: RequestId
    sample: Sample
    version: VersionId | None
    adapter: Adapter | None
    rule: StopRule
    keys: tuple[bytes, ...]
    scored: bool = False

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.sample.prompt

    @property
    def first_scored(self) -> int | None:
        """The first prompt token whose logits are still asked for; None when nothing is."""
        return None if self.scored else first_scored(self.sample)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence. `order` is its age: older rows come first when memory is short.

    `filled` counts the tokens (of prompt and sequence) whose keys and values are in `slot`. A
    row whose memory was taken keeps its tokens and later decodes them again, step by step: the
    same products in the same shapes, so the same bits.
    """

    id: RowId
    request: Request
    stream: int
    max_new_tokens: int
    order: int
    watch: StringWatch | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)  # [k] for each token, when asked for
    slot: Slot[Row] | None = None
    filled: int = 0
    new_tokens: int = 0
    ended: SampledSequence | Failed | None = None

    @property
    def length(self) -> int:
        """Tokens known: prompt and sequence."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def next_input(self) -> int:
        return self.tokens[self.filled - len(self.request.prompt)]

    def accept(self, token: int, logprob: float, top: TopLogprobs | None = None) -> None:
        """Takes a drawn token, and ends the row when it completes a stop or the length."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.tops.append(top)
        self.new_tokens += 1
        if token in self.request.rule.ids or (self.watch is not None and self.watch.push(token)):
            self._end("stop")
        elif len(self.tokens) >= self.max_new_tokens:
            self._end("length")

    def _end(self, reason: StopReason) -> None:
        self.ended = SampledSequence(
            np.array(self.tokens, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            reason,
            self._top_logprobs(),
        )

    def _top_logprobs(self) -> TopLogprobs | None:
        if not self.tops:
            return None
        return TopLogprobs(
            np.stack([top.token_ids for top in self.tops]),
            np.stack([top.logprobs for top in self.tops]),
        )
