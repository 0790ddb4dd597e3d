"""The tensors of one atom, from its datums, and its results back to one record per datum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from openrl.engines.base import AtomPiece
from openrl.engines.losses import LOSSES, InputSpec, LossSpec
from openrl.engines.pytorch.attention import Span
from openrl.engines.pytorch.logprobs import Sweep
from openrl.engines.pytorch.losses import ratio_metrics
from openrl.errors import InvalidDatum, UserError
from openrl.types import Array, Datum, ForwardBackwardOutput


@dataclass(frozen=True, slots=True, eq=False)
class AtomInputs:
    """S rows of all datums end to end, K the most targets of any. `targets_SK` int64; `inputs`
    fp32 [S, K]. A datum with fewer targets is filled up with targets that no loss counts."""

    spec: LossSpec
    config: Mapping[str, float]
    spans: tuple[Span, ...]
    targets_SK: Tensor
    inputs: Mapping[str, Tensor]


def atom_inputs(piece: AtomPiece, device: torch.device) -> AtomInputs:
    """`piece` has been validated at the door."""
    if piece.loss_fn not in LOSSES:
        raise UserError(f"loss_fn {piece.loss_fn!r} is not supported: {', '.join(LOSSES)}")
    spec = LOSSES[piece.loss_fn]
    config = spec.configured(piece.loss_fn_config)
    ends = np.cumsum([len(datum.tokens) for datum in piece.data]).tolist()
    starts = [0, *ends[:-1]]
    width = max(_width(datum) for datum in piece.data)

    def stack(dtype: DTypeLike, arrays: Iterable[Array]) -> Tensor:
        rows = [_as_columns(array, width, dtype) for array in arrays]
        return torch.from_numpy(np.concatenate(rows)).to(device)

    brought = [n for n in spec.inputs if n.dtype == "float32" and _anywhere(piece, n)]
    return AtomInputs(
        spec=spec,
        config=config,
        spans=tuple(Span(start, end) for start, end in zip(starts, ends, strict=True)),
        targets_SK=stack(np.int64, (d.loss_inputs["target_tokens"] for d in piece.data)),
        inputs={n.name: stack(np.float32, _given(piece, n, config)) for n in brought},
    )


def atom_output(piece: AtomPiece, atom: AtomInputs, sweep: Sweep) -> ForwardBackwardOutput:
    """Raises `InvalidDatum` for the first datum whose loss or log-probability is not finite."""
    logprobs_SK = sweep.logprobs_SK.cpu().numpy()
    terms_SK = sweep.terms.terms.cpu().numpy()
    outputs = []
    for offset, (datum, span) in enumerate(zip(piece.data, atom.spans, strict=True)):
        targets = datum.loss_inputs["target_tokens"]
        rows = np.s_[span.start : span.end, : _width(datum)]
        _require_finite(piece.start + offset, logprobs_SK[rows], terms_SK[rows])
        record: dict[str, Array] = {"logprobs": logprobs_SK[rows].reshape(targets.shape).copy()}
        if piece.loss_fn == "cross_entropy":
            record["elementwise_loss"] = terms_SK[rows].sum(1)
        outputs.append(record)
    metrics = {
        "loss:sum": float(terms_SK.sum(dtype=np.float64)),
        "num_tokens:sum": float(atom.spans[-1].end),
    }
    if "advantages" in atom.inputs:
        metrics |= ratio_metrics(sweep.logprobs_SK, atom.inputs, sweep.terms)
    return ForwardBackwardOutput(tuple(outputs), metrics)


def _width(datum: Datum) -> int:
    targets = datum.loss_inputs["target_tokens"]
    return int(targets.shape[1]) if targets.ndim == 2 else 1


def _as_columns(array: Array, width: int, dtype: DTypeLike) -> Array:
    columns: Array = np.asarray(array, dtype=dtype).reshape(len(array), -1)
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def _anywhere(piece: AtomPiece, needed: InputSpec) -> bool:
    return any(needed.name in datum.loss_inputs for datum in piece.data)


def _given(piece: AtomPiece, needed: InputSpec, config: Mapping[str, float]) -> Iterator[Array]:
    """An optional input that only other datums of the atom bring has the configured value."""
    for datum in piece.data:
        given = datum.loss_inputs.get(needed.name)
        length = len(datum.tokens)
        yield np.full(length, config[needed.name], np.float32) if given is None else given


def _require_finite(index: int, logprobs: Array, terms: Array) -> None:
    for field, values in (("logprobs", logprobs), ("loss", terms)):
        if not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0][0])
            raise InvalidDatum(
                index, field, f"is not finite at position {row}: gradients were left as they were"
            )
