"""What is chosen for each kind of device, and what is said of it."""

import pytest
import torch

from openrl.engines.pytorch.devices import POLICIES, choose_device, choose_dtype, in_words
from openrl.errors import UserError


@pytest.mark.parametrize("name", ["cuda:77", "abacus", "meta"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(UserError, match="cannot be used here"):
        choose_device(name)


@pytest.mark.parametrize("kind", POLICIES)
def test_what_nobody_has_run_says_so(kind):
    """Only the CPU has been tried."""
    said = in_words(torch.device(kind), "auto")
    assert ("untested" in said) == (kind != "cpu")
    assert POLICIES[kind].why in said


def test_what_is_configured_is_taken_and_said():
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu) == torch.float32
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16
    assert "bfloat16 (as configured)" in in_words(cpu, "bfloat16")
