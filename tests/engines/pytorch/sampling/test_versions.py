"""Pinned versions: counted, paged out when they idle, the same to the bit when they return."""

from __future__ import annotations

import gc
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.engines.base import AdapterSource, RowId
from openrl.engines.pytorch.lora import Adapter
from openrl.errors import Gone, ServerError
from openrl.types import Failed, VersionId


def source(name: str) -> AdapterSource:
    return AdapterSource(VersionId(name))


def never(path: Path) -> Adapter:
    raise AssertionError(path)


def test_idle_versions_come_back_to_the_bit(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any, tmp_path: Path
) -> None:
    p, base = prompt(1, 40), base_model("qwen3")
    memory, paged = drive(), drive(pages=tmp_path / "pages", idle_versions=1)
    for i in range(5):
        for d in (memory, paged):
            d.sampler.pin(VersionId(f"v{i}"), trained(base, i))
    assert paged.sampler.versions.in_memory == 1
    assert memory.sampler.versions.in_memory == 5
    ask = [start(f"r{i}", p, n=2, max_tokens=9, version=source(f"v{i}")) for i in range(5)]
    want = memory.all(*ask)
    for request in ask:
        for row, sequence in paged.all(request).items():
            assert np.array_equal(sequence.tokens, want[row].tokens)
            assert np.array_equal(sequence.logprobs, want[row].logprobs)
        assert paged.sampler.versions.in_memory <= 2


def test_versions_in_use_stay_in_memory(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any, tmp_path: Path
) -> None:
    d, base = drive(pages=tmp_path, idle_versions=1), base_model("qwen3")
    d.sampler.pin(VersionId("used"), trained(base, 0))
    d.turn(admit=(start("r", prompt(1, 5), max_tokens=40, version=source("used")),))
    for i in range(4):
        d.sampler.pin(VersionId(f"v{i}"), trained(base, i))
    assert d.sampler.versions.in_memory == 2
    d.finish()
    assert not isinstance(d.ended[RowId("r", 0)], Failed)


def test_a_dropped_version_leaves_no_page(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any, tmp_path: Path
) -> None:
    d, base = drive(pages=tmp_path, idle_versions=1), base_model("qwen3")
    for name in "abc":
        d.sampler.pin(VersionId(name), trained(base, 1))
    assert len(list(tmp_path.iterdir())) == 2
    for name in "abc":
        d.sampler.drop_version(VersionId(name))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Gone):
        d.sampler.versions.acquire(source("a"))


def test_a_page_that_is_lost_fails_its_own_rows(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any, tmp_path: Path
) -> None:
    d, base = drive(pages=tmp_path, idle_versions=1), base_model("qwen3")
    d.sampler.pin(VersionId("a"), trained(base, 1))
    d.sampler.pin(VersionId("b"), trained(base, 2))
    for page in tmp_path.iterdir():
        page.unlink()
    p = prompt(1, 5)
    d.turn(admit=(start("a", p, version=source("a")), start("b", p, version=source("b"))))
    d.finish()
    lost = d.ended[RowId("a", 0)]
    assert isinstance(lost, Failed)
    assert isinstance(lost.error, ServerError)
    assert not isinstance(d.ended[RowId("b", 0)], Failed)


def test_a_thousand_saves_grow_no_memory(
    drive: Any, trained: Any, base_model: Any, tmp_path: Path
) -> None:
    """Each is 170 kB: kept in memory they would be 170 MB."""
    d = drive(pages=tmp_path)
    adapter = trained(base_model("qwen3"), 1, 16)
    tensors, resident = [], []
    for i in range(1001):
        size = d.sampler.pin(VersionId(f"v{i}"), adapter)
        if i % 500 == 0 and i:
            gc.collect()
            tensors.append(sum(torch.is_tensor(o) for o in gc.get_objects()))
            resident.append(resident_bytes())
    assert size > 100_000
    assert tensors[0] == tensors[1]
    assert resident[1] - resident[0] < 20 * size
    assert d.sampler.versions.in_memory == 16
    shutil.rmtree(tmp_path)  # lest pytest keep it


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
