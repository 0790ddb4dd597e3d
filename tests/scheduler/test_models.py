"""Models that are closed are remembered, but not for ever."""

from dataclasses import replace

from openrl.errors import Gone
from openrl.scheduler import models
from openrl.scheduler.models import Model, Models
from openrl.scheduler.pins import Pins
from openrl.types import LoraConfig, ModelId, OwnerId, SessionId, VersionId

A = OwnerId("a")


def model(number: int) -> Model:
    name = ModelId(f"s:train:{number}")
    return Model(name, SessionId("s"), A, "base", LoraConfig(), atom_tokens=8)


def test_the_last_ones_and_those_whose_weights_may_be_named_are_kept() -> None:
    kept = Models(Pins(10, 10))
    kept.pins.add(VersionId("v"), ModelId("s:train:1"), A)
    count = models.CLOSED_KEPT + 3
    for number in range(count):
        kept.add(model(number))
    for number in range(1, count):
        kept.close(f"s:train:{number}", Gone("unloaded"))
    assert kept.find("s:train:0") is not None, "it is alive"
    assert kept.find("s:train:1") is not None, "a sampler reads its weights"
    assert kept.find("s:train:2") is None
    assert kept.closed("s:train:2")
    assert kept.closed("s:train:3")
    assert len(kept.of(SessionId("s"))) == models.CLOSED_KEPT + 2


def test_those_that_an_earlier_process_has_closed_are_forgotten_like_others() -> None:
    kept = Models(Pins(10, 10))
    for number in range(models.CLOSED_KEPT + 1):
        kept.add(replace(model(number), closed=Gone("unloaded")))
    assert kept.find("s:train:0") is None
    assert kept.find("s:train:1") is not None
