"""Waiting: resolved once, fetched as often as asked, forgotten after a while."""

import asyncio

import numpy as np
import pytest

from openrl import futures as futures_module
from openrl.errors import NotFound
from openrl.futures import Futures
from openrl.types import ForwardBackwardOutput, ModelUnloaded, OwnerId, RequestId

ALICE, BOB = OwnerId("alice"), OwnerId("bob")
A, B = RequestId("m:1"), RequestId("m:2")
DONE = ModelUnloaded("m")  # type: ignore[arg-type]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Futures:
    futures = Futures(clock, retention_seconds=10.0)
    futures.open(A, ALICE, "UnloadModel", "m")
    return futures


async def test_an_outcome_can_be_fetched_again_until_its_retention_ends() -> None:
    clock = Clock()
    futures = opened(clock)
    assert await futures.wait(futures.find(A, ALICE), 0.0) is None
    waiting = asyncio.create_task(futures.wait(futures.find(A, ALICE), 5.0))
    await asyncio.sleep(0)
    clock.now = 100.0
    assert futures.sweep() == 0  # pending ones are kept, however old
    futures.resolve(A, DONE)
    assert await waiting is DONE
    clock.now = 110.0
    assert futures.sweep() == 0
    assert await futures.wait(futures.find(A, ALICE), 0.0) is DONE
    clock.now = 110.5
    assert futures.sweep() == 1
    assert not futures.known(A)


async def test_large_answers_make_room_those_first_that_were_handed_out() -> None:
    """The bound is two answers of 400 bytes; pending requests and small answers stay."""
    clock = Clock()
    futures = Futures(clock, retention_seconds=1e9, kept_bytes=800)
    for number in range(6):
        futures.open(RequestId(f"m:{number}"), ALICE, "ForwardBackward", "m")
    futures.resolve(RequestId("m:4"), DONE)
    for number in range(4):
        clock.now += 1.0
        logprobs = np.zeros(100, np.float32)
        output = ForwardBackwardOutput(({"logprobs": logprobs},), {})
        futures.resolve(RequestId(f"m:{number}"), output)
    for number in (1, 3):
        await futures.wait(futures.find(RequestId(f"m:{number}"), ALICE), 0.0)
    assert futures.sweep() == 2
    assert [number for number in range(6) if futures.known(RequestId(f"m:{number}"))] == [
        0,
        2,
        4,
        5,
    ]


def test_answers_of_an_earlier_process_count_before_they_are_read() -> None:
    """Else each start would let as many more be kept, on the journal's disk."""
    clock = Clock()
    futures = Futures(clock, retention_seconds=1e9, kept_bytes=800)
    for number in range(3):
        clock.now += 1.0
        name = RequestId(f"m:{number}")
        futures.restore(name, ALICE, "ForwardBackward", "m", 400, lambda: DONE)
    assert futures.sweep() == 1
    assert not futures.known(RequestId("m:0"))


def test_another_owners_request_is_not_found() -> None:
    futures = opened(Clock())
    for request, owner in ((A, BOB), (B, ALICE)):
        with pytest.raises(NotFound):
            futures.find(request, owner)


def test_a_request_is_opened_and_resolved_once() -> None:
    futures = opened(Clock())
    with pytest.raises(AssertionError):
        futures.open(A, ALICE, "UnloadModel", "m")
    futures.resolve(A, DONE)
    with pytest.raises(AssertionError):
        futures.resolve(A, DONE)


async def test_many_answers_make_room_those_first_that_were_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However small they are; one that is pending stays."""
    monkeypatch.setattr(futures_module, "KEPT", 3)
    clock = Clock()
    futures = Futures(clock, retention_seconds=1e9)
    names = [RequestId(f"m:{number}") for number in range(6)]
    for name in names:
        futures.open(name, ALICE, "UnloadModel", "m")
    for name in names[:5]:
        clock.now += 1.0
        futures.resolve(name, DONE)
    assert await futures.wait(futures.find(names[3], ALICE), 0.0) is DONE
    assert futures.sweep() == 2
    assert [name for name in names if futures.known(name)] == [*names[1:3], *names[4:]]
