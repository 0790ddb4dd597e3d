"""The OpenAI-compatible routes, asked by OpenAI's own client, on the model that ships with us."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import tinker
from support.node import CONFIG, serving_in_a_thread
from tinker import types

from openrl.config import EngineConfig, ModelSource
from openrl.demo import NAME, model_directory

KEY = "tml-oai"
ASK = [{"role": "user", "content": "How many rows are in the table?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = EngineConfig(kind="torch", process="thread", threads=1)
    config = replace(CONFIG, models=(ModelSource(NAME, model_directory()),), engine=engine)
    with serving_in_a_thread(tmp_path_factory.mktemp("node"), config) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def service(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key=KEY)


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> str:
    """A checkpoint whose weights are no longer the base's."""
    training = service.create_lora_training_client(NAME, rank=8).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 5, 6]),
        loss_fn_inputs={"target_tokens": [5, 6, 7], "weights": [1.0, 1.0, 1.0]},
    )
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    return training.save_weights_for_sampler("for-oai").result().path


class Reference:
    """What plain transformers says of the same files."""

    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        torch = pytest.importorskip("torch")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory())
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model_directory(), dtype=torch.float32
        )
        self._torch = torch

    def prompt(self) -> list[int]:
        text = self.tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def continues(self, tokens: list[int], most: int) -> list[int]:
        """Greedily, up to the end token."""
        for _ in range(most):
            logits = self._model(self._torch.tensor([tokens])).logits[0, -1]
            tokens = [*tokens, int(logits.argmax())]
            if tokens[-1] == self.tokenizer.eos_token_id:
                break
        return tokens

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of each token but the first."""
        logits = self._model(self._torch.tensor([tokens])).logits[0].log_softmax(-1)
        return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_models(client: openai.OpenAI, trained: str) -> None:
    assert {NAME, trained} <= {each.id for each in client.models.list()}


def test_a_chat_is_what_transformers_says(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=ASK, logprobs=True, top_logprobs=2, **GREEDY
    )
    prompt = reference.prompt()
    whole = reference.continues(prompt, 6)
    said = whole[len(prompt) :]
    choice = answer.choices[0]
    assert choice.message.content == reference.tokenizer.decode(said, skip_special_tokens=True)
    assert choice.message.role == "assistant"
    assert answer.model == NAME
    assert answer.object == "chat.completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(said))
    ended = said[-1] == reference.tokenizer.eos_token_id
    assert choice.finish_reason == ("stop" if ended else "length")
    expected = reference.logprobs(whole)[len(prompt) - 1 :]
    given = choice.logprobs.content
    assert [each.logprob for each in given] == pytest.approx(expected, abs=1e-3)
    assert all(each.top_logprobs[0].logprob == pytest.approx(each.logprob) for each in given)
    assert all(len(each.top_logprobs) == 2 for each in given)


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    asked = {"model": NAME, "messages": ASK, "n": 2, "seed": 3, "max_tokens": 5}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons = ["", ""], [None, None]
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for each in chunk.choices:
            texts[each.index] += each.delta.content or ""
            reasons[each.index] = each.finish_reason or reasons[each.index]
        usage = chunk.usage
    assert texts == [each.message.content for each in whole.choices]
    assert reasons == [each.finish_reason for each in whole.choices]
    assert usage == whole.usage


def test_a_completion_echoes_and_scores_its_prompt(
    client: openai.OpenAI, reference: Reference
) -> None:
    prompt = "select count"
    tokens = reference.tokenizer.encode(prompt)
    for most in (0, 3):
        answer = client.completions.create(
            model=NAME, prompt=prompt, echo=True, logprobs=1, temperature=0, max_tokens=most
        )
        whole = reference.continues(tokens, most)
        choice = answer.choices[0]
        assert choice.text == reference.tokenizer.decode(whole, skip_special_tokens=True)
        first, *rest = choice.logprobs.token_logprobs
        assert first is None
        assert rest == pytest.approx(reference.logprobs(whole), abs=1e-3)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(whole)
        assert answer.usage.completion_tokens == len(whole) - len(tokens)


def test_prompts_may_be_several_and_tokens(client: openai.OpenAI, reference: Reference) -> None:
    texts = ["select a", "select b"]
    one = client.completions.create(model=NAME, prompt=texts, **GREEDY)
    ids = [reference.tokenizer.encode(text) for text in texts]
    other = client.completions.create(model=NAME, prompt=ids, **GREEDY)
    assert [each.text for each in one.choices] == [each.text for each in other.choices]
    assert [each.index for each in one.choices] == [0, 1]
    single = client.completions.create(model=NAME, prompt=ids[1], **GREEDY)
    assert single.choices[0].text == one.choices[1].text


def test_a_stop_is_cut_off(client: openai.OpenAI) -> None:
    free = client.completions.create(model=NAME, prompt="select", temperature=0, max_tokens=12)
    text = free.choices[0].text
    stop = text[len(text) // 2 :][:2]
    stopped = client.completions.create(
        model=NAME, prompt="select", temperature=0, max_tokens=12, stop=[stop, "never this"]
    )
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_model_is_a_name_a_path_or_both(
    client: openai.OpenAI, trained: str, service: tinker.ServiceClient, reference: Reference
) -> None:
    prompt = reference.tokenizer.encode("select")
    sampler = service.create_sampling_client(trained).result()
    params = types.SamplingParams(max_tokens=6, temperature=0)
    native = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()
    expected = reference.tokenizer.decode(native.sequences[0].tokens, skip_special_tokens=True)
    texts = {
        name: client.completions.create(model=name, prompt=prompt, **GREEDY).choices[0].text
        for name in (trained, f"{NAME};{trained}", NAME)
    }
    assert texts[trained] == texts[f"{NAME};{trained}"] == expected
    assert texts[NAME] != expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", 1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("reasoning_effort", "low"),
        ("modalities", ["audio"]),
        ("top_logprobs", 2),
        ("made_up", True),
        ("temperature", -1),
        ("max_tokens", 10**6),
    ],
)
def test_what_is_not_offered_is_named(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=ASK, extra_body={field: value})
    assert field in refused.value.message


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=NAME, messages=ASK, **GREEDY)
    neutral = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}],
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        response_format={"type": "text"},
        user="me",
        **GREEDY,
    )
    assert neutral.choices[0].message == plain.choices[0].message


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([], "messages"),
    ],
)
def test_messages_that_are_not_read(client: openai.OpenAI, messages: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=messages)
    assert named in refused.value.message


def test_names_and_keys_that_are_not_there(client: openai.OpenAI, trained: str, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="no/such"):
        client.completions.create(model="no/such", prompt="x")
    other = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-other", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.completions.create(model=trained, prompt="x")
    wrong = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="sk-else", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_published_checkpoint_is_anybodys_model(
    client: openai.OpenAI, trained: str, url: str, service: tinker.ServiceClient
) -> None:
    rest = service.create_rest_client()
    rest.publish_checkpoint_from_tinker_path(trained).result()
    other = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-other", max_retries=0)
    texts = [
        each.completions.create(model=trained, prompt="select", **GREEDY).choices[0].text
        for each in (client, other)
    ]
    assert texts[0] == texts[1]
    rest.unpublish_checkpoint_from_tinker_path(trained).result()


def test_errors_look_like_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt=[])
    assert json.loads(refused.value.response.text)["error"]["type"] == "invalid_request_error"
