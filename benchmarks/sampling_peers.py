"""What `sampling.py` compares with, and how it draws the comparison."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig


def generate(model: Any, prompts: np.ndarray, sequences: int, tokens: int) -> None:
    """`prompts` [P, N], of one length."""
    ids = torch.from_numpy(prompts).long()
    with torch.no_grad():
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=sequences,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )


def continuous(model: Any, inputs: list[list[int]], tokens: int) -> None:
    """The cache has room for all inputs; left to itself it takes most of the machine's memory,
    and on a CPU minutes to fill it."""
    inner = model.get_base_model()
    before = inner.config._attn_implementation
    length = max(len(one) for one in inputs) + tokens
    blocks = len(inputs) * (length // 32 + 2)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=512)
    generation = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1
    )
    answers = inner.generate_batch(
        inputs=inputs,
        generation_config=generation,
        continuous_batching_config=batching,
        progress_bar=False,
        warmup=False,
    )
    inner.set_attn_implementation(before)
    made = [len(answer.generated_tokens) for answer in answers.values()]
    assert made == [tokens] * len(inputs), made


class Vllm:
    """`sampling_vllm.py` in the Python of vLLM's own environment; starting takes about a minute.
    `seconds` is the CPU time of all its runs."""

    def __init__(self, python: Path, model: Path, adapters: list[Path]) -> None:
        script = Path(__file__).with_name("sampling_vllm.py")
        command = [python, script, "--serve", model, *adapters]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seconds = 0.0
        self._answer()

    def run(self, **work: str | int) -> None:
        """`work` are the arguments of `sampling_vllm.Peer.run`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        self.seconds += self._answer()["cpu_seconds"]

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended: its reason is above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._process.communicate()  # it ends with its input


def draw(table: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    names = list(table[0]["rates"])
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = np.arange(len(table)) + (number - len(names) / 2 + 0.5) * width
        axes.bar(places, [entry["rates"][name] for entry in table], width, label=name)
    axes.set_xticks(
        range(len(table)), [f"{e['jobs']} jobs\n{e['shape']}" for e in table], fontsize=8
    )
    axes.set_ylabel("sampled tokens per CPU-second")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
