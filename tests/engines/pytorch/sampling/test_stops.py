"""Stops in the decoded text, against decoding the whole sequence after every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from openrl.engines.pytorch.stops import LazyDetokenizer, StopRule, StringWatch
from openrl.errors import UserError
from openrl.types import Stop

TEXT = [
    "User: hello there, how are you?\n\nAssistant: fine...\n",
    "naïve café – 日本語のテキスト 🙂🙃 <|im_end|> the end of the sentence. the end",
    "def f(x):\n    return x + 1\n\nSELECT name FROM singer;\n",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<|im_end|>"])
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, metaspace], ids=["bytes", "metaspace"])
def text(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LazyDetokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make: Callable[[], Tokenizer] = request.param
    PreTrainedTokenizerFast(tokenizer_object=make()).save_pretrained(directory)
    return LazyDetokenizer(str(directory))


def watch(text: LazyDetokenizer, *strings: str, prompt: Sequence[int] = ()) -> StringWatch:
    return StringWatch(StopRule.of(Stop(strings=strings), ()), text, prompt)


def first_stop(text: LazyDetokenizer, ids: Sequence[int], *strings: str) -> int | None:
    """Tokens up to and with the first after which the whole decoded text has a stop."""
    for count in range(1, len(ids) + 1):
        if any(stop in text.decode(list(ids[:count])) for stop in strings):
            return count
    return None


def found(text: LazyDetokenizer, ids: Sequence[int], *strings: str) -> int | None:
    seen = watch(text, *strings)
    for count, token in enumerate(ids, start=1):
        if seen.push(token):
            return count
    return None


@pytest.mark.parametrize(
    "strings",
    [
        ("end",),
        ("\n\n",),
        ("é",),
        ("語",),
        ("🙃",),
        ("🙂🙃",),
        ("the end of", "name FROM"),
        ("r",),
        ("..",),
        ("not there",),
    ],
)
def test_random_tokens_stop_where_the_whole_text_says(
    text: LazyDetokenizer, strings: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        ids = rng.integers(2, 180, 80).tolist()
        assert found(text, ids, *strings) == first_stop(text, ids, *strings)


@pytest.mark.parametrize("line", TEXT)
def test_real_text_stops_at_every_substring(text: LazyDetokenizer, line: str) -> None:
    ids = text._load().encode(line, add_special_tokens=False)  # type: ignore[attr-defined]
    whole = text.decode(ids)
    for start in range(0, len(whole), 7):
        for length in (1, 2, 5, 11):
            stop = whole[start : start + length]
            assert found(text, ids, stop) == first_stop(text, ids, stop)


def test_a_character_of_several_tokens_stops_at_its_last_byte(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(tmp_path)
    text = LazyDetokenizer(str(tmp_path))
    alphabet = text._load().get_vocab()  # type: ignore[attr-defined]
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("a🙂b")
    ids = [alphabet[c] for piece, _ in pieces for c in piece]
    assert len(ids) == 6
    assert found(text, ids, "🙂") == 5
    assert found(text, ids, "a") == 1
    assert found(text, ids, "🙂b") == 6


def test_the_prompt_is_not_searched_but_keeps_the_first_space(text: LazyDetokenizer) -> None:
    encode = text._load().encode  # type: ignore[attr-defined]
    prompt = encode("the end", add_special_tokens=False)
    both = encode("the end the end", add_special_tokens=False)
    assert both[: len(prompt)] == prompt
    seen = watch(text, "end", prompt=prompt)
    hits = [seen.push(token) for token in both[len(prompt) :]]
    assert hits[-1]
    assert not any(hits[:-1])
    spaced = watch(text, " the", prompt=prompt)
    assert any(spaced.push(token) for token in both[len(prompt) :])


def test_special_tokens_are_text(text: LazyDetokenizer) -> None:
    token = text._load().convert_tokens_to_ids("<|im_end|>")  # type: ignore[attr-defined]
    assert found(text, [5, token, 6], "<|im_end|>") == 2


def test_eos_and_ids() -> None:
    assert StopRule.of(Stop(), (2, 3)).ids == {2, 3}
    assert StopRule.of(Stop(tokens=(7,)), (2,)).ids == {2, 7}
    assert StopRule.of(Stop(eos=False), (2,)).ids == frozenset()
    assert StopRule.of(Stop(strings=("", "x")), (2,)).strings == ("x",)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_no_tokenizer_is_a_clear_error(family: str, model_directory: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match="stop strings need the model's tokenizer"):
        watch(LazyDetokenizer(str(model_directory(family))), "x", prompt=[1])
