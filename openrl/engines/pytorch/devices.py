"""What there is to compute with, for whoever asks before an engine is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openrl.engines.pytorch.engine import choose_device


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`free` and `total` are bytes of the device's own memory; None where it has none."""

    name: str
    free: int | None
    total: int | None
    torch: str


def device_facts(wanted: str) -> DeviceFacts:
    """Of the device that `engine.device` would take. Raises `UserError` if it is not here."""
    device = choose_device(wanted)
    version = str(torch.__version__)
    if device.type != "cuda":
        return DeviceFacts(str(device), None, None, version)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceFacts(f"{device} ({torch.cuda.get_device_name(device)})", free, total, version)
