"""The ways to train several LoRA jobs that `benchmarks/training.py` compares.

Each contender holds the same random adapters and the same data, and `run()` makes one forward
and backward pass of every job: the gradient of the summed cross-entropy. Optimizer steps are
left out; they cost the same everywhere. The head is adapted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from openrl.engines.base import AtomPiece, CreateAdapter, TrainPass, WeightsKey
from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.trainer import Trainer
from openrl.scheduler.core.packing import cut_atoms
from openrl.types import Datum, ForwardBackwardOutput, LoraConfig, ModelId, RequestId

CPU = torch.device("cpu")
KEY = WeightsKey("benchmark")
ATOM_TOKENS = 1024
RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


@dataclass(frozen=True)
class Shape:
    """`sequences` for each job, of `shortest … longest` tokens."""

    sequences: int
    shortest: int
    longest: int

    def __str__(self) -> str:
        span = f"{self.shortest}-{self.longest}" if self.shortest < self.longest else self.longest
        return f"{self.sequences}x{span}"


def small_qwen3(directory: Path, hidden: int, vocab: int) -> Path:
    """4 layers: 1.0 million parameters at 128 and 2048, 4.2 million at 256 and 4096."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def job_data(job: int, shape: Shape, vocab: int) -> tuple[Datum, ...]:
    rng = np.random.default_rng([17, job])
    lengths = rng.integers(shape.shortest, shape.longest + 1, shape.sequences)
    return tuple(
        Datum(
            rng.integers(0, vocab, n).astype(np.int32),
            {"target_tokens": rng.integers(0, vocab, n), "weights": np.ones(n, np.float32)},
        )
        for n in lengths
    )


class Ours:
    def __init__(self, directory: Path, most_jobs: int) -> None:
        base = load_base_model(directory, CPU, torch.float32)
        self.vocab = base.vocab_size
        self._trainer = Trainer(base, "benchmark")
        for job in range(most_jobs):
            self._trainer.create(CreateAdapter(ModelId(str(job)), LoraConfig(rank=RANK, seed=job)))

    def fused(self, data: Sequence[tuple[Datum, ...]]) -> None:
        self._pass(
            [piece for job, datums in enumerate(data) for piece in self._pieces(job, datums)]
        )

    def in_turn(self, data: Sequence[tuple[Datum, ...]]) -> None:
        for job, datums in enumerate(data):
            self._pass(list(self._pieces(job, datums)))

    def _pieces(self, job: int, data: tuple[Datum, ...]) -> Iterator[AtomPiece]:
        """Cut as the scheduler cuts."""
        for start, stop in cut_atoms([len(datum.tokens) for datum in data], ATOM_TOKENS):
            yield AtomPiece(
                RequestId(f"{job}:1"),
                ModelId(str(job)),
                start,
                data[start:stop],
                "cross_entropy",
                {},
                forward_only=False,
                last=stop == len(data),
            )

    def _pass(self, pieces: Sequence[AtomPiece]) -> None:
        outcomes = self._trainer.train(TrainPass(KEY, tuple(pieces))).outcomes
        assert all(isinstance(outcome, ForwardBackwardOutput) for outcome in outcomes)
        for job in {piece.model_id for piece in pieces}:
            self._trainer.job(job).clear_gradient()


class Peft:
    """peft on transformers with its fastest attention; right padding needs no mask."""

    def __init__(self, directory: Path, most_jobs: int) -> None:
        plain = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
        config = PeftConfig(r=RANK, lora_alpha=32, target_modules=TARGETS)
        self.model: Any = get_peft_model(plain, config, adapter_name="0")
        for job in range(1, most_jobs):
            self.model.add_adapter(str(job), config)
        self.model.eval()

    def padded(self, data: Sequence[tuple[Datum, ...]], forget: bool = True) -> None:
        """One batch for each job, padded to its longest sequence."""
        for job, datums in enumerate(data):
            self.model.set_adapter(str(job))
            self._backward(datums)
            if forget:
                self._forget()

    def one_datum(self, data: Sequence[tuple[Datum, ...]]) -> None:
        for job, datums in enumerate(data):
            self.model.set_adapter(str(job))
            for datum in datums:
                self._backward((datum,))
            self._forget()

    def adapter_names(self, data: Sequence[tuple[Datum, ...]]) -> None:
        """One batch of all jobs; peft picks an adapter for each row."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        names = [str(job) for job, datums in enumerate(data) for _ in datums]
        self._backward([datum for datums in data for datum in datums], names)
        self._forget()

    def _backward(self, datums: Sequence[Datum], names: list[str] | None = None) -> None:
        longest = max(len(datum.tokens) for datum in datums)
        tokens = torch.zeros(len(datums), longest, dtype=torch.long)
        targets = torch.full((len(datums), longest), -100)
        for row, datum in enumerate(datums):
            tokens[row, : len(datum.tokens)] = torch.from_numpy(datum.tokens).long()
            given = torch.from_numpy(datum.loss_inputs["target_tokens"])
            targets[row, : len(datum.tokens)] = given
        keywords = {} if names is None else {"adapter_names": names}
        logits = self.model(input_ids=tokens, use_cache=False, **keywords).logits
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()

    def _forget(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


Contender = Callable[[Sequence[tuple[Datum, ...]]], None]


def contenders(directory: Path, most_jobs: int) -> tuple[dict[str, Contender], int]:
    """By name, and the size of the vocabulary."""
    ours, peft = Ours(directory, most_jobs), Peft(directory, most_jobs)
    return {
        "fused": ours.fused,
        "in turn": ours.in_turn,
        "peft padded": peft.padded,
        "peft one datum": peft.one_datum,
        "peft adapter_names": peft.adapter_names,
    }, ours.vocab
