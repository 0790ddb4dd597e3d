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
from openrl.engines.pytorch.metrics import likelihood_metrics, ratio_metrics, token_metrics
from openrl.errors import InvalidDatum, UserError
from openrl.types import Array, Datum, ForwardBackwardOutput


@dataclass(frozen=True, slots=True, eq=False)
class AtomInputs:
    """S rows of all datums end to end, K the most targets of any. `targets_SK` int64; `inputs`
    fp32 [S, K], `host` the same as arrays. A datum with fewer targets is filled up with targets
    that no loss counts."""

    spec: LossSpec
    config: Mapping[str, float]
    spans: tuple[Span, ...]
    targets_SK: Tensor
    inputs: Mapping[str, Tensor]
    host: Mapping[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class AtomNumbers:
    """What came of an atom, on the host: float32 [S, K]; `clipped_SK` is 1 where a bound cut."""

    logprobs_SK: Array
    terms_SK: Array
    clipped_SK: Array | None


def atom_inputs(piece: AtomPiece, device: torch.device) -> AtomInputs:
    """`piece` has been validated at the door."""
    if piece.loss_fn not in LOSSES:
        raise UserError(f"loss_fn {piece.loss_fn!r} is not supported: {', '.join(LOSSES)}")
    spec = LOSSES[piece.loss_fn]
    config = spec.configured(piece.loss_fn_config)
    ends = np.cumsum([len(datum.tokens) for datum in piece.data]).tolist()
    starts = [0, *ends[:-1]]
    width = max(_width(datum) for datum in piece.data)

    def stack(dtype: DTypeLike, arrays: Iterable[Array]) -> Array:
        rows: Array = np.concatenate([_as_columns(array, width, dtype) for array in arrays])
        return rows

    brought = [n for n in spec.inputs if n.dtype == "float32" and _anywhere(piece, n)]
    targets_SK = stack(np.int64, (d.loss_inputs["target_tokens"] for d in piece.data))
    host = {n.name: stack(np.float32, _given(piece, n, config)) for n in brought}
    return AtomInputs(
        spec=spec,
        config=config,
        spans=tuple(Span(start, end) for start, end in zip(starts, ends, strict=True)),
        targets_SK=torch.from_numpy(targets_SK).to(device),
        inputs={name: torch.from_numpy(array).to(device) for name, array in host.items()},
        host=host,
    )


def device_numbers(sweep: Sweep) -> Tensor:
    """All that `host_numbers` takes apart again, in one tensor: fp32 [2 or 3, S, K]."""
    parts = [sweep.logprobs_SK, sweep.terms.terms]
    if sweep.terms.clipped is not None:
        parts.append(sweep.terms.clipped.float())
    return torch.stack(parts)


def host_numbers(numbers: Array, shape: torch.Size) -> AtomNumbers:
    """`numbers` are the elements of a `device_numbers` of `shape`."""
    logprobs_SK, terms_SK, *clipped = numbers.reshape(tuple(shape))
    return AtomNumbers(logprobs_SK, terms_SK, clipped[0] if clipped else None)


def atom_output(piece: AtomPiece, atom: AtomInputs, numbers: AtomNumbers) -> ForwardBackwardOutput:
    """Raises `InvalidDatum` for the first datum whose loss or log-probability is not finite."""
    logprobs_SK, terms_SK = numbers.logprobs_SK, numbers.terms_SK
    outputs = []
    for offset, (datum, span) in enumerate(zip(piece.data, atom.spans, strict=True)):
        targets = datum.loss_inputs["target_tokens"]
        rows = np.s_[span.start : span.end, : _width(datum)]
        _require_finite(piece.start + offset, logprobs_SK[rows], terms_SK[rows])
        record: dict[str, Array] = {"logprobs": logprobs_SK[rows].reshape(targets.shape).copy()}
        if piece.loss_fn == "cross_entropy":
            record["elementwise_loss"] = terms_SK[rows].sum(1)
        outputs.append(record)
    return ForwardBackwardOutput(tuple(outputs), _metrics(atom, numbers))


def _metrics(atom: AtomInputs, numbers: AtomNumbers) -> dict[str, float]:
    found = token_metrics(numbers.terms_SK)
    if "advantages" in atom.host:
        return found | ratio_metrics(numbers.logprobs_SK, atom.host, numbers.clipped_SK)
    return found | likelihood_metrics(numbers.logprobs_SK, atom.host["weights"])


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
