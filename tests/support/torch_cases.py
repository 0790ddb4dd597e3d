"""Cases and independent references: plain transformers + peft, and losses as the protocol
writes them, one datum at a time, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from openrl.engines.base import AtomPiece, CreateAdapter, TrainPass, WeightsKey
from openrl.engines.pytorch.lora import Adapter
from openrl.engines.pytorch.trainer import Trainer
from openrl.types import Datum, Failed, ForwardBackwardOutput, LoraConfig, ModelId, RequestId

VOCAB = 101
KEY = WeightsKey("test")
RATIO_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
}


def random_datum(
    rng: np.random.Generator, length: int, loss: str, targets: int | None = None
) -> Datum:
    shape = (length,) if targets is None else (length, targets)
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, VOCAB, shape)}
    if loss == "cross_entropy":
        weights = rng.normal(size=shape).astype(np.float32)  # half of them negative
        inputs["weights"] = np.where(rng.random(shape) < 0.2, 0, weights).astype(np.float32)
    else:
        inputs["logprobs"] = rng.uniform(-8, -2, length).astype(np.float32)
        inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        inputs["advantages"][: length // 4] = 0
        inputs["logprobs"][: length // 4] = 0
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = (rng.random(length) < 0.7).astype(np.float32)
    return Datum(rng.integers(0, VOCAB, length).astype(np.int32), inputs)


def piece(
    model: str,
    data: Sequence[Datum],
    loss: str = "cross_entropy",
    *,
    config: Mapping[str, float] | None = None,
    request: str | None = None,
    start: int = 0,
    last: bool = True,
    forward_only: bool = False,
) -> AtomPiece:
    return AtomPiece(
        request_id=RequestId(request or f"{model}:1"),
        model_id=ModelId(model),
        start=start,
        data=tuple(data),
        loss_fn=loss,
        loss_fn_config=config or {},
        forward_only=forward_only,
        last=last,
    )


def add_job(trainer: Trainer, model: str, config: LoraConfig | None = None) -> Adapter:
    """A job whose B is not zero, so that every gradient is not."""
    config = config or LoraConfig(rank=4, seed=len(model))
    trainer.create(CreateAdapter(ModelId(model), config))
    adapter = trainer.job(ModelId(model)).adapter
    randomise(adapter, seed=sum(map(ord, model)))
    return adapter


def randomise(adapter: Adapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for factor in adapter.weights.by_linear:
        if factor is not None:
            factor.b_NR.normal_(std=0.1, generator=generator)


def run(trainer: Trainer, *pieces: AtomPiece) -> tuple[ForwardBackwardOutput | Failed, ...]:
    return trainer.train(TrainPass(KEY, pieces)).outcomes


def succeeded(outcome: ForwardBackwardOutput | Failed) -> ForwardBackwardOutput:
    assert isinstance(outcome, ForwardBackwardOutput), outcome
    return outcome


def gradient_of(trainer: Trainer, model: str) -> torch.Tensor:
    gradient = trainer.job(ModelId(model)).gradient
    assert gradient is not None
    return gradient.flat


# --- references -----------------------------------------------------------------------------


def with_peft(plain: Any, adapter: Adapter) -> Any:
    """`plain` with the same factors in peft's own layers."""
    names = {
        linear.name.rsplit(".", 1)[-1].replace("unembed_tokens", "lm_head")
        for linear in adapter.layout.linears
        if adapter.weights.by_linear[linear.index] is not None
    }
    config = PeftConfig(
        r=adapter.config.rank, lora_alpha=adapter.config.alpha, target_modules=sorted(names)
    )
    model = get_peft_model(plain, config)
    for _, factor, layer in peft_layers(model, adapter):
        layer.lora_A["default"].weight.data.copy_(factor.a_RD)
        layer.lora_B["default"].weight.data.copy_(factor.b_NR)
    return model


def peft_layers(model: Any, adapter: Adapter) -> list[tuple[int, Any, Any]]:
    found = []
    for linear in adapter.layout.linears:
        factor = adapter.weights.by_linear[linear.index]
        if factor is not None:
            name = linear.name.replace("model.unembed_tokens", "lm_head")
            found.append((linear.index, factor, model.base_model.model.get_submodule(name)))
    return found


def plain_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    """Of the targets, in their shape."""
    logits_NV = model(torch.from_numpy(datum.tokens).long()[None]).logits[0].float()
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    columns = targets.reshape(len(datum.tokens), -1)
    return logits_NV.log_softmax(-1).gather(1, columns).reshape(targets.shape)


def written_out_loss(
    loss: str, lp: torch.Tensor, inputs: Mapping[str, Any], config: Mapping[str, float]
) -> torch.Tensor:
    """Section 9 of the protocol, token by token, for autograd."""
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if loss == "cross_entropy":
        return -(given["weights"] * lp).sum()
    q, a = given["logprobs"], given["advantages"]
    ratio = torch.exp(lp - q)
    if loss == "importance_sampling":
        return -(ratio * a).sum()
    if loss == "dro":
        return -(lp * a - 0.5 * config["beta"] * (lp - q) ** 2).sum()
    low = given.get("clip_low_threshold", torch.tensor(config["clip_low_threshold"]))
    high = given.get("clip_high_threshold", torch.tensor(config["clip_high_threshold"]))
    if loss == "gspo":
        mask = given["sequence_ratio_mask"] != 0
        mean = (lp.detach() - q)[mask].mean() if mask.any() else torch.tensor(0.0)
        ratio = torch.exp(mean + lp - lp.detach())
    clamped = torch.minimum(torch.maximum(ratio, low), high)
    if loss == "cispo":
        return -(clamped.detach() * lp * a).sum()
    return -torch.minimum(ratio * a, clamped * a).sum()
