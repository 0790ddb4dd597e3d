"""Whatever happens in whatever order: the promises of the core, over random events."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_driver import Driver, Engine, capacity, coin, item, requests_of, sample

from openrl.config import SchedulerConfig
from openrl.engines.base import KVPool, WeightsKey
from openrl.errors import Gone, ServerError
from openrl.scheduler.core import events as ev
from openrl.types import OwnerId, RequestId

MODELS = ("m0", "m1", "m2", "m3")
SAMPLERS = ("s0", "s1", "s2")
WEIGHTS = (WeightsKey("base"), WeightsKey("other"))
KINDS: tuple[ev.Kind, ...] = ("forward_backward", "optim_step", "control")


@dataclass(frozen=True)
class Action:
    """`pick` chooses among what there is at that moment."""

    what: str
    pick: int
    size: int


actions = st.lists(
    st.builds(
        Action,
        st.sampled_from(
            ["train"] * 8
            + ["sample"] * 6
            + ["step"] * 10
            + [
                "later",
                "consume",
                "cancel",
                "deadline",
                "pause",
                "resume",
                "close",
                "lose",
                "weight",
            ]
        ),
        st.integers(0, 1000),
        st.integers(1, 6),
    ),
    max_size=60,
)


class Lengths:
    """Many rows end early, some run to their limit."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, most: int) -> int:
        return self._random.choice((1, max(1, most // 4), most, most))


class Chaos:
    """Applies actions; `next_seq` is ahead by what was skipped, so that holes occur."""

    def __init__(self, blocks: int, rows: int, fail: float, seed: int) -> None:
        chance = coin(seed, fail)
        own = WEIGHTS[: seed % 3]  # which weights have memory of their own
        pools = {key: KVPool(blocks + 2 * i, blocks + 2 * i) for i, key in enumerate(own)}
        room = replace(capacity(blocks, rows), kv_pools=pools)
        engine = Engine(room, fails=chance, length=Lengths(seed))
        config = SchedulerConfig(pass_tokens=300, gap_seconds=0.5, decode_steps=4)
        self.driver = Driver(config, engine)
        self.next_seq = dict.fromkeys(MODELS, 1)
        self.open: set[str] = set()
        self.late: list[ev.Item] = []

    def apply(self, action: Action) -> None:
        getattr(self, f"_{action.what}")(action)

    def _train(self, action: Action) -> None:
        lane = self._open_lane(action)
        seq = self.next_seq[lane]
        self.next_seq[lane] += 1
        kind = KINDS[action.pick % 3]
        atoms = (action.size * 20,) * action.size
        weights = WEIGHTS[MODELS.index(lane) % 2]
        one = item(lane, seq, kind=kind, atoms=atoms, weights=weights)
        if action.pick % 7 == 0:
            self.late.append(one)
        else:
            self.driver.submit(one)

    def _open_lane(self, action: Action) -> str:
        lane = MODELS[action.pick % len(MODELS)]
        if lane not in self.open:
            self.open.add(lane)
            self.driver.open(lane, first_seq=self.next_seq[lane])
        return lane

    def _sample(self, action: Action) -> None:
        lane = SAMPLERS[action.pick % len(SAMPLERS)]
        seq = len(self.driver.submitted)
        weights = WEIGHTS[SAMPLERS.index(lane) % 2]
        rows, new = action.size, 1 + action.pick % 150
        self.driver.submit(
            sample(lane, seq, prompt=1 + action.pick % 90, rows=rows, new=new, weights=weights)
        )

    def _deadline(self, action: Action) -> None:
        self.driver.submit(
            sample(
                "s0", len(self.driver.submitted), rows=action.size, deadline=self.driver.now + 0.1
            )
        )

    def _step(self, _: Action) -> None:
        self.driver.step()

    def _later(self, action: Action) -> None:
        """Arrives out of order, or too late."""
        if self.late:
            one = self.late.pop(action.pick % len(self.late))
            self.driver.submit(one)

    def _consume(self, action: Action) -> None:
        lane = self._open_lane(action)
        self.driver.send(ev.SeqConsumed(lane, self.next_seq[lane]))
        self.next_seq[lane] += 1

    def _cancel(self, action: Action) -> None:
        if self.driver.submitted:
            chosen = self.driver.submitted[action.pick % len(self.driver.submitted)]
            self.driver.send(ev.Cancelled(chosen))

    def _pause(self, action: Action) -> None:
        self.driver.send(ev.LanePaused((*MODELS, *SAMPLERS)[action.pick % 7]))

    def _resume(self, action: Action) -> None:
        self.driver.send(ev.LaneResumed((*MODELS, *SAMPLERS)[action.pick % 7]))

    def _close(self, action: Action) -> None:
        lane = (*MODELS, *SAMPLERS)[action.pick % 7]
        self.open.discard(lane)
        self.driver.send(ev.LaneClosed(lane, Gone("closed")))

    def _lose(self, action: Action) -> None:
        """The engine dies, and comes back some time."""
        self.driver.running = None
        self.driver.engine.rows.clear()
        self.driver.send(ev.EngineLost(ServerError("lost")))
        if action.pick % 2:
            self.driver.ready()

    def _weight(self, action: Action) -> None:
        owner = OwnerId(f"owner-{(*MODELS, *SAMPLERS)[action.pick % 7]}")
        self.driver.send(ev.WeightChanged(owner, float(action.size)))

    def finish(self) -> None:
        for lane in (*MODELS, *SAMPLERS):
            self.driver.send(ev.LaneResumed(lane))
        if self.driver.state.residency.capacity is None:
            self.driver.ready()
        self.driver.drain()


@given(
    actions,
    st.integers(4, 40),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.0, 0.2]),
    st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_every_request_is_answered_once_in_order_and_nothing_leaks(
    script: list[Action], blocks: int, rows: int, fail: float, seed: int
) -> None:
    chaos = Chaos(blocks, rows, fail, seed)
    driver = chaos.driver
    driver.ready()
    for action in script:
        chaos.apply(action)
    chaos.finish()

    assert set(driver.answers) == set(driver.submitted)
    assert all(len(answers) == 1 for answers in driver.answers.values())
    for lane in MODELS:
        seqs = [driver.engine.items[RequestId(r)].seq_id for r in driver.order_of(lane)]
        assert seqs == sorted(seqs)
    _atoms_are_in_order(driver)
    assert driver.engine.rows == {}
    statistics = driver.state.statistics()
    assert (statistics.requests_waiting, statistics.requests_running) == (0, 0)
    assert not driver.state.queues.samplers
    assert not driver.state.residency.doomed


def _atoms_are_in_order(driver: Driver) -> None:
    """Each operation of a lane is whole before the next begins, and no atom is sent twice."""
    sent: dict[str, list[tuple[RequestId, int]]] = {}
    for order in driver.orders:
        for index, request in enumerate(requests_of(order)):
            atom = order.atoms[index][1] if isinstance(order, ev.StartTrain) else 0
            lane = driver.engine.items[request].lane
            if lane in MODELS:
                sent.setdefault(lane, []).append((request, atom))
    for atoms in sent.values():
        assert len(set(atoms)) == len(atoms)
        key = [(driver.engine.items[request].seq_id, atom) for request, atom in atoms]
        assert key == sorted(key)
