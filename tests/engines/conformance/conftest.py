"""Each test here runs once for each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sampling_subjects import Subject, fake, pytorch


@pytest.fixture(scope="session", params=[fake, pytorch], ids=["fake", "pytorch"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """The tests share it: each leaves no row behind."""
    make: Callable[[Path], Subject] = request.param
    made = make(tmp_path_factory.mktemp("conformance"))
    yield made
    made.engine.close()
