"""Names are kept, found by their owners alone, and listed newest first."""

import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.catalogue import Catalogue, Checkpoint, Run, Sampler, Session
from openrl.errors import NotFound, ServerError, UserError
from openrl.types import (
    LoraConfig,
    ModelId,
    OwnerId,
    SamplerTarget,
    SamplingSessionId,
    SessionId,
    TinkerPath,
    VersionId,
)

ALICE, BOB = OwnerId("alice"), OwnerId("bob")
SESSION = Session(
    SessionId("s"),
    ALICE,
    1.25,
    tags=("a", "b"),
    user_metadata={"k": "v"},
    sdk_version="0.38.0",
    project_id="p",
    display_name="d",
)
RUN = Run(
    ModelId("s:train:0"),
    SessionId("s"),
    ALICE,
    "base",
    LoraConfig(rank=8, seed=2**63 - 1, train_mlp=False),
    2.0,
    2.0,
    {"m": "x"},
)
CHECKPOINT = Checkpoint(
    path=TinkerPath("tinker://s:train:0/weights/a"),
    model_id=RUN.model_id,
    owner=ALICE,
    kind="weights",
    name="a",
    base_model="base",
    lora=RUN.lora,
    created_at=1733333333.123456,
    size_bytes=12,
    with_optimizer=True,
    expires_at=100.0,
)
SAMPLER = Sampler(
    SamplingSessionId("s:sample:0"),
    SessionId("s"),
    ALICE,
    SamplerTarget("base", VersionId("v"), CHECKPOINT.path),
    3.0,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "catalogue.sqlite"


@pytest.fixture
def catalogue(file: Path) -> Iterator[Catalogue]:
    opened = Catalogue(file)
    opened.add_session(SESSION)
    opened.add_run(RUN)
    opened.add_checkpoint(CHECKPOINT)
    opened.add_sampler(SAMPLER)
    yield opened
    opened.close()


def test_everything_is_there_after_a_restart(catalogue: Catalogue, file: Path) -> None:
    again = Catalogue(file)  # a fresh memory over the same file
    assert again.session("s", ALICE) == SESSION
    assert again.run("s:train:0", ALICE) == RUN
    assert again.checkpoint(CHECKPOINT.path, ALICE) == CHECKPOINT
    assert again.checkpoint(CHECKPOINT.path, ALICE).version == CHECKPOINT.version
    assert again.sampler("s:sample:0", ALICE) == SAMPLER
    again.close()


def test_another_owners_names_are_not_found(catalogue: Catalogue) -> None:
    lookups = [
        lambda owner: catalogue.session("s", owner),
        lambda owner: catalogue.finish_session("s", owner, "x"),
        lambda owner: catalogue.run("s:train:0", owner),
        lambda owner: catalogue.runs_of("s", owner),
        lambda owner: catalogue.checkpoint(CHECKPOINT.path, owner),
        lambda owner: catalogue.checkpoints_of("s:train:0", owner),
        lambda owner: catalogue.set_expiry(CHECKPOINT.path, owner, None),
        lambda owner: catalogue.sampler("s:sample:0", owner),
        lambda owner: catalogue.samplers_of("s", owner),
    ]
    for lookup in lookups:
        with pytest.raises(NotFound):
            lookup(BOB)
    for page in (catalogue.sessions(BOB), catalogue.runs(BOB), catalogue.checkpoints(BOB)):
        assert (page.items, page.total) == ((), 0)
    for lookup in lookups:
        lookup(ALICE)


def test_lists_are_newest_first_and_paged(catalogue: Catalogue) -> None:
    for i in range(1, 6):
        name = ModelId(f"s:train:{i}")
        catalogue.add_run(replace(RUN, model_id=name, created_at=10.0 - i))
    page = catalogue.runs(ALICE, limit=2, offset=1)
    assert [run.created_at for run in page.items] == [8.0, 7.0]
    assert page.total == 6
    assert [run.created_at for run in catalogue.runs_of("s", ALICE)] == [9, 8, 7, 6, 5, 2]


def test_the_first_reason_to_finish_wins(catalogue: Catalogue) -> None:
    catalogue.finish_session("s", ALICE, "success")
    catalogue.finish_session("s", ALICE, "errored")
    assert catalogue.session("s", ALICE).finished == "success"


def test_a_sampler_is_made_once(catalogue: Catalogue) -> None:
    assert catalogue.add_sampler(replace(SAMPLER, created_at=99.0)) == SAMPLER
    with pytest.raises(UserError):
        catalogue.add_sampler(replace(SAMPLER, target=SamplerTarget("base")))
    with pytest.raises(UserError):
        catalogue.add_sampler(replace(SAMPLER, owner=BOB))
    assert catalogue.sampler("s:sample:0", ALICE) == SAMPLER


def test_a_recreated_name_is_another_version(catalogue: Catalogue) -> None:
    catalogue.add_checkpoint(replace(CHECKPOINT, created_at=CHECKPOINT.created_at + 1e-6))
    again = catalogue.checkpoint(CHECKPOINT.path, ALICE)
    assert again.version != CHECKPOINT.version
    assert catalogue.checkpoints(ALICE).total == 1
    assert not catalogue.delete_checkpoint(CHECKPOINT)  # one that looked up the former
    assert catalogue.checkpoint(CHECKPOINT.path, ALICE) == again


def test_expiry_and_deletion(catalogue: Catalogue) -> None:
    assert catalogue.expired(99.0) == ()
    assert catalogue.expired(100.0) == (CHECKPOINT,)
    catalogue.set_expiry(CHECKPOINT.path, ALICE, None)
    assert catalogue.expired(1e12) == ()
    assert catalogue.delete_checkpoint(CHECKPOINT)
    assert not catalogue.delete_checkpoint(CHECKPOINT)
    with pytest.raises(NotFound):
        catalogue.checkpoint(CHECKPOINT.path, ALICE)
    assert catalogue.checkpoints(ALICE).total == 0


def test_the_time_of_the_last_request_reaches_the_file(catalogue: Catalogue, file: Path) -> None:
    catalogue.touch_run(RUN.model_id, 50.0)
    assert catalogue.run("s:train:0", ALICE).last_request_at == 50.0
    assert catalogue.runs(ALICE).items[0].last_request_at == 50.0
    catalogue.touch_run(RUN.model_id, 60.0)
    catalogue.write_touched()
    other = Catalogue(file)
    assert other.run("s:train:0", ALICE).last_request_at == 60.0
    other.close()


def test_a_file_that_is_no_catalogue_is_named(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.sqlite"
    file.write_bytes(b"x" * 4096)
    with pytest.raises(ServerError, match=r"catalogue\.sqlite cannot be opened"):
        Catalogue(file)


def test_a_newer_format_is_refused_and_the_file_is_private(
    catalogue: Catalogue, file: Path
) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with sqlite3.connect(file) as sql:
        sql.execute("PRAGMA user_version = 99")
    with pytest.raises(ServerError, match="format 99"):
        Catalogue(file)


def test_a_published_checkpoint_is_everybodys_to_read(catalogue: Catalogue) -> None:
    catalogue.add_session(SESSION)
    catalogue.add_run(RUN)
    catalogue.add_checkpoint(CHECKPOINT)
    for published in (True, True, False, False):
        catalogue.publish(CHECKPOINT.path, ALICE, published)
        with pytest.raises(NotFound):
            catalogue.checkpoint(CHECKPOINT.path, BOB)
        with pytest.raises(NotFound):
            catalogue.publish(CHECKPOINT.path, BOB, False)
        assert catalogue.runs(BOB).total == 0
        if published:
            assert catalogue.readable_checkpoint(CHECKPOINT.path, BOB).public
            assert len(catalogue.published_of(RUN.model_id)) == 1
            assert catalogue.runs(BOB, readable=True).items[0].model_id == RUN.model_id
        else:
            assert catalogue.runs(BOB, readable=True).total == 0
            with pytest.raises(NotFound):
                catalogue.readable_checkpoint(CHECKPOINT.path, BOB)
            with pytest.raises(NotFound):
                catalogue.published_of(RUN.model_id)


def test_projects_gather_runs_by_their_session(catalogue: Catalogue) -> None:
    catalogue.add_session(SESSION)
    catalogue.add_run(RUN)
    assert catalogue.runs(ALICE, project_id="q").total == 0
    catalogue.set_project(SESSION.session_id, ALICE, "q")
    assert catalogue.runs(ALICE, project_id="q").items[0].model_id == RUN.model_id
    assert catalogue.runs(BOB, project_id="q").total == 0
    with pytest.raises(NotFound):
        catalogue.set_project(SESSION.session_id, BOB, "p")


def test_sessions_are_walked_newest_first_from_any_of_them(catalogue: Catalogue) -> None:
    for number, time in enumerate([3.0, 1.0, 2.0, 2.0]):
        session = replace(SESSION, session_id=SessionId(f"s{number}"), created_at=time + 10)
        catalogue.add_session(session)
    walked = [each.session_id for each in catalogue.sessions_after(ALICE, None)][:4]
    assert walked == ["s0", "s3", "s2", "s1"]
    for at, last in enumerate(walked):
        after = [each.session_id for each in catalogue.sessions_after(ALICE, last)]
        assert after == [*walked[at + 1 :], "s"]


def test_clients_of_a_sampler_have_numbers_that_outlive_a_restart(
    catalogue: Catalogue, file: Path
) -> None:
    catalogue.add_sampler(SAMPLER)
    name = SAMPLER.sampling_session_id
    assert [catalogue.join_sampler(name, ALICE) for _ in range(2)] == [1, 2]
    assert Catalogue(file).join_sampler(name, ALICE) == 3


def test_followers_read_what_their_run_pinned_last(file: Path) -> None:
    """One row is written for any number of them; a restart forgets nothing."""
    catalogue = Catalogue(file)
    catalogue.add_run(RUN)
    for name, follows in (("s:sample:1", RUN.model_id), ("s:sample:2", None)):
        sampler = replace(SAMPLER, sampling_session_id=SamplingSessionId(name), follows=follows)
        catalogue.add_sampler(sampler)
    older, newer = (SamplerTarget("base", VersionId(v)) for v in ("old", "new"))
    assert catalogue.move_followers(RUN.model_id, older) is None
    assert catalogue.move_followers(RUN.model_id, newer) == older
    catalogue.close()
    again = Catalogue(file)
    assert again.sampler("s:sample:1", ALICE).target == newer
    assert again.sampler("s:sample:2", ALICE).target == SAMPLER.target


def test_memory_holds_the_newest_and_the_file_the_rest(file: Path) -> None:
    catalogue = Catalogue(file, remembered=2)
    for name in "abcde":
        catalogue.add_session(replace(SESSION, session_id=SessionId(name)))
    assert [catalogue.session(name, ALICE).session_id for name in "abcde"] == list("abcde")
    assert len(catalogue._known) == 2
    catalogue.finish_session("a", ALICE, "success")
    assert catalogue.session("a", ALICE).finished == "success"
    catalogue.close()
