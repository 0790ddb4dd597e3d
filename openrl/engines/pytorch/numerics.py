"""What a loaded model's numbers depend on, found out at load.

A job's results are the same to the bit in company and alone because no row of a product depends
on how many rows there are. Whether the kernels of this machine keep to that is tested, not
believed. The rest of what bits depend on (library, threads, kernels, dtype) goes into one text,
so that whoever keeps results can tell whether they would come out the same again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.lora import Adapter, fresh_adapter
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.engines.pytorch.segments import Segment
from openrl.types import LoraConfig

log = logging.getLogger("openrl")

_OWN = (7, 33)
_COMPANY = ((19,), (150, 41), (260,))
"""Lengths of neighbours that go before the tested sequences."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """`fingerprint`: results may differ in their last bits between two that differ. `exact`: rows
    do not depend on their company to the bit; else `gap` is the largest difference that was
    seen, relative to the largest number, of hidden states or gradients."""

    fingerprint: str
    exact: bool
    gap: float


def examine(base: BaseModel) -> Numerics:
    """Takes some ten short passes."""
    gap = _company_gap(base)
    if gap > 0 and base.device.type == "cpu":
        log.warning(
            "on this machine a job's numbers depend on its company (by %.1e): results are right, "
            "but not the same to the bit from run to run",
            gap,
        )
    return Numerics(fingerprint(base), gap == 0, gap)


def fingerprint(base: BaseModel) -> str:
    parts = [
        f"torch {torch.__version__}",
        f"{base.config.model_type} {str(base.dtype).removeprefix('torch.')}",
    ]
    if base.device.type == "cuda":
        parts += [
            torch.cuda.get_device_name(base.device),
            f"cuda {torch.version.cuda}",
            "tf32" if torch.backends.cuda.matmul.allow_tf32 else "no tf32",
        ]
    elif base.device.type == "cpu":
        blas = "mkl" if torch.backends.mkl.is_available() else "blas"
        capability = torch.backends.cpu.get_cpu_capability()
        parts += [f"cpu {capability} {blas}", f"{torch.get_num_threads()} threads"]
    else:
        parts.append(base.device.type)
    return ", ".join(parts)


def measure_row_bytes(base: BaseModel) -> int:
    """What one row more keeps for the backward pass."""
    few, many = (_kept_bytes(base, rows) for rows in (64, 192))
    return max(1, (many - few) // 128)


def _kept_bytes(base: BaseModel, rows: int) -> int:
    """Counts what is kept without keeping it: no backward pass comes, and a test at load should
    take little memory beside the weights. Weak references, so that no address is used twice."""
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        kept[reference.cdata] = reference, storage.nbytes()

    adapter = _adapter(base)
    laid = lay_out(_sequences(base, (64,) * (rows // 64)), base.device)
    segment = Segment(0, rows, adapter, adapter.layout.zeros(base.device))
    with saved_tensors_hooks(note, lambda nothing: nothing):
        base.hidden(training_batch(laid, (segment,)))
    return sum(size for _, size in kept.values())


def _company_gap(base: BaseModel) -> float:
    alone = _run(base, ())
    gaps = [
        float((mine - other).abs().max() / mine.abs().max())
        for company in _COMPANY
        for mine, other in zip(alone, _run(base, company), strict=True)
    ]
    # max() would lose a NaN.
    return float(np.max(gaps))


def _run(base: BaseModel, company: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The tested sequences' hidden states and the adapter's gradient, on the CPU."""
    adapter = _adapter(base)
    sequences = _sequences(base, company) + _sequences(base, _OWN)
    start, end = sum(company), sum(company) + sum(_OWN)
    gradient = adapter.layout.zeros(base.device)
    segments = [Segment(start, end, adapter, gradient)]
    if company:
        neighbour = Segment(0, start, adapter, adapter.layout.zeros(base.device))
        segments.insert(0, neighbour)
    laid = lay_out(sequences, base.device)
    # Computed twice, so that little is kept: the kernels and the shapes are those of any pass.
    hidden_TD = base.hidden(training_batch(laid, segments), recompute=True)
    upstream_TD = torch.zeros_like(hidden_TD)
    # Not the states themselves: a norm has no slope along its own result.
    upstream_TD[:end] = hidden_TD[:end].detach().roll(1, -1)
    hidden_TD.backward(upstream_TD)
    return hidden_TD[start:end].detach().float().cpu(), gradient.flat.cpu()


def _adapter(base: BaseModel) -> Adapter:
    adapter = fresh_adapter(base.linears, LoraConfig(rank=8, seed=0), base.device, base.dtype)
    generator = torch.Generator().manual_seed(0)
    for factor in adapter.weights.by_linear:
        if factor is not None:
            noise = torch.empty(factor.b_NR.shape).normal_(std=0.02, generator=generator)
            factor.b_NR.copy_(noise)
    adapter.refresh()
    return adapter


def _sequences(base: BaseModel, lengths: tuple[int, ...]) -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(lengths)
    return [generator.integers(0, base.vocab_size, n, dtype=np.int32) for n in lengths]
