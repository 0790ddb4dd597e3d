"""Models that train all parameters: weights of their own in the place of an adapter.

Such a model starts as a copy of the base. Its weights lie in one flat fp32 buffer like an
adapter's factors do, so optimizer, gradients, snapshots and pages are those of every other job.
What differs is how rows run: through plain transformers modules, by torch's own autograd, each
atom alone, since rows of different weights cannot share a product.

The modules are a skeleton on the meta device: they have shapes and code, and no memory. Each pass
lends them the tensors of one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from openrl.engines.pytorch.base_model import PACKED, BaseModel
from openrl.engines.pytorch.lora import ALIGN, Adapter, Factors, Layout
from openrl.engines.pytorch.packing import Batch
from openrl.engines.pytorch.segments import SharedInput
from openrl.errors import UserError
from openrl.types import LoraConfig

_DECODER = "model."
_HEAD = "lm_head."


@dataclass(frozen=True, slots=True, eq=False)
class Parameters(Factors):
    """`tensors` are the model's parameters by their names in a checkpoint of transformers, tied
    ones once: views into the flat buffer."""

    tensors: dict[str, Tensor]


class FullLayout(Layout):
    """Where each parameter lies in a flat buffer. Gaps stay zero."""

    def __init__(self, base: BaseModel, config: LoraConfig) -> None:
        super().__init__((), config)
        self.head_weight, self.head_bias = f"{_HEAD}weight", f"{_HEAD}bias"
        self._shapes: dict[str, torch.Size] = {}
        self._starts: dict[str, int] = {}
        for name, value in base.decoder.named_parameters(prefix=_DECODER.rstrip(".")):
            if value is base.head_weight_VD:
                self.head_weight = name
            self._place_parameter(name, value)
        if self.head_weight not in self._shapes:
            self._place_parameter(self.head_weight, base.head_weight_VD)
        (bias,) = base.head.biases
        if bias is not None:
            self._place_parameter(self.head_bias, bias)

    def _place_parameter(self, name: str, value: Tensor) -> None:
        self._starts[name], self._shapes[name] = self.size, value.shape
        self.size += math.ceil(value.numel() / ALIGN) * ALIGN

    def view(self, flat: Tensor) -> Parameters:
        tensors = {
            name: flat[start : start + self._shapes[name].numel()].view(self._shapes[name])
            for name, start in self._starts.items()
        }
        return Parameters(flat, (), (), tensors)

    def weights(self, flat: Tensor, dtype: torch.dtype) -> FullWeights:
        return FullWeights(self, self.view(flat), dtype)


class FullWeights(Adapter):
    """All parameters of one model, fp32 masters; in the place of an adapter."""

    layout: FullLayout
    weights: Parameters

    def __init__(self, layout: FullLayout, weights: Parameters, dtype: torch.dtype) -> None:
        """Raises `UserError` for a base model that isn't fp32: nobody has run any other."""
        if dtype != torch.float32:
            raise UserError(
                "full-parameter training runs in fp32 only: set engine.dtype to float32"
            )
        self.layout, self.config, self.scale = layout, layout.config, 0.0
        self.weights = self.compute = weights


def layout_of(base: BaseModel, config: LoraConfig) -> Layout:
    """Of an adapter of the base model, or of all its parameters."""
    return FullLayout(base, config) if config.full else Layout(base.linears, config)


def copy_of_base(base: BaseModel, config: LoraConfig) -> FullWeights:
    """Fresh weights for a full model, equal to the base's."""
    layout = FullLayout(base, config)
    weights = layout.weights(torch.zeros(layout.size, device=base.device), base.dtype)
    own: dict[str, Tensor] = dict(base.decoder.named_parameters(prefix=_DECODER.rstrip(".")))
    own |= {layout.head_weight: base.head_weight_VD}
    (bias,) = base.head.biases
    if bias is not None:
        own[layout.head_bias] = bias
    for name, into in weights.weights.tensors.items():
        into.copy_(own[name].detach())
    return weights


class Skeleton:
    """A base model's modules without its weights; made when they are first needed."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base

    @cached_property
    def _decoder(self) -> nn.Module:
        with torch.device("meta"):
            model = cast(Any, AutoModelForCausalLM.from_config(self._base.config))
        model.eval().set_attn_implementation(PACKED)
        return cast(nn.Module, model.model)

    def hidden(self, batch: Batch, weights: dict[str, Tensor]) -> Tensor:
        """As `BaseModel.hidden`, with `weights` by name."""
        own = {n.removeprefix(_DECODER): t for n, t in weights.items() if n.startswith(_DECODER)}
        out = functional_call(
            self._decoder,
            {**dict(self._base.decoder.named_buffers()), **own},
            kwargs={
                "input_ids": batch.token_ids_T[None],
                "position_ids": batch.position_ids_T[None],
                "use_cache": False,
                "attend": batch.attend,
            },
        )
        return cast(Tensor, out.last_hidden_state[0])


class FullHead:
    """The head of one full model, as `openrl.engines.pytorch.logprobs` wants it. `into` receives
    the gradient of its weights; None when nobody wants it."""

    def __init__(self, base: BaseModel, full: FullWeights, into: Parameters | None) -> None:
        layout, own = full.layout, full.weights.tensors
        self.vocab_size, self.softcap, self.cap = base.vocab_size, base.softcap, base.cap
        self.head_index = base.head_index
        biases = (own.get(layout.head_bias),)
        self.head = SharedInput(base.head_index, (own[layout.head_weight],), biases)
        self._weight = None if into is None else into.tensors[layout.head_weight]
        self._bias = None if into is None else into.tensors.get(layout.head_bias)

    def collect(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Adds what one chunk of rows brings to the gradient of the head."""
        if self._weight is not None:
            self._weight.addmm_(grad_CV.T, hidden_CD)
        if self._bias is not None:
            self._bias.add_(grad_CV.sum(0))


@contextmanager
def collected(weights: Parameters, into: Parameters | None) -> Iterator[dict[str, Tensor]]:
    """The parameters as leaves of a graph. Each gradient is added to `into` and let go as soon as
    it is complete, so that the backward pass holds no second copy of them all."""
    if into is None:
        yield weights.tensors
        return
    leaves = {name: value.detach().requires_grad_() for name, value in weights.tensors.items()}
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(_mover(into.tensors[name]))
    yield leaves


def _mover(into: Tensor) -> Any:
    def move(leaf: Tensor) -> None:
        assert leaf.grad is not None
        into.add_(leaf.grad)
        leaf.grad = None

    return move
