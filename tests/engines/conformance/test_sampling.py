"""What every engine that samples owes its callers: docs/sampling.md, through the protocol alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sampling_subjects import Logits, Subject

from openrl.engines.base import (
    AdapterSource,
    ControlPass,
    DecodePass,
    DecodeReport,
    DropVersion,
    RowId,
    RowStart,
)
from openrl.errors import Gone
from openrl.types import (
    Failed,
    RequestId,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    Stop,
    VersionId,
)

PROMPT = (5, 17, 60, 33, 8)
NEVER = Stop(eos=False)
CLOSE: dict[str, float] = {"atol": 2e-4, "rtol": 0}
names = (f"request{number}" for number in itertools.count())


def start(
    prompt: Sequence[int] = PROMPT,
    *,
    n: int = 1,
    adapter: AdapterSource | None = None,
    max_tokens: int = 8,
    asked: dict[str, Any] | None = None,
    **params: Any,
) -> RowStart:
    params = {"seed": 3, "stop": NEVER} | params
    chosen = SamplingParams(max_tokens, **params)
    sample = Sample(np.array(prompt, np.int32), chosen, n, **(asked or {}))
    return RowStart(RequestId(next(names)), sample, adapter, tuple(range(n)), max_tokens)


def version(name: str, directory: Path) -> AdapterSource:
    return AdapterSource(VersionId(name), directory)


class Decoding:
    """Rows from their admission to their ends, in slices of `steps`."""

    def __init__(self, subject: Subject, steps: int = 3) -> None:
        self.subject, self.steps = subject, steps
        self.running: set[RowId] = set()
        self.ended: dict[RowId, SampledSequence | Failed] = {}
        self.prompts: dict[RequestId, SampleOutput] = {}

    def turn(self, *admit: RowStart, drop: tuple[RowId, ...] = ()) -> DecodeReport:
        work = DecodePass(self.subject.info.weights, admit=admit, drop=drop, steps=self.steps)
        report = self.subject.engine.execute(work).report
        assert isinstance(report, DecodeReport)
        self.running |= {RowId(one.request_id, i) for one in admit for i in one.indexes}
        self.running -= set(drop)
        for row in report.rows:
            assert row.row in self.running
            if row.ended is not None:
                self.ended[row.row] = row.ended
                self.running.remove(row.row)
        self.prompts.update(report.prompts)
        return report

    def finish(self) -> None:
        for _ in range(100):
            if not self.running:
                return
            self.turn()
        raise AssertionError("the rows never end")


def decoded(subject: Subject, *starts: RowStart, steps: int = 3) -> list[list[SampledSequence]]:
    """All of them in one batch: for each its sequences."""
    decoding = Decoding(subject, steps)
    decoding.turn(*starts)
    decoding.finish()
    return [[whole(decoding, one, i) for i in one.indexes] for one in starts]


def whole(decoding: Decoding, one: RowStart, index: int) -> SampledSequence:
    ended = decoding.ended[RowId(one.request_id, index)]
    assert isinstance(ended, SampledSequence), ended
    return ended


def sampled(subject: Subject, **asked: Any) -> SampledSequence:
    ((only,),) = decoded(subject, start(**asked))
    return only


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def before(subject: Subject, made: SampledSequence, adapter: Path | None = None) -> Logits:
    """The reference's logits [T, V] that each token was drawn from."""
    everything = [*PROMPT, *made.tokens.tolist()]
    return subject.logits(everything, adapter)[len(PROMPT) - 1 : -1]


def of_tokens(rows_TV: Logits, tokens: Any) -> Logits:
    return np.asarray(np.take_along_axis(rows_TV, tokens[:, None].astype(np.int64), 1)[:, 0])


# --- which tokens, and their log-probabilities ------------------------------------------------


def test_greedy_takes_the_best_token_and_reports_it_at_temperature_one(subject: Subject) -> None:
    made = sampled(subject, temperature=0.0, max_tokens=12)
    logits_TV = before(subject, made)
    assert made.tokens.tolist() == logits_TV.argmax(1).tolist()
    np.testing.assert_allclose(
        made.logprobs, of_tokens(log_softmax(logits_TV), made.tokens), **CLOSE
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_at_the_temperature_before_cuts(
    subject: Subject, temperature: float
) -> None:
    made = sampled(subject, temperature=temperature, top_k=4, top_p=0.8, max_tokens=16)
    tempered_TV = log_softmax(before(subject, made) / temperature)
    np.testing.assert_allclose(made.logprobs, of_tokens(tempered_TV, made.tokens), **CLOSE)


def test_cuts_keep_only_the_likeliest(subject: Subject) -> None:
    (two,) = decoded(subject, start(n=16, top_k=2, temperature=1.5))
    seen = set()
    for made in two:
        ranks = (-before(subject, made)).argsort(1).argsort(1)
        found = of_tokens(ranks, made.tokens)
        assert found.max() <= 1
        seen |= set(found.tolist())
    assert seen == {0, 1}
    best = sampled(subject, top_p=1e-6)
    assert best.tokens.tolist() == before(subject, best).argmax(1).tolist()


def test_draws_follow_the_distribution(subject: Subject) -> None:
    """The first token of 256 samples: its mean log-probability is the negative entropy, within
    five standard errors."""
    drawn = 256
    (many,) = decoded(subject, start(n=drawn, max_tokens=1), steps=1)
    row_V = log_softmax(subject.logits(PROMPT, None)[-1])
    mass_V = np.exp(row_V)
    mean = (mass_V * row_V).sum()
    error = np.sqrt((mass_V * (row_V - mean) ** 2).sum() / drawn)
    seen = np.mean([row_V[made.tokens[0]] for made in many])
    assert abs(seen - mean) < 5 * error


def test_the_best_tokens_at_each_sampled_position(subject: Subject) -> None:
    made = sampled(subject, temperature=0.7, asked={"topk_sample_logprobs": 3})
    tempered_TV = log_softmax(before(subject, made) / 0.7)
    best_TK = np.argsort(-tempered_TV, 1)[:, :3]
    assert made.topk_logprobs is not None
    assert made.topk_logprobs.token_ids.tolist() == best_TK.tolist()
    expected = np.take_along_axis(tempered_TV, best_TK, 1)
    np.testing.assert_allclose(made.topk_logprobs.logprobs, expected, **CLOSE)


# --- seeds ----------------------------------------------------------------------------------


def test_a_request_draws_the_same_tokens_alone_in_company_and_in_other_slices(
    subject: Subject,
) -> None:
    asked = {"n": 3, "seed": 11, "max_tokens": 10}
    (alone,) = decoded(subject, start(**asked))
    others = [start((9, 8, 7), n=2, seed=i, max_tokens=4 + i) for i in range(3)]
    in_company = decoded(subject, *others, start(**asked), steps=1)[-1]
    assert texts(alone) == texts(in_company)
    for one, other in zip(alone, in_company, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, **CLOSE)


def test_samples_and_seeds_differ(subject: Subject) -> None:
    first, second = decoded(subject, start(n=4, seed=1), start(n=4, seed=2))
    assert len({tuple(text) for text in texts(first) + texts(second)}) == 8


def test_a_sample_does_not_depend_on_how_many_are_asked_for(subject: Subject) -> None:
    few, many = decoded(subject, start(n=2, seed=5), start(n=5, seed=5))
    assert texts(few) == texts(many)[:2]


def texts(sequences: Sequence[SampledSequence]) -> list[list[int]]:
    return [one.tokens.tolist() for one in sequences]


# --- where sequences end --------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7])
def test_max_tokens_end_every_sample(subject: Subject, length: int) -> None:
    (made,) = decoded(subject, start(n=4, max_tokens=length))
    assert [(len(one.tokens), len(one.logprobs), one.stop_reason) for one in made] == [
        (length, length, "length")
    ] * 4


def test_a_stop_token_is_the_last_one(subject: Subject) -> None:
    free = sampled(subject, max_tokens=10).tokens.tolist()
    made = sampled(subject, max_tokens=10, stop=Stop(eos=False, tokens=(free[4],)))
    assert made.tokens.tolist() == free[: free.index(free[4]) + 1]
    assert made.stop_reason == "stop"


def test_the_end_token_stops_unless_nothing_may(subject: Subject) -> None:
    """With 101 tokens and 64 samples of 16, some sample meets it."""
    (end,) = subject.info.eos_token_ids
    asked = {"n": 64, "max_tokens": 16, "temperature": 3.0}
    free, ended = decoded(subject, start(**asked), start(**asked, stop=Stop(eos=True)))
    assert any(end in one.tokens.tolist() for one in free)
    for one, other in zip(texts(free), ended, strict=True):
        cut = one[: one.index(end) + 1] if end in one else one
        assert other.tokens.tolist() == cut
        assert other.stop_reason == ("stop" if end in one else "length")


def test_a_stop_string_may_span_tokens_and_is_kept(subject: Subject) -> None:
    free = sampled(subject, max_tokens=10).tokens.tolist()
    string = subject.text(free[3]) + subject.text(free[4])
    made = sampled(subject, max_tokens=10, stop=Stop(eos=False, strings=(string,)))
    text = "".join(map(subject.text, free))
    assert made.tokens.tolist() == free[: text.index(string) + 2]
    assert made.stop_reason == "stop"


def test_what_is_dropped_never_ends_and_leaves_no_keys_and_values(subject: Subject) -> None:
    decoding = Decoding(subject, steps=1)
    one, other = start(max_tokens=30), start(max_tokens=6)
    decoding.turn(one, other)
    gone = RowId(one.request_id, 0)
    decoding.turn(drop=(gone,))
    decoding.finish()
    assert decoding.ended.keys() == {RowId(other.request_id, 0)}
    capacity = subject.engine.execute(DecodePass(subject.info.weights)).capacity
    assert capacity.kv_blocks_free == capacity.kv_blocks_total


# --- prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize("adapted", [False, True])
def test_prompts_are_scored_at_temperature_one(subject: Subject, adapted: bool) -> None:
    directory = subject.adapters[0] if adapted else None
    adapter = version("scores", directory) if directory else None
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    one = start(adapter=adapter, temperature=0.5, max_tokens=1, asked=asked)
    decoding = Decoding(subject)
    decoding.turn(one)
    decoding.finish()
    output = decoding.prompts[one.request_id]
    rows_NV = log_softmax(subject.logits(PROMPT, directory)[:-1])
    assert output.prompt_logprobs is not None
    assert np.isnan(output.prompt_logprobs[0])
    expected = of_tokens(rows_NV, np.array(PROMPT[1:]))
    np.testing.assert_allclose(output.prompt_logprobs[1:], expected, **CLOSE)
    assert output.topk_prompt_logprobs is not None
    best = np.argsort(-rows_NV, 1)[:, :2]
    assert output.topk_prompt_logprobs.token_ids[1:].tolist() == best.tolist()


# --- adapters -------------------------------------------------------------------------------


def test_adapters_share_a_batch_and_each_row_has_its_own(subject: Subject) -> None:
    sources = (None, *subject.adapters)
    starts = [
        start(adapter=version(f"batch{i}", source) if source else None, max_tokens=10)
        for i, source in enumerate(sources)
    ]
    made = [only for (only,) in decoded(subject, *starts)]
    assert len({tuple(one.tokens.tolist()) for one in made}) == len(sources)
    for one, source in zip(made, sources, strict=True):
        expected = of_tokens(log_softmax(before(subject, one, source)), one.tokens)
        np.testing.assert_allclose(one.logprobs, expected, **CLOSE)


def test_dropped_versions_are_read_again(subject: Subject) -> None:
    sources = [version(f"again{i}", path) for i, path in enumerate(subject.adapters)]
    rounds = []
    for _ in range(2):
        rounds.append([texts(made) for made in decoded(subject, *map(asking, sources))])
        for source in sources:
            drop(subject, source)
    assert rounds[0] == rounds[1]


def test_one_version_after_another_is_never_taken_for_the_last(subject: Subject) -> None:
    """As a loop that trains does it: the same prompt, a new version each time."""
    for turn in range(12):
        path = subject.adapters[turn % len(subject.adapters)]
        source = version(f"step{turn}", path)
        ((made,),) = decoded(subject, asking(source))
        assert made.tokens.tolist() == before(subject, made, path).argmax(1).tolist()
        drop(subject, source)


def test_weights_that_are_nowhere_fail_their_own_rows_only(
    subject: Subject, tmp_path: Path
) -> None:
    lost = [asking(version("lost", tmp_path / "lost")), asking(AdapterSource(VersionId("no path")))]
    good = asking(None)
    decoding = Decoding(subject)
    decoding.turn(*lost, good)
    decoding.finish()
    for one in lost:
        ended = decoding.ended[RowId(one.request_id, 0)]
        assert isinstance(ended, Failed)
        assert isinstance(ended.error, Gone)
    assert whole(decoding, good, 0).stop_reason == "length"


def asking(source: AdapterSource | None) -> RowStart:
    return start(adapter=source, temperature=0.0, max_tokens=6)


def drop(subject: Subject, source: AdapterSource) -> None:
    work = ControlPass(subject.info.weights, RequestId("drop"), DropVersion(source.version_id))
    report = subject.engine.execute(work).report
    assert report.error is None  # type: ignore[union-attr]
