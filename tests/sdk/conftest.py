from collections.abc import Iterator
from pathlib import Path

import pytest
from support.node import serving_in_a_thread


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data: Path = tmp_path_factory.mktemp("node")
    with serving_in_a_thread(data) as address:
        yield address
