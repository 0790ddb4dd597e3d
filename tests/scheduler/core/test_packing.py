from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrl.scheduler.core.packing import Budget, cut_atoms


def test_the_cut_written_out() -> None:
    assert cut_atoms([], 10) == ()
    assert cut_atoms([3], 10) == ((0, 1),)
    assert cut_atoms([4, 6, 1], 10) == ((0, 2), (2, 3))
    assert cut_atoms([50, 4, 50], 10) == ((0, 1), (1, 2), (2, 3))
    assert cut_atoms([0, 0, 11, 0], 10) == ((0, 2), (2, 3), (3, 4))


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 60))
def test_atoms_cover_the_request_and_are_as_large_as_they_may(sizes: list[int], most: int) -> None:
    atoms = cut_atoms(sizes, most)
    assert [i for start, stop in atoms for i in range(start, stop)] == list(range(len(sizes)))
    for start, stop in atoms:
        assert stop > start
        assert stop == start + 1 or sum(sizes[start:stop]) <= most
    for start, stop in atoms[:-1]:
        assert sum(sizes[start : stop + 1]) > most  # the next datum did not fit


def test_the_first_piece_always_fits() -> None:
    budget = Budget(seconds=0.1, tokens=10)
    assert budget.fits(5.0, 1000)
    budget.take(5.0, 1000)
    assert not budget.fits(0.0, 1)
    budget = Budget(seconds=0.1, tokens=10)
    budget.take(0.05, 5)
    assert budget.fits(0.05, 5)
    assert not budget.fits(0.06, 5)
    assert not budget.fits(0.05, 6)
