import pytest

from openrl.cluster import names

UUID = "01234567-89ab-cdef-0123-456789abcdef"
SESSION = f"gpu-1.rack-{UUID}"
MODEL = f"{SESSION}:train:0"


@pytest.mark.parametrize(
    ("name", "home"),
    [
        (SESSION, "gpu-1.rack"),
        (MODEL, "gpu-1.rack"),
        (f"{MODEL}:7@other", "gpu-1.rack"),
        (f"{SESSION}:sample:3@other:9", "gpu-1.rack"),
        (f"a-copy-{'0' * 32}:train:0", "a"),
        ("a-direct-alice.b-c:sample:0f", "a"),
        (f"a-direct-{'0' * 32}", "a"),
        ("made-up", None),
        ("", None),
    ],
)
def test_an_id_names_its_home(name: str, home: str | None) -> None:
    assert names.home_of(name) == home


@pytest.mark.parametrize(
    ("name", "node"),
    [
        (SESSION, "gpu-1.rack"),
        (MODEL, None),
        (f"{MODEL}:7", "gpu-1.rack"),
        (f"{MODEL}:7@other", "other"),
        (f"{SESSION}:sample:3", "gpu-1.rack"),
        (f"{SESSION}:sample:3@other", "other"),
        (f"{SESSION}:sample:3@other:9", "other"),
        ("nonsense:train:", None),
        ("nonsense:sample:1", None),
    ],
)
def test_ids_that_a_node_makes_name_the_serving_node(name: str, node: str | None) -> None:
    assert names.node_of(name) == node


def test_the_home_is_not_said_twice() -> None:
    assert names.served_by(f"{MODEL}:1", "gpu-1.rack") == f"{MODEL}:1"
    assert names.served_by(f"{MODEL}:1", "b") == f"{MODEL}:1@b"
    assert names.plain(f"{MODEL}:1@b") == f"{MODEL}:1"
    assert names.plain(f"{SESSION}:sample:1@b:2") == f"{SESSION}:sample:1@b:2"


def test_a_path_names_its_run() -> None:
    assert names.run_of(f"tinker://{MODEL}/weights/x") == MODEL
    assert names.run_of("fake/tiny") is None
