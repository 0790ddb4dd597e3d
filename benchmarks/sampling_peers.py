"""What `sampling.py` compares with, and how it draws the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
