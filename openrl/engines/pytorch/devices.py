"""What is computed where and in what: the choice for each kind of device, and its reasons.

Asked by the engine, and by commands before an engine is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from openrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Policy:
    """`base` is the dtype of the base model, and of what adapters are multiplied in; adapters'
    masters, moments and reductions are fp32 everywhere. `tried`: somebody has run it."""

    base: torch.dtype
    why: str
    tried: bool


POLICIES: Mapping[str, Policy] = {
    "cpu": Policy(
        torch.float32, "bfloat16 products are several times slower without AMX", tried=True
    ),
    "cuda": Policy(torch.bfloat16, "half the memory, and the tensor cores' own", tried=False),
    "mps": Policy(torch.float32, "its bfloat16 depends on the machine", tried=False),
}
_NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`free` and `total` are bytes of the device's own memory; None where it has none. `policy`
    is for people."""

    name: str
    free: int | None
    total: int | None
    torch: str
    policy: str


def choose_device(wanted: str) -> torch.device:
    """Raises `UserError` for a device that this machine does not have."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {wanted!r} cannot be used here: {error}") from error
    if device.type not in POLICIES:
        raise UserError(f"device {wanted!r} cannot be used here: none of {', '.join(POLICIES)}")
    return device


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    return POLICIES[device.type].base if wanted == "auto" else _NAMED[wanted]


def in_words(device: torch.device, wanted: str) -> str:
    """What is chosen on this device when the configuration wants `wanted` as dtype, and why."""
    policy = POLICIES[device.type]
    dtype = str(choose_dtype(wanted, device)).removeprefix("torch.")
    why = policy.why if wanted == "auto" else "as configured"
    untested = "" if policy.tried else f"; untested: nobody has run OpenRL on {device.type}"
    return f"base model in {dtype} ({why}), adapters, moments and sums in float32{untested}"


def device_facts(wanted: str, dtype: str = "auto") -> DeviceFacts:
    """Of the device that `engine.device` would take. Raises `UserError` if it is not here."""
    device = choose_device(wanted)
    version, policy = str(torch.__version__), in_words(device, dtype)
    if device.type != "cuda":
        return DeviceFacts(str(device), None, None, version, policy)
    free, total = torch.cuda.mem_get_info(device)
    name = f"{device} ({torch.cuda.get_device_name(device)})"
    return DeviceFacts(name, free, total, version, policy)
