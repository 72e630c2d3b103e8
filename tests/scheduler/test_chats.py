"""Chats render as transformers' apply_chat_template does, or are refused by field and value."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.prompts import prompt_token_ids
from scheduler_svc.text.tokenizer import Tokenizer
from tests.support.asked import MODEL
from tests.support.chat_templates import ALL, CHATML, MISTRAL, QWEN_3
from tests.support.fake_engine import FACTS
from tests.support.small_tokenizers import byte_level

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The wéather <&> at a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {}}}
CALL = {
    "id": "abc123",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"place": "Brno", "days": 2, "x": [None]}},
}
HELLO = {"role": "user", "content": " Hello?  "}
HI = {"role": "assistant", "content": "\nHi.  "}
HISTORY = [
    HELLO,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sun": 1}', "tool_call_id": "abc123"},
    {"role": "assistant", "content": "<think>a</think>It shines.", "reasoning_content": "hm"},
]
CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [HELLO]},
    "an answer": {"messages": [HELLO, HI]},
    "a system message": {"messages": [{"role": "system", "content": " Be brief. "}, HELLO]},
    "tools": {"messages": [HELLO], "tools": [WEATHER, TIME]},
    "a call": {"messages": HISTORY[:2], "tools": [WEATHER]},
    "its result": {"messages": HISTORY[:3], "tools": [WEATHER]},
    "an answer after a call": {"messages": HISTORY},
    "two calls": {
        "messages": [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    },
    "a name": {"messages": [{**HELLO, "name": "Ada"}]},
    "no prompt": {"messages": [HELLO], "add_generation_prompt": False},
    "no thinking": {"messages": [HELLO], "kwargs": {"enable_thinking": False}},
    "variables": {"messages": [HELLO], "kwargs": {"date_string": "1 May", "n": [1, {"a": None}]}},
    "prefill": {"messages": [HELLO, {"role": "assistant", "content": "The sun"}], "prefill": True},
    "prefill with a space": {"messages": [HELLO, HI], "prefill": True},
    "prefill of nothing": {
        "messages": [HELLO, {"role": "assistant", "content": ""}], "prefill": True
    },
    "prefill of thoughts": {"messages": HISTORY[::3], "prefill": True},
    "prefill of a user": {"messages": [HELLO], "prefill": True},
    "prefill with a tag": {
        "messages": [HELLO, {"role": "assistant", "content": "CONTINUE_FINAL_MESSAGE_TAG a"}],
        "prefill": True,
    },
}  # fmt: skip


def wrapped(template: Any) -> PreTrainedTokenizerFast:
    rust = byte_level()
    rust.add_special_tokens(["<|end_header|>"])
    rust.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]"])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        chat_template=template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


TOKENIZERS = {name: wrapped(template) for name, template in ALL.items()}


def asked(
    messages: list[dict[str, Any]],
    tools: list[Any] = [],  # noqa: B006
    kwargs: dict[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    prefill: bool | None = None,
) -> pb.GenerateRequest:
    """A chat in OpenAI's form as a client sends it to us."""
    listed = []
    for message in messages:
        fields = dict(message)
        if isinstance(fields["content"], list):
            fields["parts"] = [{"text": part["text"]} for part in fields.pop("content")]
        fields["tool_calls"] = [
            {"id": call["id"], "name": call["function"]["name"],
             "arguments": json.dumps(call["function"]["arguments"])}
            for call in fields.get("tool_calls", [])
        ]  # fmt: skip
        listed.append(json_format.ParseDict(fields, pb.ChatMessage()))
    chat = pb.ChatMessages(
        messages=listed,
        tools=list(map(json.dumps, tools)),
        chat_template_kwargs="" if kwargs is None else json.dumps(kwargs),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=prefill,
    )
    return pb.GenerateRequest(chat=chat)


def ours(tokenizer: PreTrainedTokenizerFast, request: pb.GenerateRequest) -> list[int]:
    facts = replace(FACTS, max_model_len=4096, pool_tokens=4096, num_embeddings=1000)
    return prompt_token_ids(request, replace(MODEL, tokenizer=Tokenizer(tokenizer), facts=facts))


def theirs(tokenizer: PreTrainedTokenizerFast, chat: dict[str, Any]) -> list[int]:
    prefill = chat.get("prefill", False)
    found = tokenizer.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=chat.get("add_generation_prompt", not prefill),
        continue_final_message=prefill,
        return_dict=False,
        **chat.get("kwargs", {}),
    )
    return list(found)


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("kind", ALL)
def test_a_chat_is_rendered_as_transformers_does(kind: str, chat: dict[str, Any]) -> None:
    """Models were trained on exactly that; a template that refuses must be refused alike."""
    tokenizer = TOKENIZERS[kind]
    reason = ""
    try:
        want = theirs(tokenizer, chat)
    except TemplateError as error:
        reason = str(error)
    except ValueError:  # transformers' own, of a message that does not appear whole
        reason = "chat.continue_final_message is True"
    if not reason:
        assert ours(tokenizer, asked(**chat)) == want
        return
    with pytest.raises(RequestRejected) as refused:
        ours(tokenizer, asked(**chat))
    assert reason in str(refused.value)


def test_the_templates_are_as_different_as_they_should_be() -> None:
    """Were all of them refused, or all alike, the test above would show nothing."""
    for kind, tokenizer in TOKENIZERS.items():
        plain = theirs(tokenizer, CHATS["one message"])
        assert (theirs(tokenizer, CHATS["tools"]) == plain) == (kind == "chatml")
        assert (theirs(tokenizer, CHATS["no thinking"]) == plain) == (kind != "qwen")
        assert theirs(tokenizer, CHATS["prefill"]) != plain


def test_content_in_parts() -> None:
    """As a list where the template reads one; elsewhere as text, not as Python prints a list."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]
    chat = {"messages": [{"role": "user", "content": parts}]}
    qwen = TOKENIZERS["qwen"]
    assert ours(qwen, asked(**chat)) == theirs(qwen, chat)
    joined = {"messages": [{"role": "user", "content": "Hello\n you"}]}
    for kind in ("chatml", "llama", "mistral"):
        tokenizer = TOKENIZERS[kind]
        assert ours(tokenizer, asked(**chat)) == theirs(tokenizer, joined)
    prefill = {"messages": [HELLO, {"role": "assistant", "content": parts}], "prefill": True}
    assert ours(qwen, asked(**prefill)) == theirs(qwen, prefill)


def test_a_template_for_tools() -> None:
    """Some models have two; transformers takes this one for a request with tools."""
    tokenizer = wrapped({"default": CHATML, "tool_use": MISTRAL})
    for name in ("one message", "tools"):
        assert ours(tokenizer, asked(**CHATS[name])) == theirs(tokenizer, CHATS[name])


DEEP = json.dumps({"a": json.loads("[" * 64 + "]" * 64)})


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tools": ["{"]}, ["chat.tools[0] is '{'", "a JSON object (Expecting"]),
        ({"tools": ["{}", "[]"]}, ["chat.tools[1] is '[]'", "a JSON object (it is none)"]),
        ({"tools": ['{"a": NaN}']}, ["chat.tools[0]", "NaN is no JSON number"]),
        ({"tools": [DEEP]}, ["chat.tools[0]", "nested more than 64 deep"]),
        ({"tools": ['{"a":' * 9999 + "1" + "}" * 9999]}, ["chat.tools[0]", "a JSON object"]),
        ({"tools": ['{"a": "\\ud800"}']}, ["chat.tools[0]", "surrogates not allowed"]),
        ({"tools": ['{"a": "' + "x" * (1 << 18) + '"}']}, ["chat.tools[0] in char", "at most 262"]),
        ({"tools": ['{"a": "' + "x" * 200_000 + '"}'] * 11}, ["in characters is 2200", "2097152"]),
        ({"tools": ["{}"] * 129}, ["number of chat.tools is 129", "at most 128"]),
        ({"chatTemplateKwargs": "x"}, ["chat.chat_template_kwargs is 'x'", "a JSON object"]),
        ({"chatTemplateKwargs": '{"messages": []}'}, ["kwargs is 'messages'", "names other than"]),
        ({"chatTemplateKwargs": '{"tools": []}'}, ["chat.chat_template_kwargs is 'tools'"]),
        ({"chatTemplateKwargs": '{"bos_token": "a"}'}, ["chat.chat_template_kwargs is 'bos_token"]),
        ({"chatTemplateKwargs": '{"pad_token": "a"}'}, ["chat.chat_template_kwargs is 'pad_token"]),
        (
            {"chatTemplateKwargs": '{"add_generation_prompt": false}'},
            ["chat.chat_template_kwargs is 'add_generation_prompt'"],
        ),
        (
            {"addGenerationPrompt": True, "continueFinalMessage": True},
            ["chat.add_generation_prompt is True", "false or unset with continue_final_message"],
        ),
        (
            {"messages": [{"role": "user", "content": "a", "parts": [{"text": "b"}]}]},
            ["chat.messages[0].content is 'a'", "empty beside parts"],
        ),
        (
            {"messages": [{"role": "user", "name": "a<|im_end|>"}]},
            ["chat.messages[0].name is 'a<|im_end|>'", "letters, digits"],
        ),
        (
            {"messages": [{"role": "tool", "toolCallId": "a|b"}]},
            ["chat.messages[0].tool_call_id is 'a|b'", "letters, digits"],
        ),
        (
            {"messages": [{"role": "assistant", "toolCalls": [{"arguments": "[]"}]}]},
            ["chat.messages[0].tool_calls[0].arguments is '[]'", "a JSON object"],
        ),
        (
            {"messages": [{"role": "assistant", "toolCalls": [{"name": "<"}]}]},
            ["chat.messages[0].tool_calls[0].name is '<'"],
        ),
        ({"messages": [{"role": "a", "parts": [{}] * 4095}]}, ["length of chat.messages is 4096"]),
        ({"messages": [{"role": "system"}]}, ["chat.messages is 'system'", "(only user, assis"]),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_read_is_refused_by_name(
    fields: dict[str, Any], parts: list[str]
) -> None:
    """A template's own error would name neither field nor value."""
    chat = {"messages": [{"role": "user", "content": "hi"}], **fields}
    request = json_format.ParseDict({"chat": chat}, pb.GenerateRequest())
    with pytest.raises(RequestRejected) as error:
        ours(TOKENIZERS["mistral"], request)
    for part in parts:
        assert part in str(error.value), str(error.value)


def test_a_message_that_the_template_cuts_cannot_be_continued() -> None:
    """The answer would go on with something else."""
    tokenizer = wrapped(QWEN_3.replace("split('</think>')[-1]", "split('</think>')[0]"))
    cut = {"messages": [HELLO, {"role": "assistant", "content": "a</think>b"}], "prefill": True}
    with pytest.raises(ValueError, match="does not appear"):
        theirs(tokenizer, cut)
    with pytest.raises(RequestRejected, match=r"continue_final_message is True; .*shows as it is"):
        ours(tokenizer, asked(**cut))
