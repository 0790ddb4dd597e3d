"""How many versions an owner may have pinned, and which go."""

from openrl.scheduler.pins import Pins
from openrl.types import ModelId, OwnerId, VersionId

A, B = OwnerId("a"), OwnerId("b")
M = ModelId("m")


def v(*names: str) -> list[VersionId]:
    return [VersionId(name) for name in names]


def pinned(most: int, most_bytes: int = 10**9, size: int = 1) -> Pins:
    pins = Pins(most, most_bytes)
    for name in ("1", "2", "3", "4"):
        pins.add(VersionId(name), M, A)
        pins.weigh(VersionId(name), size)
    return pins


def test_the_oldest_go_beyond_the_number() -> None:
    assert pinned(4).surplus(A, ()) == []
    assert pinned(2).surplus(A, ()) == v("1", "2")
    assert pinned(2).surplus(B, ()) == []


def test_the_oldest_go_beyond_the_bytes_but_never_the_newest() -> None:
    assert pinned(9, 20, size=10).surplus(A, ()) == v("1", "2")
    assert pinned(9, 5, size=10).surplus(A, ()) == v("1", "2", "3")


def test_what_requests_use_stays() -> None:
    assert pinned(2).surplus(A, v("1")) == v("2", "3")
    assert pinned(1).surplus(A, v("1", "2", "3")) == []


def test_what_samplers_have_left_goes_first_and_frees_room() -> None:
    pins = pinned(3)
    pins.supersede(VersionId("3"))
    assert pins.surplus(A, ()) == v("3")
    assert pins.surplus(A, v("3")) == v("1")  # still used: an older one makes room


def test_reasons() -> None:
    pins = pinned(2)
    for version in pins.surplus(A, ()):
        pins.remove(version)
    pins.forget(VersionId("3"))
    assert "made room for newer ones: at most 2 unnamed samplers" in pins.why_gone(VersionId("1"))
    assert "made room" not in pins.why_gone(VersionId("3"))
    assert "earlier process" in pins.why_gone(VersionId("never"))
    assert pins.of(M) == v("4")
