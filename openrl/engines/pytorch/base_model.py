"""A frozen transformers model that runs packed batches of many adapters.

The modules of transformers stay as they are but for three things: every linear that can be
adapted is wrapped by `AdaptedLinear`, activation functions are replaced by steady ones, and
attention goes to the batch's `Attend` through transformers' attention interface. Whether that is
exact for a family is not believed but tested: loading compares packed log-probabilities with the
untouched model's and refuses the family otherwise.

    base = loading.load_base_model(directory, device, dtype)
    hidden_TD = base.hidden(batch)              # after the final norm
    logits_TV = base.logits(hidden_TD, segments)  # fp32, with the head's adapters

`hidden` builds a graph when torch's gradients are on; its backward fills the segments' gradient
buffers. Base weights never get gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from openrl.engines.pytorch.activations import ACTIVATIONS, activation_name
from openrl.engines.pytorch.attention import Attend
from openrl.engines.pytorch.lora import Group, LinearSpec
from openrl.engines.pytorch.packing import Batch
from openrl.engines.pytorch.segments import (
    Cut,
    Segment,
    SharedInput,
    StackedAdapters,
    adapted_linears,
)
from openrl.engines.pytorch.wire import AdaptedLinear, Wire
from openrl.errors import UserError

TARGETS: dict[str, Group] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
_SHARES_INPUT = {"k_proj", "v_proj", "up_proj"}
"""Linears that take the same input as the linear before them."""
_HEAD_NAME = "model.unembed_tokens"
_SAFELY_IGNORED = {"position_ids", "use_cache"}
"""What transformers passes on to attention that changes nothing there."""
PACKED = "openrl_packed"
"""The name of our attention in transformers' interface."""
_CACHED_BYTES = 4 << 20
_FEWEST_FUSED = 256


class BaseModel:
    """One set of base weights, ready for packed batches.

    `linears` lists what can be adapted, the head last; their order is that of every `Factors`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes over `model` (a transformers causal LM): freezes it and wraps its linears."""
        model.eval().requires_grad_(False)
        self._model = cast(Any, model)
        self.decoder: nn.Module = self._model.model
        self.config = self._model.config
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self._wire = Wire(self.device)
        self._head = _head_of(self._model)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.linears = (*_wrap_linears(self.decoder, self._wire), self._head_spec())
        self.head = SharedInput(
            self.head_index, (self.head_weight_VD,), (cast("Tensor | None", self._head.bias),)
        )
        _route_layers(self.decoder, self._wire)
        _steady_activations(self.decoder, ACTIVATIONS[activation_name(self.config)]())
        self._model.set_attn_implementation(PACKED)
        self.row_bytes = 0
        """What one row of a training batch keeps for the backward pass; measured at load."""

    def _head_spec(self) -> LinearSpec:
        index = _count_targets(self.decoder)
        out_features, in_features = self._head.weight.shape
        return LinearSpec(index, _HEAD_NAME, "unembed", in_features, out_features, index)

    @property
    def vocab_size(self) -> int:
        return self.linears[-1].out_features

    @property
    def hidden_size(self) -> int:
        return self.linears[-1].in_features

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        stated = getattr(self.config, "head_dim", None)
        return int(stated or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def head_weight_VD(self) -> Tensor:
        return self._head.weight

    @property
    def fused_rows(self) -> int | None:
        """How many rows it pays to run together; None: as many as there are.

        On a CPU the products are at their full speed from some hundred rows on, and what is left
        to gain from company is less than what is lost when a layer's widest activation falls out
        of the cache: measured, the two cross at about 4 MiB.
        """
        if self.device.type != "cpu":
            return None
        widest = max(linear.out_features for linear in self.linears[:-1])
        return max(_FEWEST_FUSED, _CACHED_BYTES // (4 * widest))

    @property
    def head_index(self) -> int:
        return self.linears[-1].index

    def hidden(self, batch: Batch, recompute: bool = False) -> Tensor:
        """Hidden states [T, D] after the final norm, in the base model's dtype. `recompute`
        trades a second forward pass for the memory of what the backward pass needs."""
        if isinstance(batch.segments, StackedAdapters):
            connected = self._wire.connect(batch.segments)
        else:
            cut = Cut(batch.segments, batch.token_ids_T.shape[0])
            connected = self._wire.connect(cut, recompute)
        with connected:
            out = self.decoder(
                input_ids=batch.token_ids_T[None],
                position_ids=batch.position_ids_T[None],
                use_cache=False,
                attend=batch.attend,
            )
        return cast(Tensor, out.last_hidden_state[0])

    def logits(self, hidden_TD: Tensor, segments: Sequence[Segment] | StackedAdapters) -> Tensor:
        """fp32 [T, V], soft-capped where the family does so. `segments` count the rows of
        `hidden_TD`, which are at least `MIN_ROWS` when rows must not depend on their company."""
        if isinstance(segments, StackedAdapters):
            logits_TV = F.linear(hidden_TD, self.head_weight_VD, self.head.biases[0])
            segments.add_to(logits_TV, hidden_TD, self.head_index)
        else:
            cut = Cut(segments, hidden_TD.shape[0])
            (logits_TV,) = adapted_linears(hidden_TD, self.head, cut, self._wire.anchor)
        return self.cap(logits_TV.float())

    def cap(self, logits_TV: Tensor) -> Tensor:
        """Final soft-capping; may reuse its argument's memory."""
        if self.softcap is None:
            return logits_TV
        return torch.tanh(logits_TV.div_(self.softcap)).mul_(self.softcap)

    def collect(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """The head is frozen."""


def is_target(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name.rsplit(".")[-1] in TARGETS


def _count_targets(decoder: nn.Module) -> int:
    return sum(isinstance(module, AdaptedLinear) for module in decoder.modules())


def _wrap_linears(decoder: nn.Module, wire: Wire) -> list[LinearSpec]:
    targets = [(n, m) for n, m in decoder.named_modules() if is_target(n, m)]
    specs: list[LinearSpec] = []
    wrapped = []
    for index, (name, module) in enumerate(targets):
        linear = cast(nn.Linear, module)
        parent, leaf = name.rsplit(".", 1)
        wrapped.append(AdaptedLinear(linear, index, wire))
        decoder.get_submodule(parent)._modules[leaf] = wrapped[-1]
        first = specs[-1].first if leaf in _SHARES_INPUT else index
        specs.append(
            LinearSpec(
                index,
                f"model.{name}",
                TARGETS[leaf],
                linear.in_features,
                linear.out_features,
                first,
            )
        )
    for first, members in groupby(specs, key=lambda spec: spec.first):
        group = [wrapped[spec.index] for spec in members]
        shared = SharedInput(first, tuple(m.weight for m in group), tuple(m.bias for m in group))
        for member in group:
            member.shared = shared
    return specs


def _route_layers(decoder: nn.Module, wire: Wire) -> None:
    for layer in cast("nn.ModuleList", decoder.layers):
        layer.forward = partial(wire.run, layer.forward)


def _steady_activations(decoder: nn.Module, activation: nn.Module) -> None:
    for module in decoder.modules():
        if "act_fn" in module._modules:
            module._modules["act_fn"] = activation


def _head_of(model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"model type {model.config.model_type} is not served: its head is no linear"
        )
    return head


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attend: Attend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D] to output [1, T, H, D]. Raises
    `UserError` for what it would have to ignore, such as a family's attention sinks."""
    assert attend is not None
    unknown = [n for n, v in others.items() if v is not None and n not in _SAFELY_IGNORED]
    if unknown:
        raise UserError(f"this model is not served: its attention takes {', '.join(unknown)}")
    out_THD = attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out_THD[None], None


AttentionInterface.register(PACKED, _packed_attention)
