"""What a snapshot of a job or a version is made of, and jobs made of one again, to the bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from openrl.engines.base import RestoreAdapter
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.checkpoint import write_adapter
from openrl.engines.pytorch.full import layout_of
from openrl.engines.pytorch.job import Job, JobRecord
from openrl.engines.pytorch.lora import Adapter
from openrl.engines.snapshots import WriteFiles, check
from openrl.errors import ServerError

log = logging.getLogger("openrl")

_FILE = "job.safetensors"


def files_of_job(job: Job, fingerprint: str) -> WriteFiles:
    """Copies the job now. `fingerprint` is what its numbers depend on beside it."""
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in job.tensors().items()}
    record = job.record()
    state = {"version": record.version, "steps": record.steps, "numerics": fingerprint}

    def write(directory: Path) -> None:
        save_file(tensors, directory / _FILE, metadata={"state": json.dumps(state)})

    return write


def files_of_version(adapter: Adapter, base_name: str) -> WriteFiles:
    """`adapter` is immutable: there is nothing to copy."""
    return lambda directory: write_adapter(adapter, directory, base_name)


def restored_job(order: RestoreAdapter, slot: int, base: BaseModel, fingerprint: str) -> Job:
    """Raises `ServerError` for a snapshot that is not whole, or of another adapter."""
    check(order.directory)
    layout = layout_of(base, order.lora)
    try:
        tensors = load_file(order.directory / _FILE)
        with safe_open(order.directory / _FILE, framework="pt") as file:
            state = json.loads(file.metadata()["state"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"snapshot {order.directory.name} cannot be read: {error}") from error
    if any(tensor.shape != (layout.size,) for tensor in tensors.values()):
        raise ServerError(f"snapshot {order.directory.name} is of an adapter of another shape")
    if state["numerics"] != fingerprint:
        log.warning(
            "%s was trained under other numerics (%s, now %s): what is computed again may differ "
            "in the last bits",
            order.model_id,
            state["numerics"],
            fingerprint,
        )
    record = JobRecord(slot, layout, state["version"], state["steps"])
    return Job.restored(record, tensors, base.device, base.dtype)
