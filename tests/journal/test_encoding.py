"""What goes in comes out, and what another version wrote can be read."""

from __future__ import annotations

import types as python_types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.journal import same

from openrl import errors, types
from openrl.errors import OpenRLError, ServerError, UserError
from openrl.journal.encoding import pack, unpack
from openrl.types import AdamParams, Failed, LoraConfig, OptimStep, Sample, Work

CLASSES = [
    kind
    for kind in vars(types).values()
    if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == types.__name__
]
ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OpenRLError)
]

texts = st.text(max_size=8)
numbers = st.integers(-(2**70), 2**70) | st.integers(-4, 300)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(["int32", "int64", "float32", "float64", "bool", "uint8"]))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
    array = draw(npst.arrays(dtype, shape))
    return array.T if draw(st.booleans()) else array


@st.composite
def any_error(draw: st.DrawFn) -> OpenRLError:
    kind = draw(st.sampled_from(ERRORS))
    if kind is errors.InvalidDatum:
        return kind(draw(st.integers(0, 9)), draw(texts), draw(texts))
    if kind in (errors.Overloaded, errors.Unavailable):
        return kind(draw(texts), draw(st.floats(0, 9)))
    return kind(draw(texts))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Whatever an annotation of `types` allows, so that what is added there is covered."""
    if isinstance(hint, NewType):
        return values_of(hint.__supertype__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, python_types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[1:] == (Ellipsis,):
            return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if origin is Mapping:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if origin is np.ndarray:
        return arrays()
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.deferred(
            lambda: st.builds(hint, **{each: values_of(hints[each]) for each in hints})
        )
    if isinstance(hint, type) and issubclass(hint, OpenRLError):
        return any_error()
    return {
        str: texts,
        int: numbers,
        float: st.floats(),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]


def contiguous(value: object) -> Any:
    """The same with arrays as they come out."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(value.shape)
    if is_dataclass(value):
        return type(value)(*(contiguous(getattr(value, each.name)) for each in fields(value)))
    if isinstance(value, dict):
        return {key: contiguous(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(contiguous, value))
    return value


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_value_comes_back(kind: type) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values_of(kind))
    def holds(value: object) -> None:
        assert same(unpack(pack(value)), contiguous(value))

    holds()


def rewritten(value: object, change: Any) -> Any:
    """As another version would have packed it."""
    content = msgpack.unpackb(pack(value), strict_map_key=False)
    change(content)
    return unpack(msgpack.packb(content))


def test_fields_of_a_later_version_are_passed_over() -> None:
    def add(content: Any) -> None:
        content[1][1]["warmup_steps"] = 3

    assert rewritten(AdamParams(0.5), add) == AdamParams(0.5)


def test_fields_that_an_earlier_version_did_not_have_take_their_defaults() -> None:
    def take(content: Any) -> None:
        del content[1][1]["alpha"]

    assert rewritten(LoraConfig(rank=4, alpha=9.0), take) == LoraConfig(rank=4)


def test_a_field_that_is_needed_is_named() -> None:
    def take(content: Any) -> None:
        del content[1][1]["adam"]

    with pytest.raises(ValueError, match="OptimStep is without adam"):
        rewritten(OptimStep(AdamParams()), take)


def test_a_class_of_a_later_version_is_named() -> None:
    def rename(content: Any) -> None:
        content[1][0] = "Distill"

    with pytest.raises(ValueError, match="Distill is unknown"):
        rewritten(OptimStep(AdamParams()), rename)


@pytest.mark.parametrize(("category", "becomes"), [("user", UserError), ("server", ServerError)])
def test_an_error_of_a_later_version_is_one_of_its_category(category: str, becomes: type) -> None:
    def rename(content: Any) -> None:
        content[1][1]["error"][3][:2] = ["TooClever", category]

    failed = rewritten(Failed(UserError("no")), rename)
    assert type(failed.error) is becomes
    assert failed.error.message == "no"


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\x01\x90", b"\x81\x09\x90", b"\x81\x02\x93"])
def test_what_is_no_value_is_an_error_of_one_kind(body: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(body)


def test_what_has_no_place_is_refused() -> None:
    with pytest.raises(TypeError, match="object cannot be journalled"):
        pack(object())
    with pytest.raises(TypeError, match="array of objects"):
        pack(np.array([object()]))


def test_the_vocabulary_is_the_one_of_types() -> None:
    assert {Work, Sample, Failed} <= set(CLASSES)
