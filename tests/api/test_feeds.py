"""Feeds tell a client which of its samples have their outcome: in order, again when an answer was
lost, and after a restart that they are gone."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from openrl.api.feeds import BLOCK, CLONE, LOST_AT_ONCE, Feeds
from openrl.catalogue import Catalogue, Sampler
from openrl.errors import ServerError
from openrl.futures import Futures
from openrl.types import (
    Failed,
    OwnerId,
    RequestId,
    SampleOutput,
    SamplerTarget,
    SamplingSessionId,
    SessionId,
)

from .conftest import Http

ALICE = OwnerId("alice")
NAME = SamplingSessionId("s:sample:0")
DONE = SampleOutput(sequences=())


@dataclass
class Life:
    """One process: what it remembers ends with it, the catalogue does not."""

    catalogue: Catalogue
    started: float
    seconds: float = 0.0
    futures: Futures = field(init=False)
    feeds: Feeds = field(init=False)

    def __post_init__(self) -> None:
        self.futures = Futures(lambda: self.seconds, 100.0)
        self.feeds = Feeds(self.futures, self.catalogue, lambda: self.started)

    def accept(self, *seqs: int) -> None:
        for seq in seqs:
            self.feeds.expect(NAME, seq)
            self.futures.open(RequestId(f"{NAME}:{seq}"), ALICE, "Sample", NAME)

    def finish(self, *seqs: int, failed: bool = False) -> None:
        outcome = Failed(ServerError("broken")) if failed else DONE
        for seq in seqs:
            self.futures.resolve(RequestId(f"{NAME}:{seq}"), outcome)

    async def read(
        self, cursor: int = 0, *fetched: int, clone: int = 0, seconds: float = 0
    ) -> tuple[list[int], int]:
        names = [f"{NAME}:{seq}" for seq in fetched]
        told, cursor = await self.feeds.read(NAME, clone, cursor, names, seconds)
        return [int(each.request_id.rpartition(":")[2]) for each in told], cursor


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    catalogue = Catalogue(tmp_path / "catalogue.sqlite")
    catalogue.add_sampler(Sampler(NAME, SessionId("s"), ALICE, SamplerTarget("base"), 0.0))
    return catalogue


@pytest.fixture
def life(catalogue: Catalogue) -> Life:
    return Life(catalogue, started=1.0)


async def test_in_the_order_of_outcomes_and_each_once(life: Life) -> None:
    life.accept(0, 1, 2)
    life.finish(2, 0)
    told, cursor = await life.read()
    assert told == [2, 0]
    assert await life.read(cursor) == ([], cursor)
    life.finish(1)
    assert (await life.read(cursor))[0] == [1]


async def test_a_lost_answer_is_given_again(life: Life) -> None:
    life.accept(0, 1)
    first = await life.read()
    life.finish(1)
    assert (await life.read(first[1]))[0] == [1]
    assert (await life.read(first[1]))[0] == [1]


async def test_a_reader_waits_for_news(life: Life) -> None:
    life.accept(0)
    reading = asyncio.create_task(life.read(seconds=20))
    await asyncio.sleep(0)
    life.finish(0)
    async with asyncio.timeout(5):
        assert (await reading)[0] == [0]


async def test_failures_are_said(life: Life) -> None:
    life.accept(0, 1)
    life.finish(0, failed=True)
    life.finish(1)
    told, _ = await life.feeds.read(NAME, 0, 0, (), 0)
    assert [each.failed for each in told] == [True, False]


async def test_each_clone_has_its_own(life: Life) -> None:
    life.accept(0, CLONE, CLONE + 1)
    life.finish(CLONE, 0)
    assert (await life.read())[0] == [0]
    assert (await life.read(clone=1))[0] == [CLONE]


async def test_after_a_restart_what_was_in_flight_has_failed(catalogue: Catalogue) -> None:
    life = Life(catalogue, started=1.0)
    life.accept(*range(5))
    life.finish(0, 1)
    _, cursor = await life.read()
    for started, old in ((2.0, cursor), (3.0, 0)):  # 0: its first answer was lost, too
        later = Life(catalogue, started)
        later.accept(3)  # its POST was repeated: it is told of twice, and asked for by itself
        told, at = await later.read(old)
        assert set(range(5)) <= set(told)
        assert await later.read(at) == ([], at), "the client has heard of it"
        later.finish(3)
        assert (await later.read(at))[0] == [3]


async def test_a_second_restart_before_the_client_has_heard(catalogue: Catalogue) -> None:
    life = Life(catalogue, started=1.0)
    life.accept(*range(5))
    _, cursor = await life.read()
    Life(catalogue, started=2.0).accept(5)
    told, _ = await Life(catalogue, started=3.0).read(cursor)
    assert set(range(6)) <= set(told)


async def test_what_a_restart_lost_is_told_by_parts(catalogue: Catalogue) -> None:
    """A client's numbers may have gaps of any width: a mark of a billion costs what a part does."""
    life = Life(catalogue, started=1.0)
    life.accept(0, CLONE - 1 - BLOCK, 3 * CLONE, 3 * CLONE + 2 * LOST_AT_ONCE)
    later = Life(catalogue, started=2.0)
    told, cursor = await later.read()
    assert told == list(range(LOST_AT_ONCE))
    assert (await later.read(0))[0] == told, "its first answer was lost"
    later.accept(7)
    later.finish(7)
    more, _ = await later.read(cursor)
    assert more == [*range(LOST_AT_ONCE, 2 * LOST_AT_ONCE), 7]

    cursor, told = 0, []
    while (news := await later.read(cursor, clone=3))[0]:
        told, cursor = [*told, *news[0]], news[1]
    assert told == list(range(3 * CLONE, 3 * CLONE + 2 * LOST_AT_ONCE + BLOCK))
    assert await later.read(cursor, clone=3) == ([], cursor), "it is not told anew"


async def test_a_clock_that_was_set_back(catalogue: Catalogue) -> None:
    life = Life(catalogue, started=9.0)
    life.accept(0)
    _, cursor = await life.read()
    told, _ = await Life(catalogue, started=2.0).read(cursor)
    assert 0 in told


async def test_what_was_fetched_is_not_called_lost(catalogue: Catalogue) -> None:
    life = Life(catalogue, started=1.0)
    cursor = 0
    for seq in range(3 * BLOCK):
        life.accept(seq)
        life.finish(seq)
        _, cursor = await life.read(cursor, seq - 1)
    told, _ = await Life(catalogue, started=2.0).read(cursor)
    assert min(told) >= 3 * BLOCK - BLOCK - 1
    assert max(told) >= 3 * BLOCK - 1


async def test_idle_feeds_are_forgotten_and_known_again(catalogue: Catalogue, life: Life) -> None:
    life.accept(0)
    life.finish(0)
    _, cursor = await life.read()
    await life.read(cursor, 0)
    assert len(life.feeds) == 0
    life.accept(1)
    assert (await life.read(cursor)) == ([], cursor), "nothing was lost within a life"


async def test_what_nobody_fetches_is_forgotten_with_its_answer(life: Life) -> None:
    life.accept(0)
    life.feeds.expect(NAME, 1)  # and then it was refused
    life.finish(0)
    life.seconds = 101.0
    life.futures.sweep()
    life.feeds.sweep()
    assert len(life.feeds) == 0


# --- the route ------------------------------------------------------------------------------------


async def sampler_of(http: Http) -> str:
    session = await http.new_session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake/tiny"}
    answer = await http.good("create_sampling_session", body)
    return str(answer["sampling_session_id"])


def feed_of(sampler: str, **rest: object) -> dict[str, object]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    return {"target": target, **rest}


async def sampled(http: Http, sampler: str, seq: int) -> str:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    return str((await http.good("asample", body))["request_id"])


async def test_the_route(http: Http) -> None:
    sampler = await sampler_of(http)
    wanted = {await sampled(http, sampler, seq) for seq in range(3)}
    cursor = 0
    while wanted:
        answer = await http.good("retrieve_futures", feed_of(sampler, prev_cursor=cursor))
        assert answer["cursor"] > cursor
        cursor = answer["cursor"]
        for each in answer["completions"]:
            assert each["state"] == "finished"
            wanted.remove(each["request_id"])
    at_once = feed_of(sampler, prev_cursor=cursor, timeout=0)
    assert await http.good("retrieve_futures", at_once) == {"completions": [], "cursor": cursor}


async def test_another_owners_feed_is_not_there(http: Http) -> None:
    sampler = await sampler_of(http)
    status, _ = await http.as_other().post("retrieve_futures", feed_of(sampler))
    assert status == 404


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body.pop("target"),
        lambda body: body.update(prev_cursor=-1),
        lambda body: body.update(timeout=-1),
        lambda body: body["target"].update(type="training_run"),
    ],
)
async def test_bad_requests(http: Http, spoil: Callable[[dict[str, object]], None]) -> None:
    body = feed_of(await sampler_of(http))
    spoil(body)
    status, answer = await http.post("retrieve_futures", body)
    assert status == 400
    assert answer["detail"]
