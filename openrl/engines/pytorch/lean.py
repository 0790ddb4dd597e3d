"""A decoder's layers run straight from their weights, for batches without gradients.

A decode step of a small model is mostly the overhead of modules: norms of seven operations,
rotary embeddings of ten, three products where one does. Here a layer is about twenty operations.
It fits decoders made of RMS norms, one rotary embedding per layer type, and gated MLPs, with or
without norms of queries and keys and norms after attention and MLP: the Llama, Qwen and Gemma
families. Whether it computes what the modules compute is tested when a model is loaded; where it
does not, or where a part has an unknown form, the modules go on doing it.

The weights of linears with one input become views of one matrix, so nothing is held twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.packing import Batch, lay_out, training_batch
from openrl.engines.pytorch.parity import short_windows, test_sequences
from openrl.engines.pytorch.segments import StackedAdapters

log = logging.getLogger("openrl")

_VECTOR = 32  # see `activations`
_TOLERANCE = {torch.float32: 5e-5, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Of a row's difference, as a part of the row's length. An absolute limit would not do: trained
models have residual streams of some thousands in a few channels, whose rounding alone moves
single elements by more than 1e-4 (4e-6 of the row); another epsilon, rotation or scale moves a
row by 1e-3 and more."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """Linears with one input as one product; `first` is the index of the first of them."""

    first: int
    weight_ND: Tensor
    bias_N: Tensor | None

    def __call__(self, x_TD: Tensor, adapters: StackedAdapters | None) -> Tensor:
        y_TN = F.linear(x_TD, self.weight_ND, self.bias_N)
        if adapters is not None:
            adapters.add_joined(y_TN, x_TD, self.first)
        return y_TN


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """`qk_norm` has one weight row per head of queries, then of keys: [H + K, head_dim]."""

    index: int
    heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    rope: str | None
    norm_attn: _Norm
    qkv: _Linear
    qk_norm: _Norm | None
    out: _Linear
    norm_attn_after: _Norm | None
    norm_mlp: _Norm
    gate_up: _Linear
    down: _Linear
    norm_mlp_after: _Norm | None


class LeanDecoder:
    """Made by `of`. `hidden` is `BaseModel.hidden` for batches with stacked adapters or none."""

    def __init__(self, base: BaseModel) -> None:
        decoder = cast(Any, base.decoder)
        self._embed: nn.Module = decoder.embed_tokens
        self._rotary: nn.Module = decoder.rotary_emb
        self._layers = [_layer(i, layer, base) for i, layer in enumerate(decoder.layers)]
        self._norm = _norm(decoder.norm)
        self._activation: nn.Module = decoder.layers[0].mlp.act_fn
        self._rope_types = {layer.rope for layer in self._layers}

    @staticmethod
    def of(base: BaseModel) -> LeanDecoder | None:
        """None for a decoder of another form, or whose numbers come out differently."""
        try:
            with short_windows(base.decoder):
                gap = LeanDecoder(base).gap(base)
            lean = LeanDecoder(base)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            log.info("decoding goes through transformers' modules: %s", error)
            return None
        if not gap <= _TOLERANCE[base.dtype]:
            log.info("decoding goes through transformers' modules: rows differ by %.2g", gap)
            return None
        return lean

    def gap(self, base: BaseModel) -> float:
        """The largest relative difference of a row from the modules', |lean - modules| / |modules|
        over the hidden states of a few short sequences; NaN when either has one."""
        rows = lay_out(test_sequences(base.vocab_size), base.device)
        with torch.no_grad():
            batch = training_batch(rows, ())
            theirs_TD = base.hidden(batch).float()
            apart_T = (self.hidden(batch).float() - theirs_TD).norm(dim=1)
            length_T = theirs_TD.norm(dim=1).clamp_min(_TINY)  # a padding token's row may be zero
            return float((apart_T / length_T).max())

    def hidden(self, batch: Batch) -> Tensor:
        """[T, D] after the final norm."""
        adapters = batch.segments if isinstance(batch.segments, StackedAdapters) else None
        x_TD: Tensor = self._embed(batch.token_ids_T[None])[0]
        ropes = {kind: self._rope(x_TD, batch, kind) for kind in self._rope_types}
        for layer in self._layers:
            x_TD = x_TD + self._attention(layer, x_TD, ropes[layer.rope], batch, adapters)
            x_TD = x_TD + self._mlp(layer, x_TD, adapters)
        return self._norm(x_TD)

    def _rope(self, x_TD: Tensor, batch: Batch, kind: str | None) -> tuple[Tensor, Tensor, Tensor]:
        """cos [T, 1, head_dim], and -sin and sin [T, 1, head_dim / 2] for the two halves."""
        more = () if kind is None else (kind,)
        cos, sin = self._rotary(x_TD[None], batch.position_ids_T[None], *more)
        half = sin.shape[-1] // 2
        sin_T1E = sin[0, :, None, :half].contiguous()
        return cos[0, :, None], -sin_T1E, sin_T1E

    def _attention(
        self,
        layer: _Layer,
        x_TD: Tensor,
        rope: tuple[Tensor, Tensor, Tensor],
        batch: Batch,
        adapters: StackedAdapters | None,
    ) -> Tensor:
        qkv_TN = layer.qkv(layer.norm_attn(x_TD), adapters)
        qkv_TAD = qkv_TN.view(x_TD.shape[0], -1, layer.head_dim)
        kv_heads = (qkv_TAD.shape[1] - layer.heads) // 2
        rotated = layer.heads + kv_heads
        qk_TAD = qkv_TAD[:, :rotated]
        if layer.qk_norm is not None:
            plain = F.rms_norm(qk_TAD, (layer.head_dim,), None, layer.qk_norm.eps)
            qk_TAD = plain * layer.qk_norm.weight
        qk_TAD = _rotate(qk_TAD, *rope)
        out_THD = batch.attend(
            layer.index,
            qk_TAD[:, : layer.heads],
            qk_TAD[:, layer.heads :],
            qkv_TAD[:, rotated:],
            scaling=layer.scaling,
            sliding_window=layer.window,
            softcap=layer.softcap,
        )
        y_TD = layer.out(out_THD.reshape(x_TD.shape[0], -1), adapters)
        return y_TD if layer.norm_attn_after is None else layer.norm_attn_after(y_TD)

    def _mlp(self, layer: _Layer, x_TD: Tensor, adapters: StackedAdapters | None) -> Tensor:
        gate_TI, up_TI = layer.gate_up(layer.norm_mlp(x_TD), adapters).chunk(2, -1)
        y_TD = layer.down(self._activate(gate_TI).mul_(up_TI), adapters)
        return y_TD if layer.norm_mlp_after is None else layer.norm_mlp_after(y_TD)

    def _activate(self, gate_TI: Tensor) -> Tensor:
        """Rows of a view are worked on one by one, and so are independent where the fused kernel
        has nothing left over."""
        steady = gate_TI.shape[1] % _VECTOR or torch.get_num_threads() > 1
        if steady and gate_TI.device.type == "cpu":
            return cast(Tensor, self._activation(gate_TI.contiguous()))
        return cast(Tensor, cast(Any, self._activation)._fused(gate_TI))


def _rotate(x_TAD: Tensor, cos: Tensor, minus_sin: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, where rotate_half([a, b]) is [-b, a]."""
    a, b = x_TAD.chunk(2, -1)
    out = x_TAD * cos
    out_a, out_b = out.chunk(2, -1)
    out_a.addcmul_(b, minus_sin)
    out_b.addcmul_(a, sin)
    return out


# --- reading a layer's modules --------------------------------------------------------------


def _layer(index: int, layer: Any, base: BaseModel) -> _Layer:
    """Raises `AttributeError` for a layer of another form."""
    attn, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    if sandwich:
        norm_mlp, after_attn = layer.pre_feedforward_layernorm, layer.post_attention_layernorm
        after_mlp = layer.post_feedforward_layernorm
    else:
        norm_mlp, after_attn, after_mlp = layer.post_attention_layernorm, None, None
    heads = attn.q_proj.weight.shape[0] // attn.head_dim
    kv_heads = attn.k_proj.weight.shape[0] // attn.head_dim
    return _Layer(
        index=index,
        heads=heads,
        head_dim=attn.head_dim,
        scaling=attn.scaling,
        window=getattr(attn, "sliding_window", None),
        softcap=getattr(attn, "attn_logit_softcapping", None),
        rope=_rope_type(layer, base),
        norm_attn=_norm(layer.input_layernorm),
        qkv=_joined([attn.q_proj, attn.k_proj, attn.v_proj]),
        qk_norm=_qk_norm(attn, heads, kv_heads) if hasattr(attn, "q_norm") else None,
        out=_joined([attn.o_proj]),
        norm_attn_after=None if after_attn is None else _norm(after_attn),
        norm_mlp=_norm(norm_mlp),
        gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
        down=_joined([mlp.down_proj]),
        norm_mlp_after=None if after_mlp is None else _norm(after_mlp),
    )


def _rope_type(layer: Any, base: BaseModel) -> str | None:
    """The rotary module's further argument, where it has one for each layer type."""
    parameters = getattr(base.config, "rope_parameters", None) or {}
    nested = any(isinstance(value, dict) for value in parameters.values())
    return cast(str, layer.self_attn.layer_type) if nested else None


def _norm(module: Any) -> _Norm:
    """Gemma's norms keep their weight less 1."""
    weight = module.weight.data
    if type(module).__name__.startswith("Gemma"):
        weight = weight + 1
    eps = getattr(module, "variance_epsilon", None)
    return _Norm(weight, float(module.eps if eps is None else eps))


def _qk_norm(attn: Any, heads: int, kv_heads: int) -> _Norm:
    q, k = _norm(attn.q_norm), _norm(attn.k_norm)
    if q.eps != k.eps:
        raise ValueError("queries and keys are normed differently")
    weight = torch.cat([q.weight.expand(heads, -1), k.weight.expand(kv_heads, -1)])
    return _Norm(weight, q.eps)


def _joined(linears: Sequence[Any]) -> _Linear:
    """Makes the weights views of one matrix. Each stays 64-byte aligned, as fresh ones are, since
    matrices have rows of a multiple of 16 elements wherever it matters."""
    first = linears[0].shared.first
    if len(linears) == 1:
        return _Linear(first, linears[0].weight.data, _data(linears[0].bias))
    weight = torch.cat([linear.weight.data for linear in linears])
    start = 0
    for linear in linears:
        rows = linear.weight.shape[0]
        linear.weight.data = weight[start : start + rows]
        start += rows
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases):
        if any(bias is not None for bias in biases):
            raise ValueError("some linears of one input have a bias and some have none")
        return _Linear(first, weight, None)
    return _Linear(first, weight, torch.cat([bias.data for bias in biases]))


def _data(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.data


def forward_of(base: BaseModel) -> Callable[[Batch], Tensor]:
    """The faster of the two ways to `BaseModel.hidden` that gives the same numbers."""
    lean = LeanDecoder.of(base)
    return base.hidden if lean is None else lean.hidden
