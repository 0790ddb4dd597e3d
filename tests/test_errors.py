"""An error that is kept and raised again stays as it was kept."""

import pytest

from openrl.errors import InvalidDatum, Overloaded, ServerError, copied, without_frames
from openrl.types import Failed


@pytest.mark.parametrize(
    "kept", [ServerError("no"), InvalidDatum(3, "tokens", "too long"), Overloaded("later", 7.0)]
)
def test_what_is_raised_is_another_of_the_same_words(kept: ServerError) -> None:
    with pytest.raises(type(kept)) as raised:
        raise copied(kept)
    assert kept.__traceback__ is None
    assert raised.value is not kept
    assert raised.value.message == kept.message
    assert vars(raised.value) == vars(kept)


def test_a_failure_holds_no_frames_nor_those_of_its_cause() -> None:
    try:
        try:
            raise ValueError("within")
        except ValueError as within:
            raise ServerError("without") from within
    except ServerError as error:
        failed = Failed(error)
    assert (failed.error.__traceback__, failed.error.__cause__) == (None, None)
    assert failed.error.__context__ is None
    assert without_frames(failed.error) is failed.error
