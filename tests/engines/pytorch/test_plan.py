"""What is decided at start-up: the memory plan, and what the numbers depend on."""

from __future__ import annotations

import pytest
import torch

from openrl.engines.pytorch import segments
from openrl.engines.pytorch.heap import keep_freed_memory
from openrl.engines.pytorch.numerics import examine, fingerprint
from openrl.engines.pytorch.plan import Needs, free_bytes, make_plan
from openrl.errors import UserError

GIB = 1 << 30
SMALL = Needs(row_bytes=100_000, layers=4, head_bytes=128 << 20)


def test_what_is_left_is_for_activations():
    plan = make_plan(10 * GIB, 2 * GIB, GIB, [SMALL])
    assert plan.activations == 6 * GIB
    assert plan.kept(SMALL) == 6 * GIB - SMALL.head_bytes
    assert plan.adapters_of(2) == GIB


def test_adapters_take_a_quarter_when_nothing_is_set():
    assert make_plan(8 * GIB, None, GIB, [SMALL]).adapters == 2 * GIB


def test_without_knowing_the_memory_nothing_is_bounded():
    plan = make_plan(None, None, GIB, [SMALL])
    assert (plan.adapters, plan.activations, plan.kept(SMALL)) == (None, None, None)


def test_a_plan_that_cannot_work_is_refused_with_its_sums():
    with pytest.raises(UserError, match=r"4,096 MiB are free .* 3,072 MiB are for adapters"):
        make_plan(4 * GIB, 3 * GIB, GIB, [SMALL])


def test_the_containers_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_bytes(torch.device("cpu"), tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu"), tmp_path) > 1 << 20


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_rows_do_not_depend_on_their_company_here(family, base_model):
    numerics = examine(base_model(family))
    assert numerics.exact
    assert numerics.gap == 0


def test_products_that_depend_on_their_company_are_noticed(base_model, monkeypatch):
    """A kernel whose rows change with their number, by the last bits."""
    plain = segments.F.linear

    def fickle(x_TD, weight, bias=None):
        return plain(x_TD, weight, bias) * (1 + 1e-6 * (x_TD.shape[0] > 100))

    monkeypatch.setattr(segments.F, "linear", fickle)
    numerics = examine(base_model("llama"))
    assert not numerics.exact
    assert 0 < numerics.gap < 1e-3


def test_the_fingerprint_names_what_bits_depend_on(base_model):
    text = fingerprint(base_model("llama"))
    assert torch.__version__ in text
    assert "float32" in text
    assert f"{torch.get_num_threads()} threads" in text


def test_freed_memory_stays_where_the_c_library_can():
    assert keep_freed_memory() in (True, False)
