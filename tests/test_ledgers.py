"""What owners did and what they used: kept by owner, by time, and over a restart."""

from pathlib import Path

from openrl.catalogue import Catalogue
from openrl.catalogue.ledgers import HOUR, KEPT_SECONDS, Bucket, hour_of
from openrl.types import OwnerId

ALICE, BOB = OwnerId("alice"), OwnerId("bob")


def test_the_audit_log_is_by_owner_time_and_resource(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.sqlite"
    catalogue = Catalogue(file)
    catalogue.audit.add(ALICE, 10.0, "checkpoint_create", tinker_path="tinker://a")
    catalogue.audit.add(ALICE, 20.0, "project_session_assign", project_id="p")
    catalogue.audit.add(BOB, 15.0, "checkpoint_delete", tinker_path="tinker://b")
    catalogue.close()
    audit = Catalogue(file).audit
    entries = audit.between(ALICE, 0.0, 30.0)
    assert [(each.at, each.event) for each in entries] == [
        (10.0, "checkpoint_create"),
        (20.0, "project_session_assign"),
    ]
    assert entries[0].details == {"tinker_path": "tinker://a"}
    assert [each.at for each in audit.between(ALICE, 0.0, 30.0, "checkpoint")] == [10.0]
    assert audit.between(ALICE, 0.0, 10.0) == ()
    audit.forget(KEPT_SECONDS + 15.0)
    assert [each.at for each in audit.between(ALICE, 0.0, 30.0)] == [20.0]


def test_usage_adds_up_by_hour(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.sqlite"
    catalogue = Catalogue(file)
    hour = hour_of(7 * HOUR + 5.0)
    trained = Bucket(ALICE, hour, "s", "m", "training")
    sampled = Bucket(ALICE, hour, "s", "m", "sampled")
    catalogue.usage.count(trained, 5)
    catalogue.usage.count(sampled, 9)
    catalogue.usage.count(Bucket(BOB, hour, "s", "m", "training"), 100)
    catalogue.usage.write()
    catalogue.usage.count(trained, 2)
    catalogue.close()
    usage = Catalogue(file).usage
    assert usage.between(ALICE, 7 * HOUR, 8 * HOUR) == ((sampled, 9), (trained, 7))
    assert usage.between(ALICE, 8 * HOUR, 9 * HOUR) == ()
