"""How long the scheduler's core thinks about one event; for `benchmarks/api.py`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from openrl.config import SchedulerConfig
from openrl.engines.base import Capacity, WeightsKey
from openrl.scheduler.core import events as ev
from openrl.scheduler.core.state import State
from openrl.types import OwnerId, RequestId, SessionId

BASE = WeightsKey("base")
ROOM = Capacity(1 << 20, 1 << 20, 16, 256, 64, 0, 1 << 30)
EVENTS = 4000


def decision_times() -> list[dict[str, Any]]:
    """All lanes have work all the time, each of an owner of its own: whenever a request of one is
    answered, its next is submitted."""
    return [_times(lanes) for lanes in (10, 1000, 10_000)]


def _times(lanes: int) -> dict[str, Any]:
    state = State(SchedulerConfig())
    state.handle(ev.EngineReady(ROOM), 0.0)
    now, seqs = 0.0, dict.fromkeys(range(lanes), 1)
    running: list[ev.Start] = []
    spent: list[float] = []

    def send(event: ev.Event) -> list[int]:
        """Returns the lanes that were answered."""
        began = time.perf_counter()
        decisions = state.handle(event, now)
        spent.append(time.perf_counter() - began)
        running.extend(d for d in decisions if isinstance(d, ev.StartTrain))
        return [_lane(d.request_id) for d in decisions if isinstance(d, ev.Resolve)]

    for lane in range(lanes):
        send(ev.LaneOpened(f"m{lane}", 1))
        send(ev.Submitted(_item(lane, 1)))
    spent.clear()
    while len(spent) < EVENTS:
        order = running.pop()
        now += 0.1
        parts = tuple(ev.PartEnded(request, True) for request, _ in order.atoms)
        for lane in send(ev.Finished(order.pass_id, 0.1, ROOM, parts)):
            seqs[lane] += 1
            send(ev.Submitted(_item(lane, seqs[lane])))
    p50, p99 = np.percentile(spent, [50, 99]) * 1e6
    mean = float(np.mean(spent)) * 1e6
    return {
        "lanes": lanes,
        "mean_us": round(mean, 1),
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
    }


def _lane(request_id: str) -> int:
    return int(request_id.partition(":")[0][1:])


def _item(lane: int, seq: int) -> ev.Item:
    name = f"m{lane}"
    return ev.Item(
        RequestId(f"{name}:{seq}"),
        OwnerId(f"o{lane}"),
        SessionId(f"s{lane}"),
        name,
        seq,
        "forward_backward",
        BASE,
        (256,),
    )
