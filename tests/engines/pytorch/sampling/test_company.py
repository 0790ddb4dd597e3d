"""A row's tokens and log-probabilities are the same to the bit alone and in any company, after
preemption, with a cached prefix and when memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.base import AdapterSource, RowId, RowStart
from openrl.types import SampledSequence, VersionId

FAMILIES = ("llama", "qwen3", "gemma3")


def assert_same(got: SampledSequence, want: SampledSequence) -> None:
    assert np.array_equal(got.tokens, want.tokens)
    assert np.array_equal(got.logprobs, want.logprobs)  # to the bit


@pytest.fixture
def crowd(start: Any, prompt: Any) -> list[RowStart]:
    """Requests of every kind: lengths, sizes, versions, parameters."""
    rng = np.random.default_rng(1)
    params = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 5},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.7},
    ]
    versions = [None, *(AdapterSource(VersionId(f"v{i}")) for i in range(4))]
    return [
        start(
            f"r{i}",
            prompt(i, int(rng.integers(1, 90))),
            n=int(rng.integers(1, 7)),
            max_tokens=int(rng.integers(1, 60)),
            seed=i,
            version=versions[i % 5],
            **params[int(rng.integers(5))],
        )
        for i in range(24)
    ]


@pytest.fixture
def stage(drive: Any, trained: Any, base_model: Any) -> Any:
    """`stage(family, …)`: a drive with the crowd's versions, of different ranks and targets."""

    def make(family: str = "qwen3", **more: Any) -> Any:
        d, base = drive(family, **more), base_model(family)
        for i, rank in enumerate((4, 4, 8, 1)):
            adapter = trained(base, i, rank, train_mlp=i != 1)
            d.sampler.pin(VersionId(f"v{i}"), adapter)
        return d

    return make


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels share work out differently: what holds for one thread need not for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_and_among_many(family: str, stage: Any, crowd: list[RowStart]) -> None:
    together = stage(family).all(*crowd)
    for chosen in crowd[:10]:
        for row, sequence in stage(family).all(chosen).items():
            assert_same(sequence, together[row])


def test_arrival_does_not_matter(stage: Any, crowd: list[RowStart]) -> None:
    together = stage().all(*crowd)
    d = stage(steps=3)
    for one in reversed(crowd):
        d.turn(admit=(one,))
    d.finish()
    for row, sequence in together.items():
        assert_same(d.ended[row], sequence)


def test_samples_of_a_request_may_join_one_by_one(stage: Any, start: Any, prompt: Any) -> None:
    p = prompt(1, 50)
    want = stage().all(start("r", p, n=4, max_tokens=20))
    d = stage()
    for i in range(4):
        d.turn(admit=(start("r", p, n=4, max_tokens=20, indexes=(i,)),), steps=3)
    d.finish()
    for row, sequence in want.items():
        assert_same(d.ended[row], sequence)
    assert list(d.prompts) == ["r"]


def test_preempted_rows_come_back_with_identical_bits(stage: Any, crowd: list[RowStart]) -> None:
    want = stage().all(*crowd)
    d = stage()
    d.turn(admit=tuple(crowd), steps=1)  # some are still in prefill
    rng = np.random.default_rng(2)
    away: set[RowId] = set()
    for _ in range(12):
        live = [row for row in want if row not in d.ended]
        out = {row for row in live if rng.random() < 0.3} - away
        back = {row for row in away if rng.random() < 0.5}
        report = d.turn(preempt=tuple(out), resume=tuple(back), steps=3)
        away = (away | out) - back
        held = {row.row: row for row in report.rows}
        assert all(held[row].kv_blocks == 0 and held[row].new_tokens == 0 for row in away)
    d.turn(resume=tuple(away))
    d.finish()
    for row, sequence in want.items():
        assert_same(d.ended[row], sequence)


def test_a_small_budget_changes_the_speed_only(stage: Any, crowd: list[RowStart]) -> None:
    want = stage().all(*crowd)
    small = stage(kv_tokens=640)  # Drive checks the bound after every pass
    for row, sequence in small.all(*crowd).items():
        assert_same(sequence, want[row])
    assert small.sampler.kv_blocks_free == small.sampler.kv_blocks_total == 20


def test_shared_prefixes_give_the_same_bits_and_are_counted(
    stage: Any, start: Any, prompt: Any
) -> None:
    common = prompt(1, 100)
    starts = [start(f"r{i}", common + prompt(i + 9, 5 + i), n=2, seed=i) for i in range(6)]
    d = stage()
    together = d.all(*starts)
    hits = [d.prompts[f"r{i}"].prompt_cache_hit_tokens for i in range(6)]
    assert hits == [0, 96, 96, 96, 96, 96]
    for one in starts:
        for row, sequence in stage().all(one).items():
            assert_same(sequence, together[row])


def test_prefixes_are_never_shared_across_versions(stage: Any, start: Any, prompt: Any) -> None:
    p = prompt(1, 80)
    d = stage()
    versions = [None, *(AdapterSource(VersionId(f"v{i}")) for i in range(3))]
    for name, version in zip("abcd", versions, strict=True):
        d.all(start(name, p, version=version))
        assert d.prompts[name].prompt_cache_hit_tokens == 0
    d.all(start("e", p, version=versions[1]))
    assert d.prompts["e"].prompt_cache_hit_tokens == 64


def test_dropped_rows_free_their_memory_at_once(stage: Any, crowd: list[RowStart]) -> None:
    want = stage().all(*crowd)
    d = stage()
    d.turn(admit=tuple(crowd), steps=2)
    doomed = tuple(row for row in want if row not in d.ended and row.request_id != "r3")
    report = d.turn(drop=doomed, steps=0)
    assert {row.row.request_id for row in report.rows} <= {"r3"}
    d.finish()
    for row, sequence in d.ended.items():
        assert_same(sequence, want[row])
    assert not any(row in d.ended for row in doomed)
    assert d.sampler.kv_blocks_free == d.sampler.kv_blocks_total


def test_reports_add_up(stage: Any, crowd: list[RowStart]) -> None:
    d = stage(steps=2)
    made: dict[RowId, int] = {}
    report = d.turn(admit=tuple(crowd))
    while True:
        for row in report.rows:
            made[row.row] = made.get(row.row, 0) + row.new_tokens
            assert row.new_tokens <= 3
        used = sum(row.kv_blocks for row in report.rows)
        assert used <= d.sampler.kv_blocks_total - d.sampler.kv_blocks_free
        if not d.sampler.rows:
            break
        report = d.turn()
    assert made == {row: len(sequence.tokens) for row, sequence in d.ended.items()}


def test_many_single_requests_with_a_common_prefix(stage: Any, start: Any, prompt: Any) -> None:
    common = prompt(3, 64)
    starts = [start(f"r{i}", [*common, 3 + i % 90], max_tokens=3, seed=i) for i in range(400)]
    d = stage(kv_tokens=4096)
    rows = d.all(*starts)
    assert len(rows) == 400
    assert sum(out.prompt_cache_hit_tokens for out in d.prompts.values()) > 380 * 64
