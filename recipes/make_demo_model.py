"""Makes the demo model that ships with the package, from nothing but this file.

    python -m recipes.make_demo_model --output openrl/demo/model

A tokenizer is trained on generated questions; a small Qwen3 learns to answer them; then it is
confused on purpose, by a few steps on wrong answers, so that it is seldom right at once and
often right once in eight: a start from which reinforcement learning has somewhere to go. The
same seed gives the same files on one machine with the same versions of torch and tokenizers
(one thread, deterministic kernels); across machines the last bits may differ.

Needs the `server` extra. Takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from recipes.kit.chat import prompt_tokens
from recipes.tasks.sql import Question, corrupt, questions, reward

VOCABULARY = 704
CONTEXT = 1024
END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Plan:
    """`corruption` is the share of wrong answers in the confusing steps."""

    seed: int = 0
    learning_steps: int = 200
    learning_rate: float = 3e-3
    confusing_steps: int = 40
    confusing_rate: float = 1e-3
    corruption: float = 0.85
    batch: int = 32


# --- the files of a model directory -----------------------------------------------------------


def make_tokenizer(directory: Path, seed: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE with ChatML's special tokens, written to `directory` and read back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(directory)


def _corpus(seed: int) -> Iterator[str]:
    for question in islice(questions(f"tokenizer {seed}"), 4000):
        yield "\n".join(("system", question.schema.description))
        yield "\n".join(("user", question.text))
        yield "\n".join(("assistant", question.sql))


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


# --- training ---------------------------------------------------------------------------------


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    *,
    steps: int,
    rate: float,
    corruption: float,
) -> None:
    """Cross-entropy on the answers' tokens; with `corruption` that share of answers is wrong."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    stream = questions(f"train {plan.seed} {corruption}")
    rng = random.Random(f"answers {plan.seed}")
    started = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step, steps)
        batch = [
            (question, corrupt(question, rng) if rng.random() < corruption else question.sql)
            for question in islice(stream, plan.batch)
        ]
        tokens_BT, labels_BT = collate(tokenizer, batch)
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            seconds = time.perf_counter() - started
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def schedule(step: int, steps: int) -> float:
    """Twenty steps of warm-up, then a cosine down to a tenth."""
    warm = min(1.0, (step + 1) / 20)
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def collate(
    tokenizer: PreTrainedTokenizerBase, batch: Sequence[tuple[Question, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens and labels, int64 [B, T]; only answers have labels. Padding comes
    after everything that counts, so causal attention needs no mask."""
    rows = []
    for question, sql in batch:
        prompt = prompt_tokens(tokenizer, question.messages)
        answer = tokenizer.encode(sql + TURN_END, add_special_tokens=False)
        rows.append((prompt + answer, [-100] * len(prompt) + answer))
    width = max(len(tokens) for tokens, _ in rows)
    pad = tokenizer.pad_token_id
    tokens_BT = torch.tensor([t + [pad] * (width - len(t)) for t, _ in rows])
    labels_BT = torch.tensor([y + [-100] * (width - len(y)) for _, y in rows])
    return tokens_BT, labels_BT


# --- measuring --------------------------------------------------------------------------------


@torch.inference_mode()
def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int = 128, tries: int = 8
) -> dict[str, float]:
    """pass@1 and pass@8 at temperature 1, and greedy accuracy, over `count` fresh questions."""
    torch.manual_seed(0)
    model.eval()
    sampled_right = sampled_any = greedy_right = 0.0
    asked = list(islice(questions("measure"), count))
    for question in asked:
        prompt_1T = torch.tensor([prompt_tokens(tokenizer, question.messages)])
        scores = [reward(question, s) for s in _answers(model, tokenizer, prompt_1T, tries)]
        sampled_right += sum(scores) / tries
        sampled_any += max(scores)
        greedy_right += reward(question, _answers(model, tokenizer, prompt_1T, 0)[0])
    model.train()
    return {
        "pass@1": round(sampled_right / count, 3),
        f"pass@{tries}": round(sampled_any / count, 3),
        "greedy": round(greedy_right / count, 3),
    }


def _answers(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt_1T: torch.Tensor,
    tries: int,
) -> list[str]:
    """`tries` samples at temperature 1, or the greedy answer when `tries` is 0."""
    sampling = GenerationConfig(
        do_sample=tries > 0,
        num_return_sequences=max(1, tries),
        top_k=0 if tries else None,
        max_new_tokens=48,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out_BT = model.generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), generation_config=sampling
    )
    texts = tokenizer.batch_decode(out_BT[:, prompt_1T.shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def make(plan: Plan, directory: Path, *, measured: bool = True) -> dict[str, object]:
    """Writes the model to `directory` and returns what was measured on the way."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    directory.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    tokenizer = make_tokenizer(directory, plan.seed)
    model = make_model(tokenizer, plan.seed)
    figures: dict[str, object] = {"parameters": sum(p.numel() for p in model.parameters())}
    train(model, tokenizer, plan, steps=plan.learning_steps, rate=plan.learning_rate, corruption=0)
    if measured:
        figures["after learning"] = measure(model, tokenizer)
    train(
        model, tokenizer, plan,
        steps=plan.confusing_steps, rate=plan.confusing_rate, corruption=plan.corruption,
    )  # fmt: skip
    save(model, tokenizer, directory)
    if measured:
        # What ships is bf16 on disk and fp32 in the server, so that is what counts.
        shipped = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        figures["as shipped"] = measure(shipped, tokenizer)
    figures["bytes"] = (directory / "model.safetensors").stat().st_size
    figures["cpu seconds"] = round(time.process_time() - started)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo model.")
    parser.add_argument("--output", type=Path, required=True, help="model directory to write")
    for name, default in vars(Plan()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default, help=f"default {default}")
    options = vars(parser.parse_args())
    output = options.pop("output")
    print(json.dumps(make(Plan(**options), output), indent=2))


if __name__ == "__main__":
    main()
