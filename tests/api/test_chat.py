"""Messages to a template's, and an answer's text to what it says."""

from typing import Any

import pytest

from openrl.api.chat import Said, opens_thought, read_answer, template_messages
from openrl.api.oai_schema import Message
from openrl.errors import UserError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "thinking", "said"),
    [
        ("plain", False, Said("plain", None, ())),
        ("<think>\nhm\n</think>\n\nyes", False, Said("yes", "hm", ())),
        ("hm\n</think>\n\nyes", True, Said("yes", "hm", ())),
        ("hm and hm", True, Said("", "hm and hm", ())),
        ("a </think> b", False, Said("a </think> b", None, ())),
    ],
)
def test_thoughts_are_kept_apart(text: str, thinking: bool, said: Said) -> None:
    assert read_answer(text, thinking=thinking, tools=False) == said


def test_calls_are_read_when_tools_were_offered() -> None:
    assert read_answer(f"Well. {CALL}", thinking=False, tools=True) == Said(
        "Well.", None, (("add", '{"a": 1}'),)
    )
    assert read_answer(CALL, thinking=False, tools=False) == Said(CALL, None, ())
    broken = "<tool_call>{not json}</tool_call>"
    assert read_answer(broken, thinking=False, tools=True) == Said(broken, None, ())


def test_a_template_gets_arguments_as_an_object() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = template_messages(
        [
            Message("developer", "be brief"),
            Message("assistant", None, tool_calls=[call]),
            Message("tool", [{"type": "text", "text": "2"}], tool_call_id="c"),
        ]
    )
    assert given[0] == {"role": "system", "content": "be brief"}
    assert given[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert given[2] == {"role": "tool", "content": "2", "tool_call_id": "c"}


@pytest.mark.parametrize("call", [{}, {"function": {"name": "x", "arguments": "{"}}])
def test_a_call_that_cannot_be_read(call: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"messages\[0\].tool_calls"):
        template_messages([Message("assistant", None, tool_calls=[call])])


def test_a_prompt_may_open_a_thought() -> None:
    assert opens_thought("<|im_start|>assistant\n<think>\n")
    assert not opens_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n")
