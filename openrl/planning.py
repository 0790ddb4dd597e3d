"""What a model needs of an accelerator, and what to expect of it, before anything is bought. Pure.

Speeds are rooflines: the best that the arithmetic (for training) and the memory's bandwidth (for
decoding) allow, times the share of that which such programs reach. They rank choices and catch
mistakes of ten; they are not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.errors import UserError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`flops`: dense bf16 per second; `bandwidth`: bytes per second. From the vendors' data
    sheets, without sparsity."""

    name: str
    memory: int
    flops: float
    bandwidth: float


ACCELERATORS = {
    a.name: a
    for a in (
        Accelerator("B200", 180 * GIB, 2250e12, 8.0e12),
        Accelerator("H200", 141 * 10**9, 989e12, 4.8e12),
        Accelerator("H100", 80 * GIB, 989e12, 3.35e12),
        Accelerator("H100-PCIe", 80 * GIB, 756e12, 2.0e12),
        Accelerator("A100-80", 80 * GIB, 312e12, 2.0e12),
        Accelerator("A100-40", 40 * GIB, 312e12, 1.55e12),
        Accelerator("L40S", 48 * GIB, 362e12, 0.864e12),
        Accelerator("L4", 24 * GIB, 121e12, 0.3e12),
        Accelerator("RTX4090", 24 * GIB, 165e12, 1.008e12),
    )
}

TRAINING_SHARE = 0.4
"""Of the peak arithmetic: what well-tuned training of dense models reaches."""
DECODING_SHARE = 0.6
"""Of the peak bandwidth."""

BASE = 2  # bytes of a frozen weight, bf16
KV = 2  # bytes of a key's or value's element
TRAINED = 22
"""Bytes of an adapter's parameter: fp32 weight, two moments, gradient and scratch, and a bf16
copy to compute with."""
PINNED = 6  # bytes of a parameter of a sampler's version: fp32, and bf16 to compute with
ACTIVATIONS = 34
"""Bytes per hidden element, layer and token that the backward pass keeps, in bf16; the count of
Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), without
the attention matrix, which is never kept."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as its config.json describes it. `experts` 0 is a dense model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Raises `UserError` that names what the configuration lacks."""
        text = config.get("text_config", config)
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        width = text.get("moe_intermediate_size") if experts else None
        try:
            heads = int(text["num_attention_heads"])
            return cls(
                layers=int(text["num_hidden_layers"]),
                hidden=int(text["hidden_size"]),
                intermediate=int(width or text["intermediate_size"]),
                heads=heads,
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
                vocab=int(text["vocab_size"]),
                tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
                experts=experts,
                experts_per_token=int(text.get("num_experts_per_tok") or 0),
            )
        except KeyError as error:
            raise UserError(
                f"config.json has no {error.args[0]}: is it a causal model's?"
            ) from error

    def _attention(self) -> list[tuple[int, int]]:
        """Inputs and outputs of q, k, v and o."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(self.hidden, query), *[(self.hidden, key)] * 2, (query, self.hidden)]

    def _mlp(self) -> list[tuple[int, int]]:
        wide = (self.hidden, self.intermediate)
        return [wide, wide, (self.intermediate, self.hidden)]

    def _count(self, experts: int) -> int:
        attention = sum(i * o for i, o in self._attention())
        mlp = sum(i * o for i, o in self._mlp())
        layer = attention + mlp * max(1, experts) + self.hidden * self.experts
        return self.layers * layer

    @property
    def parameters(self) -> int:
        """Without norms and biases, which are far less than a hundredth."""
        return self._count(self.experts) + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """That one token's products read: its experts', and the head."""
        return self._count(self.experts_per_token) + self.vocab * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of a LoRA on attention, MLP and head."""
        sides = sum(i + o for i, o in (*self._attention(), *self._mlp() * max(1, self.experts)))
        return rank * (self.layers * sides + self.hidden + self.vocab)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * KV


@dataclass(frozen=True, slots=True)
class Wish:
    """`context` tokens of a sequence, prompt and answer; `rows` sequences sampled at once;
    `pass_tokens` trained at once."""

    jobs: int = 1
    rank: int = 32
    context: int = 8192
    rows: int = 64
    pass_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`parts` are what all is in memory at once; `jobs_at_once` train on the device together,
    more than that take turns with the host's memory. Rates are tokens per second."""

    parts: tuple[Part, ...]
    memory: int
    jobs_at_once: int
    rows_at_once: int
    train_rate: float
    decode_rate: float
    prefill_rate: float

    @property
    def total(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.total <= self.memory


def plan(shape: Shape, accelerator: Accelerator, wish: Wish) -> Plan:
    adapter = shape.adapter_parameters(wish.rank)
    row = shape.kv_bytes_per_token * wish.context
    job = adapter * (TRAINED + 2 * PINNED)
    parts = (
        Part("base weights", shape.parameters * BASE, f"{shape.parameters / 1e9:.2f} B in bf16"),
        Part(
            "adapters",
            wish.jobs * adapter * TRAINED,
            f"{wish.jobs} of rank {wish.rank}, {adapter / 1e6:.1f} M parameters each, with "
            "optimizer and gradients",
        ),
        Part("sampler versions", wish.jobs * 2 * adapter * PINNED, "two for each job"),
        Part("keys and values", wish.rows * row, f"{wish.rows} sequences of {wish.context}"),
        Part("activations", _activations(shape, wish), f"a pass of {wish.pass_tokens} tokens"),
    )
    memory = int(accelerator.memory * 0.92)  # what drivers, kernels and fragments leave
    fixed = parts[0].size + parts[3].size + parts[4].size
    beside = parts[0].size + parts[1].size + parts[2].size + parts[4].size
    return Plan(
        parts=parts,
        memory=memory,
        jobs_at_once=max(0, (memory - fixed) // job),
        rows_at_once=max(0, (memory - beside) // row),
        train_rate=accelerator.flops * TRAINING_SHARE / _train_flops(shape, wish),
        decode_rate=_decode_rate(shape, accelerator, wish),
        prefill_rate=accelerator.flops * TRAINING_SHARE / (2 * shape.active_parameters),
    )


def _activations(shape: Shape, wish: Wish) -> int:
    """With the logits of a chunk of 1,024 rows in fp32, thrice."""
    kept = ACTIVATIONS * shape.hidden * shape.layers * wish.pass_tokens
    return kept + 3 * 4 * 1024 * shape.vocab


def _train_flops(shape: Shape, wish: Wish) -> float:
    """Of one token: 2P forward, 2P for the gradients of activations; a frozen base has none of its
    own. The adapter has all three products. Attention sees half the context, forward and twice
    back."""
    attention = 3 * 2 * 2 * shape.layers * shape.heads * shape.head_dim * wish.context / 2
    return 4 * shape.active_parameters + 6 * shape.adapter_parameters(wish.rank) + attention


def _decode_rate(shape: Shape, accelerator: Accelerator, wish: Wish) -> float:
    """A step reads the weights once (of a mixture, those of all experts that some row picks), each
    row's keys and values, half grown, and each job's adapter."""
    picked = min(shape.experts, wish.rows * shape.experts_per_token) if shape.experts else 0
    weights = (shape._count(picked) + shape.vocab * shape.hidden) * BASE
    rows = wish.rows * shape.kv_bytes_per_token * wish.context / 2
    adapters = wish.jobs * shape.adapter_parameters(wish.rank) * 2
    by_bandwidth = (weights + rows + adapters) / (accelerator.bandwidth * DECODING_SHARE)
    by_arithmetic = wish.rows * 2 * shape.active_parameters / (accelerator.flops * TRAINING_SHARE)
    return wish.rows / max(by_bandwidth, by_arithmetic)
