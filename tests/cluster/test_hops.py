from dataclasses import replace

import pytest

from openrl.cluster.hops import ANYONE, GOOD_SECONDS, Hop, Hops
from openrl.cluster.placement import Report
from openrl.errors import Unauthenticated
from openrl.keys import Holder
from openrl.types import OwnerId

HOPS = Hops("a secret of the cluster, all nodes'")
HOP = Hop("a", "b", "POST", "/api/v1/asample", Holder(OwnerId("alice"), "k1", unlisted=True))


def read(token: str, now: float = 0.0, receiver: str = "b", path: str = HOP.path) -> Hop:
    return HOPS.read(token, receiver, "POST", path, now)


def test_a_hop_says_for_whom() -> None:
    assert read(HOPS.sign(HOP, 0.0)) == HOP
    nobody = replace(HOP, caller=None)
    assert read(HOPS.sign(nobody, 0.0)) == nobody


def test_an_administrators_nearness_is_not_handed_on_as_a_place() -> None:
    """The key was looked at where the caller came in."""
    near = replace(HOP, caller=Holder(OwnerId("root"), "k", admin=True, near=True))
    assert read(HOPS.sign(near, 0.0)).caller == Holder(OwnerId("root"), "k", admin=True)


def test_it_is_good_for_one_request_at_one_node_for_a_while() -> None:
    token = HOPS.sign(HOP, 0.0)
    for wrong in ({"receiver": "c"}, {"path": "/api/v1/sessions"}, {"now": GOOD_SECONDS}):
        with pytest.raises(Unauthenticated):
            read(token, **wrong)  # type: ignore[arg-type]
    with pytest.raises(Unauthenticated):
        Hops("another secret, of some other cluster").read(token, "b", "POST", HOP.path, 0.0)
    with pytest.raises(Unauthenticated):
        read("nonsense")
    assert read(HOPS.sign(replace(HOP, receiver=ANYONE), 0.0), receiver="z").receiver == "z"


def test_a_report_is_signed() -> None:
    said = Report("a", "http://a:1", ("m", "n"), ("m",), 3, draining=True)
    assert HOPS.read_report(HOPS.sign_report(said, 0.0), 1.0) == said
    with pytest.raises(Unauthenticated):
        HOPS.read_report(HOPS.sign(HOP, 0.0), 1.0)
