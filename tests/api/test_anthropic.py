"""The Anthropic-compatible routes, asked by Anthropic's own client, on the model that ships with
us. What the model says is what the OpenAI-compatible route says, which is held to transformers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from support.node import CONFIG, serving_in_a_thread

from openrl.api.anthropic_schema import Count, Turn
from openrl.api.anthropic_turns import conversation, events, message
from openrl.api.chat import Said
from openrl.api.generation import Written
from openrl.config import EngineConfig, ModelSource
from openrl.demo import NAME, model_directory

KEY = "tml-anthropic"
ASK: list[Any] = [{"role": "user", "content": "How many rows are in the table?"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = EngineConfig(kind="torch", process="thread", threads=1)
    config = replace(CONFIG, models=(ModelSource(NAME, model_directory()),), engine=engine)
    with serving_in_a_thread(tmp_path_factory.mktemp("node"), config) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{url}/anthropic/api", api_key=KEY, max_retries=0)


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    """Greedily; the client's own parameters no longer name a temperature."""
    extra = {"temperature": 0} | more.pop("extra_body", {})
    given = {"model": NAME, "max_tokens": 8, "messages": ASK, "extra_body": extra}
    return client.messages.create(**given | more)


def test_a_message_is_what_the_other_route_says(client: anthropic.Anthropic, url: str) -> None:
    other = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=KEY)
    system = "Be brief."
    expected = other.chat.completions.create(
        model=NAME,
        max_tokens=8,
        temperature=0,
        messages=[{"role": "system", "content": system}, *ASK],
    )
    answer = ask(client, system=system)
    assert answer.content[0].text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == expected.usage.completion_tokens
    reasons = {"length": "max_tokens", "stop": "end_turn"}
    assert answer.stop_reason == reasons[expected.choices[0].finish_reason]
    counted = client.messages.count_tokens(model=NAME, messages=ASK, system=system)
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with ask(client, stream=True) as stream:
        told = list(stream)
    deltas = [each.delta for each in told if each.type == "content_block_delta"]
    assert "".join(each.text for each in deltas) == whole.content[0].text
    (end,) = [each for each in told if each.type == "message_delta"]
    assert end.delta.stop_reason == whole.stop_reason
    assert end.usage.output_tokens == whole.usage.output_tokens
    assert (told[0].type, told[-1].type) == ("message_start", "message_stop")
    assert told[0].message.usage.input_tokens == whole.usage.input_tokens


def test_a_stop_sequence_is_named_and_cut_off(client: anthropic.Anthropic) -> None:
    text = ask(client, max_tokens=12).content[0].text
    stop = text[len(text) // 2 :][:2]
    answer = ask(client, max_tokens=12, stop_sequences=["never this", stop])
    assert answer.content[0].text == text[: text.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"extra_body": {"made_up": 1}}, "made_up"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"extra_body": {"tool_choice": {"type": "any"}}}, "tool_choice"),
        ({"max_tokens": 2000}, "max_tokens"),
    ],
)
def test_what_is_not_offered_is_named(
    client: anthropic.Anthropic, more: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, **more)
    assert named in refused.value.message


def test_names_and_keys_that_are_not_there(client: anthropic.Anthropic, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no/such"):
        ask(client, model="no/such")
    wrong = anthropic.Anthropic(base_url=f"{url}/anthropic/api", api_key="sk-else", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        ask(wrong)


def test_tools_are_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "2"}]}
    turns = [
        Turn("assistant", [{"type": "text", "text": "Well."}, call]),
        Turn("user", [result, {"type": "text", "text": "And?"}]),
    ]
    function = {"name": "add", "arguments": {"a": 1}}
    assert conversation(Count(model="m", messages=turns)) == [
        {
            "role": "assistant",
            "content": "Well.",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "And?"},
    ]


def test_thoughts_and_calls_are_blocks() -> None:
    said = Said("", "hm", (("add", '{"a": 1}'),))
    whole = message("id", NAME, 3, Written("", "stop", 5), said)
    assert [block["type"] for block in whole["content"]] == ["thinking", "tool_use"]
    assert whole["content"][1]["input"] == {"a": 1}
    assert whole["stop_reason"] == "tool_use"
    deltas = [each["delta"] for each in events(whole) if each["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "input_json_delta", "partial_json": '{"a": 1}'},
    ]
