"""How a batch reaches the inside of transformers' modules, which pass no keywords that far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from openrl.engines.pytorch.segments import Cut, SharedInput, StackedAdapters, adapted_linears


class Wire:
    """How a batch's segments reach the linears, since transformers' MLPs pass no keywords on.

    Set for the length of one forward pass of one base model, on the engine's only thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.stacked: StackedAdapters | None = None
        self.recompute = False
        self._cut = Cut((), 0)
        self.anchor = torch.zeros(1, device=device, requires_grad=True)
        self._input: Tensor | None = None
        self._ready: dict[int, Tensor] = {}  # by linear index, results that wait for their linear

    @contextmanager
    def connect(self, segments: Cut | StackedAdapters, recompute: bool = False) -> Iterator[None]:
        if isinstance(segments, StackedAdapters):
            self.stacked = segments
        else:
            self._cut = segments
        self.recompute = recompute
        try:
            yield
        finally:
            self.stacked, self._cut, self.recompute = None, Cut((), 0), False
            self._input, self._ready = None, {}

    def run(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One decoder layer. With `recompute` nothing of it is kept but its input: the backward
        pass runs it again, on the same kernels and so to the same bits."""
        if not (self.recompute and torch.is_grad_enabled()):
            return layer(*args, **kwargs)
        cut = self._cut

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self.connect(cut)

        return checkpoint(
            layer,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **kwargs,
        )

    def product(self, linears: SharedInput, index: int, x: Tensor) -> Tensor:
        """Of one of the linears; the first to be called with an input computes for all."""
        if self._input is not x or index not in self._ready:
            ys = adapted_linears(x.flatten(0, -2), linears, self._cut, self.anchor)
            self._input, self._ready = x, dict(enumerate(ys, linears.first))
        return self._ready.pop(index)


class AdaptedLinear(nn.Module):
    """A frozen linear with the segments' low-rank products; takes [..., T, D] with leading 1s."""

    def __init__(self, linear: nn.Linear, index: int, wire: Wire) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.shared: SharedInput
        self._index, self._wire = index, wire

    def forward(self, x: Tensor) -> Tensor:
        stacked = self._wire.stacked
        if stacked is not None:
            x_TD = x.flatten(0, -2)
            y_TN = F.linear(x_TD, self.weight, self.bias)
            stacked.add_to(y_TN, x_TD, self._index)
        else:
            y_TN = self._wire.product(self.shared, self._index, x)
        return y_TN.view(*x.shape[:-1], y_TN.shape[-1])
