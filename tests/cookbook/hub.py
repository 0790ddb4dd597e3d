"""A model hub of one tiny model and toy rows, so that unmodified recipes run without a network.

    python hub.py DIRECTORY

Every look-up of the SDK, the cookbook and `datasets` takes a relative directory of the hub's name
too, so recipes are run from DIRECTORY. All models are links to one: two layers of Qwen 3 with a
tokenizer of 4,096 pieces. It has been trained for a few seconds to end its answers sometimes and
to answer sums with numbers, since reinforcement needs something to reinforce; it knows none of the
rows. Run with the environment of the recipes: needs torch and transformers.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODELS = (
    "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-397B-A17B",
    "meta-llama/Llama-3.2-1B", "moonshotai/Kimi-K2.6",
)  # fmt: skip
TINY = "tiny"
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 32768
STEPS, BATCH = 150, 16
ENDS = 0.07
"""After a word of a trained answer, how probable its end is."""

Row = dict[str, Any]


# --- the model ----------------------------------------------------------------------------------


def stdlib() -> list[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return [file.read_text(errors="ignore") for file in files]


def tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL[:3]),
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(list(SPECIAL[3:]))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.model_max_length = CONTEXT
    return fast


def model(vocabulary: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=vocabulary.eos_token_id,
            pad_token_id=vocabulary.pad_token_id,
        )
    )


def conversation(rng: random.Random, words: Sequence[str]) -> str:
    """A sum, answered with a number that has nothing to do with it, or a ramble; each ends at
    some time."""
    if rng.random() < 0.5:
        asked = f"What is {rng.randrange(101)} + {rng.randrange(101)}?"
        answer = str(rng.randrange(201))
        if rng.random() < 0.5:
            answer += " " + " ".join(rng.choices(words, k=8))
    else:
        asked = " ".join(rng.choices(words, k=rng.randrange(4, 12)))
        length = next(n for n in range(1, 200) if rng.random() < ENDS or n == 199)
        answer = " ".join(rng.choices(words, k=length))
    head = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return f"{head}{answer}<|im_end|>"


def train(net: Qwen3ForCausalLM, vocabulary: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    rng = random.Random(1)
    words = sorted({word for text in texts for word in text.split() if word.isalpha()})[:400]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = [conversation(rng, words) for _ in range(BATCH)]
        rows = vocabulary(batch, return_tensors="pt", padding=True, truncation=True, max_length=96)
        labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)
        loss = net(input_ids=rows.input_ids, attention_mask=rows.attention_mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def lay_out_models(root: Path) -> None:
    random.seed(0)
    torch.manual_seed(0)
    texts = stdlib()
    vocabulary = tokenizer(texts)
    net = model(vocabulary)
    train(net, vocabulary, texts)
    vocabulary.save_pretrained(root / TINY)
    net.save_pretrained(root / TINY)
    for name in MODELS:
        link = root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to((root / TINY).resolve())


# --- rows ---------------------------------------------------------------------------------------


def chat(i: int) -> list[Row]:
    return [
        {"role": "user", "content": f"Tell me fact number {i}."},
        {"role": "assistant", "content": f"Fact {i} is that {i} plus one is {i + 1}."},
    ]


def robot(i: int) -> Row:
    return {"prompt": f"p{i}", "prompt_id": str(i), "messages": chat(i), "category": "QA"}


def apples(a: int) -> Row:
    return {
        "question": f"Ann has {a} apples and buys {a + 1}. How many?",
        "answer": f"{a}+{a + 1}={2 * a + 1}\n#### {2 * a + 1}",
    }


def comparison(i: int) -> Row:
    asked = f"\n\nHuman: What is {i}?\n\nAssistant: "
    return {"chosen": f"{asked}It is the number {i}.", "rejected": f"{asked}I do not care."}


def thought(i: int) -> Row:
    said = [
        {"from": "human", "value": f"What is {i}+1?"},
        {"from": "gpt", "value": f"<think>\neasy\n</think>\n\n{i + 1}"},
    ]
    return {"difficulty": 1, "source": "x", "domain": "math", "conversations": said}


def problem(i: int) -> Row:
    return {
        "problem": f"Find ${i}+1$.",
        "solution": f"\\boxed{{{i + 1}}}",
        "answer": str(i + 1),
        "subject": "Algebra",
        "level": 1,
        "unique_id": f"t/{i}",
    }


def hendrycks(config: str, split: str, i: int) -> Row:
    return {
        "problem": f"{config} {split} {i}: find {i}+2",
        "level": "Level 1",
        "type": config,
        "solution": f"\\boxed{{{i + 2}}}",
    }


def science(i: int) -> Row:
    """A question with four choices, as SciKnowEval has them."""
    choices = {"text": [str(i), str(i + 1), "none", "all"], "label": ["A", "B", "C", "D"]}
    return {
        "question": f"What comes after {i}?",
        "choices": choices,
        "answerKey": "B",
        "answer": "",
        "type": "mcq-4-choices",
        "domain": "Chemistry",
        "details": {"level": "L3", "task": "t", "subtask": "s"},
        "prompt": {"default": "Answer with a letter."},
    }


def datasets() -> Iterator[tuple[str, list[Row]]]:
    yield "HuggingFaceH4/no_robots/train.jsonl", [robot(i) for i in range(2048)]
    yield "HuggingFaceH4/no_robots/test.jsonl", [robot(i) for i in range(64)]
    yield "openai/gsm8k/train.jsonl", [apples(a) for a in range(512)]
    yield "openai/gsm8k/test.jsonl", [apples(a) for a in range(600, 616)]
    yield "Anthropic/hh-rlhf/train.jsonl", [comparison(i) for i in range(1024)]
    yield "Anthropic/hh-rlhf/test.jsonl", [comparison(i) for i in range(2000, 2032)]
    yield (
        "zwhe99/DeepMath-103K/train.jsonl",
        [
            {"question": f"Compute {i}+{i}.", "final_answer": str(2 * i), "difficulty": 1.0}
            for i in range(512)
        ],
    )
    yield (
        "allenai/tulu-3-sft-mixture/train.jsonl",
        [{"id": str(i), "messages": chat(i), "source": "x"} for i in range(2048)],
    )
    yield "open-thoughts/OpenThoughts3-1.2M/train.jsonl", [thought(i) for i in range(512)]
    yield "HuggingFaceH4/MATH-500/test.jsonl", [problem(i) for i in range(1000, 1032)]
    yield "hicai-zju/SciKnowEval/test.jsonl", [science(i) for i in range(128)]
    for config in ("algebra", "geometry"):
        for split in ("train", "test"):
            rows = [hendrycks(config, split, i) for i in range(64)]
            yield f"EleutherAI/hendrycks_math/{config}/{split}.jsonl", rows
    yield "convs.jsonl", [{"messages": chat(i)} for i in range(256)]


def card(configs: dict[str, str]) -> str:
    """What tells `datasets` of configurations, and where the files of each are."""
    lines = ["---", "configs:"]
    for name, prefix in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            lines += [f"  - split: {split}", f"    path: {prefix}{split}.jsonl"]
    return "\n".join([*lines, "---"]) + "\n"


def lay_out_datasets(root: Path) -> None:
    for name, rows in datasets():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cards = {
        "openai/gsm8k": card({"main": ""}),
        "EleutherAI/hendrycks_math": card({"algebra": "algebra/", "geometry": "geometry/"}),
    }
    for name, text in cards.items():
        (root / name / "README.md").write_text(text, encoding="utf-8")


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    lay_out_models(root)
    lay_out_datasets(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
