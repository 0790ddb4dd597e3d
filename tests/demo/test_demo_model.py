"""The shipped model, as a user's tools see it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl import demo

MESSAGES = [
    {"role": "system", "content": "river(id, name)"},
    {"role": "user", "content": "Count the rivers."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.model_directory())


def test_the_directory_is_found_without_torch():
    code = "import sys, openrl.demo; openrl.demo.model_directory(); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_it_is_small_and_bf16():
    path = demo.model_directory() / "model.safetensors"
    assert path.stat().st_size <= 4_000_000
    with safe_open(path, "pt") as file:
        tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - not a mapping
        assert {tensor.get_dtype() for tensor in tensors} == {"BF16"}
        count = sum(torch.Size(tensor.get_shape()).numel() for tensor in tensors)
    assert count <= 2_000_000


def test_the_chat_template_is_chatml(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nriver(id, name)<|im_end|>\n"
        "<|im_start|>user\nCount the rivers.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = tokenizer.encode(text)
    assert tokens.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("text", ["SELECT COUNT(*) FROM river", "é ☃ 漢字\n\ttabs", "a  b"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_file_agrees_on_the_end(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == end
    for name in ("config.json", "generation_config.json"):
        assert json.loads((demo.model_directory() / name).read_text())["eos_token_id"] == end
    config = json.loads((demo.model_directory() / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)


@torch.inference_mode()
def test_it_writes_the_query_that_is_asked_for(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(demo.model_directory(), dtype=torch.float32)
    asked = [
        {"role": "system", "content": "river(id, name, basin, length, depth, region_id)\n"
         "region(id, name, climate, area)"},
        {"role": "user", "content": "How many rivers are there?"},
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    prompt_1T = torch.tensor([tokenizer.encode(text)])
    out_1T = model.generate(
        prompt_1T, attention_mask=torch.ones_like(prompt_1T), do_sample=False, max_new_tokens=24
    )
    answer = tokenizer.decode(out_1T[0, prompt_1T.shape[1] :], skip_special_tokens=True)
    assert answer == "SELECT COUNT(*) FROM river"
