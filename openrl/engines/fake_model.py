"""The fake engine's model: small, exact and trainable. Pure numpy.

The next token's logits are a fixed wave of the last token plus the adapter's bias [V], which is
all that trains. So log-probabilities are proper, losses fall, and every version samples alike
only when it is alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from openrl.engines.base import AtomPiece
from openrl.errors import Diverged, UserError
from openrl.types import AdamParams, Array, Datum, RequestId, SamplingParams

F64 = NDArray[np.float64]

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_OPTIMIZER = "optimizer.safetensors"
_SNAPSHOT = "job.safetensors"


@dataclass(slots=True, eq=False)
class FakeAdapter:
    """`bias_V` and Adam's moments float64 [V]; `steps` counts Adam's, `version` the changes.
    `scratch` is the gradient of a request's atoms so far; a model's requests come one by one."""

    rank: int
    bias_V: F64
    mean_V: F64
    square_V: F64
    steps: int = 0
    version: int = 0
    grad_V: F64 | None = None
    scratch: tuple[RequestId, F64] | None = None

    @classmethod
    def fresh(cls, rank: int, vocab_size: int) -> FakeAdapter:
        return cls(rank, np.zeros(vocab_size), np.zeros(vocab_size), np.zeros(vocab_size))

    def take_scratch(self, piece: AtomPiece) -> F64 | None:
        """What came before this atom of its request; None when one of those has failed. Nothing is
        left of it, nor of a request that was cut short."""
        begun, self.scratch = self.scratch, None
        if piece.start == 0:
            return np.zeros_like(self.bias_V)
        return begun[1] if begun and begun[0] == piece.request_id else None

    def add(self, piece: AtomPiece, grad_V: F64) -> None:
        """Of the request up to this atom; the last moves it to the model's gradient."""
        if not piece.last:
            self.scratch = piece.request_id, grad_V
        elif self.grad_V is None:
            self.grad_V = grad_V
        else:
            self.grad_V = self.grad_V + grad_V

    def step(self, adam: AdamParams) -> float:
        """AdamW as torch writes it; returns the norm of the gradient before clipping. Raises
        `Diverged` when the gradient, which is gone then, is not finite."""
        grad_V, self.grad_V = self.grad_V, None
        assert grad_V is not None
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(grad_V))
        if not math.isfinite(norm):
            raise Diverged("the accumulated gradient is not finite: it is dropped")
        if adam.grad_clip_norm > 0:
            grad_V = grad_V * min(1.0, adam.grad_clip_norm / (norm + 1e-6))
        self.steps += 1
        self.version += 1
        self.mean_V = adam.beta1 * self.mean_V + (1 - adam.beta1) * grad_V
        self.square_V = adam.beta2 * self.square_V + (1 - adam.beta2) * grad_V**2
        mean_V = self.mean_V / (1 - adam.beta1**self.steps)
        root_V = np.sqrt(self.square_V / (1 - adam.beta2**self.steps)) + adam.eps
        self.bias_V = self.bias_V * (1 - adam.learning_rate * adam.weight_decay)
        self.bias_V = self.bias_V - adam.learning_rate * mean_V / root_V
        return norm

    def save(self, directory: Path, with_optimizer: bool) -> None:
        write_bias(self.bias_V, directory)
        config = {"peft_type": "LORA", "r": self.rank}
        (directory / _CONFIG).write_text(json.dumps(config))
        if with_optimizer:
            steps = np.array(self.steps)
            moments = {"mean": self.mean_V, "square": self.square_V, "steps": steps}
            save_file(moments, directory / _OPTIMIZER)

    def snapshot(self) -> Callable[[Path], None]:
        """Copies it now; writes the copy into a directory."""
        tensors = self._tensors()
        return lambda directory: save_file(tensors, directory / _SNAPSHOT)

    def _tensors(self) -> dict[str, F64]:
        counts = np.array([self.steps, self.version], np.float64)
        own = {"bias": self.bias_V, "mean": self.mean_V, "square": self.square_V, "counts": counts}
        return {k: v.copy() for k, v in own.items()} | (
            {} if self.grad_V is None else {"gradient": self.grad_V.copy()}
        )

    @classmethod
    def restored(cls, rank: int, directory: Path) -> FakeAdapter:
        tensors = load_file(directory / _SNAPSHOT)
        steps, version = (int(count) for count in tensors["counts"])
        bias_V, mean_V, square_V = (tensors[name] for name in ("bias", "mean", "square"))
        return cls(rank, bias_V, mean_V, square_V, steps, version, tensors.get("gradient"))

    def loaded(self, directory: Path, with_optimizer: bool) -> FakeAdapter:
        """The checkpoint as an adapter of its own; this one stays as it is."""
        rank = json.loads((directory / _CONFIG).read_text())["r"]
        if rank != self.rank:
            raise UserError(f"checkpoint rank is {rank} but target model rank is {self.rank}")
        new = FakeAdapter.fresh(rank, len(self.bias_V))
        new.bias_V, new.version = read_bias(directory), self.version + 1
        if with_optimizer:
            state = load_file(directory / _OPTIMIZER)
            new.mean_V, new.square_V = state["mean"], state["square"]
            new.steps = int(state["steps"])
        return new


def write_bias(bias_V: F64, directory: Path) -> None:
    save_file({"bias": bias_V}, directory / _WEIGHTS)


def read_bias(directory: Path) -> F64:
    return np.asarray(load_file(directory / _WEIGHTS)["bias"], np.float64)


def logprobs_NV(tokens: Array, bias_V: F64, temperature: float = 1.0) -> F64:
    """Row n is the distribution of what follows `tokens[n]`; temperature 0 reads as 1."""
    ids = np.arange(1, len(bias_V) + 1)
    logits = np.sin(0.618 * (np.asarray(tokens)[:, None] + 1.0) * ids) + bias_V
    logits = logits / (max(temperature, 1e-300) if temperature else 1.0)  # finite below that
    peak = logits.max(1, keepdims=True)
    shifted = logits - peak
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


@dataclass(frozen=True, slots=True, eq=False)
class DatumLoss:
    """`logprobs` and `terms` have the shape of the targets; `grad_V` is of the bias."""

    logprobs: Array
    terms: Array
    grad_V: F64


def datum_loss(datum: Datum, loss_fn: str, config: Mapping[str, float], bias_V: F64) -> DatumLoss:
    targets = datum.loss_inputs["target_tokens"]
    targets_NK = targets.reshape(len(datum.tokens), -1)
    rows_NV = logprobs_NV(datum.tokens, bias_V)
    logprobs_NK = np.take_along_axis(rows_NV, targets_NK, axis=1)
    inputs = {
        name: np.asarray(datum.loss_inputs[name], np.float64).reshape(len(datum.tokens), -1)
        for name in datum.loss_inputs
        if name != "target_tokens"
    }
    with np.errstate(over="ignore", invalid="ignore"):
        terms_NK, slopes_NK = _terms(loss_fn, logprobs_NK, inputs, config)
        grad_V = -slopes_NK.sum(1) @ np.exp(rows_NV)
        np.add.at(grad_V, targets_NK, slopes_NK)
    return DatumLoss(logprobs_NK.reshape(targets.shape), terms_NK.reshape(targets.shape), grad_V)


def _terms(
    loss_fn: str, lp: F64, inputs: Mapping[str, F64], config: Mapping[str, float]
) -> tuple[F64, F64]:
    """The loss of each target and its slope in the log-probability: see `engines.losses`."""
    if loss_fn == "cross_entropy":
        return -inputs["weights"] * lp, -inputs["weights"]
    gap, advantages = lp - inputs["logprobs"], inputs["advantages"]
    if loss_fn == "dro":
        beta = config["beta"]
        return beta / 2 * gap**2 - lp * advantages, beta * gap - advantages
    if loss_fn == "gspo":
        mask = inputs["sequence_ratio_mask"] != 0
        gap = np.full_like(gap, gap[mask].mean() if mask.any() else 0.0)
    ratio = np.exp(gap)
    if loss_fn == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    low = inputs.get("clip_low_threshold", config["clip_low_threshold"])
    high = inputs.get("clip_high_threshold", config["clip_high_threshold"])
    clamped = np.clip(ratio, low, high)
    if loss_fn == "cispo":
        return -clamped * lp * advantages, -clamped * advantages
    free, bound = ratio * advantages, clamped * advantages
    return -np.minimum(free, bound), np.where(bound < free, 0.0, -free)


def draw(logprobs_V: F64, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the truncated distribution; the best one at 0."""
    if params.temperature == 0:
        return int(logprobs_V.argmax())
    order = np.argsort(-logprobs_V, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    mass = np.exp(logprobs_V[order])
    mass = mass / mass.sum()
    before = np.cumsum(mass) - mass
    kept = before < params.top_p
    mass = mass[kept] / mass[kept].sum()
    at = int(np.searchsorted(np.cumsum(mass), uniform, side="right"))
    return int(order[min(at, len(mass) - 1)])
