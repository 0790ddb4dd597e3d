import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrl.api.tensors import ElementBudget, numbers, tensor, tokens


def dense(data, dtype="float32", shape=None, budget=1000):
    return tensor(data, dtype, shape, None, None, ElementBudget(budget))


def csr(values, crow, col, shape, budget=1000):
    return tensor(values, "float32", shape, crow, col, ElementBudget(budget))


@given(
    st.lists(
        st.lists(st.integers(0, 3).map(float), min_size=1, max_size=5), min_size=1, max_size=5
    ).filter(lambda rows: len({len(row) for row in rows}) == 1)
)
def test_csr_gives_back_the_dense_matrix(rows: list[list[float]]) -> None:
    matrix = np.array(rows, dtype=np.float32)
    listed = [np.flatnonzero(row) for row in matrix]
    crow = np.cumsum([0] + [len(columns) for columns in listed])
    col = np.concatenate(listed).astype(np.int64)
    values = matrix[matrix != 0].astype("<f4")
    dense_again = csr(values.tobytes(), crow.tolist(), col.tobytes(), list(matrix.shape))
    assert dense_again.dtype == np.float32
    assert np.array_equal(dense_again, matrix)


@pytest.mark.parametrize(
    ("values", "crow", "col", "shape", "problem"),
    [
        ([1.0], [0, 1], [2], [1, 2], "column index"),
        ([1.0], [0, 1], [-1], [1, 2], "column index"),
        ([1.0], [0, 1, 1], [0], [1, 2], "row pointers"),
        ([1.0], [0, 2], [0], [1, 2], "rise"),
        ([1.0], [1, 1], [0], [1, 2], "rise"),
        ([1.0, 1.0], [0, 2, 1, 2], [0, 0], [3, 2], "rise"),
        ([1.0], [0, 2**63 - 1, -(2**63) + 1, 1], [0], [3, 2], "rise"),
        ([1.0], [0, 1], [0, 1], [1, 2], "1 values but 2"),
        ([1.0], [0, 1], [0], None, "needs its shape"),
        ([1.0], [0, 1], [0], [2], "needs its shape"),
        ([1.0], [0, 1], [0], [-1, 2], "needs its shape"),
        ([1.0], [0, 1], [0], [2**40, 0], "out of range"),
        ([1.0], [0, 1], None, [1, 2], "needs both"),
        ([], [0, 0], [], [1, 1001], "more elements"),
    ],
)
def test_csr_that_lies_about_itself(values, crow, col, shape, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        csr(values, crow, col, shape)


def test_the_budget_counts_over_the_whole_request() -> None:
    budget = ElementBudget(5)
    tensor([1.0, 2.0, 3.0], "float32", None, None, None, budget)
    with pytest.raises(ValueError, match="more elements"):
        tensor([1.0, 2.0, 3.0], "float32", None, None, None, budget)


@pytest.mark.parametrize(
    ("data", "dtype", "shape", "problem"),
    [
        ([1.5], "int64", None, "integers"),
        ([2**64], "int64", None, "out of range|integers"),
        ([2**63], "int64", None, "out of range|integers"),
        ([10**400], "float32", None, "out of range"),
        ([1.0], "float16", None, "dtype 'float16'"),
        (b"12345", "float32", None, "whole number"),
        ([1.0, 2.0], "float32", [3], "does not fit 2"),
        ([1.0, 2.0], "float32", [], "not \\[N\\]"),
        ([1.0], "float32", [1, 1, 1], "not \\[N\\]"),
        ([1.0], "float32", [-1], "not \\[N\\]"),
        ([], "float32", [2**62, 0], "out of range"),
    ],
)
def test_dense_that_makes_no_sense(data, dtype, shape, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        dense(data, dtype, shape)


def test_wire_dtypes_become_two() -> None:
    assert numbers(np.array([1, -2], "<i4").tobytes(), "int32").dtype == np.int64
    halves = np.array([0x3F80, 0xC000], "<u2")  # 1 and -2: the upper halves of a float32
    assert numbers(halves.tobytes(), "bfloat16").tolist() == [1.0, -2.0]
    assert numbers(halves.tobytes(), "bfloat16").dtype == np.float32
    assert numbers([1, 2], "float32").dtype == np.float32
    assert dense([1.0, 2.0, 3.0, 4.0], shape=[2, 2]).shape == (2, 2)


def test_an_unaligned_view_is_copied() -> None:
    message = memoryview(b"x" + np.array([1.0, 2.0], "<f4").tobytes())
    flat = numbers(message[1:], "float32")
    assert flat.flags.aligned
    assert flat.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("data", [[-1], [2**31], [0.5], b"123"])
def test_tokens_that_are_none(data) -> None:
    with pytest.raises(ValueError, match=r"token ids|integers|whole number"):
        tokens(data)
