"""Building requests: what is set, what stays unset, and what is refused before it is sent."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from client import AsyncChairlift, Chairlift, ChatMessage, ToolCall
from client.chat_messages import ChatOptions
from client.messages import Prompt, SamplingOptions, generate_request, sampling_params
from protos import inference_pb2


def test_every_sampling_field_has_a_keyword() -> None:
    """A field added to the .proto and forgotten here could not be reached from Python."""
    fields = {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}
    assert fields == set(SamplingOptions.__annotations__)
    fields = {field.name for field in inference_pb2.ChatMessages.DESCRIPTOR.fields}
    assert fields - {"messages"} == set(ChatOptions.__annotations__)
    fields = {field.name for field in inference_pb2.ChatMessage.DESCRIPTOR.fields}
    assert fields - {"parts"} == {field.name for field in dataclasses.fields(ChatMessage)}


def test_unset_stays_unset_and_zero_is_sent() -> None:
    """temperature=0 is greedy; no temperature is the model's own: they must not be one."""
    assert sampling_params({}).ListFields() == []
    params = sampling_params({"temperature": 0.0, "top_k": None, "seed": 0})
    assert params.HasField("temperature")
    assert params.HasField("seed")
    assert not params.HasField("top_k")


def test_an_unset_priority_stays_unset() -> None:
    """As above, outside of sampling."""
    assert not generate_request("x", {}).HasField("priority")
    assert generate_request("x", {}, priority=0).HasField("priority")


EXAMPLES: dict[str, Any] = {
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "logit_bias": {5: -1.5},
    "bad_words": ["x"],
    "json_schema": {"type": "object"},
    "regex": "a+",
    "grammar": "start: x",
    "json_object": True,
    "choice": ["yes", "no"],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "early_stopping": False,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("name", SamplingOptions.__annotations__)
def test_each_option_reaches_its_field(name: str) -> None:
    """One that is dropped on the way changes answers silently."""
    value = EXAMPLES.get(name, 1)
    params = sampling_params({name: value})  # type: ignore[misc]
    ((field, sent),) = params.ListFields()
    assert field.name == name
    if name == "json_schema":
        assert json.loads(sent) == value
    elif name == "choice":
        assert list(sent.options) == value
    elif name == "logit_bias":
        assert dict(sent) == value
    else:
        assert sent == value


def test_one_stop_string_may_stand_alone() -> None:
    """A string is a sequence of strings: "END" must not become E, N, D."""
    assert list(sampling_params({"stop": "END"}).stop) == ["END"]
    with pytest.raises(TypeError, match="bad_words is 'oops'; allowed: a list"):
        sampling_params({"bad_words": "oops"})


def test_wrong_arguments_name_themselves() -> None:
    """protobuf's own messages name neither the argument nor what is allowed."""
    with pytest.raises(TypeError, match="unknown sampling option 'temprature'; known: temperature"):
        sampling_params({"temprature": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match=r"max_tokens is 1\.5"):
        sampling_params({"max_tokens": 1.5})  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="max_tokens is 4294967296"):
        sampling_params({"max_tokens": 1 << 32})
    with pytest.raises(ValueError, match="regex and choice are both given; allowed: at most one"):
        sampling_params({"choice": ["a"], "regex": "b"})
    with pytest.raises(TypeError, match=r"prompt is \[1, 'a'\]"):
        generate_request([1, "a"], {})  # type: ignore[list-item]


def test_prompts_of_three_kinds() -> None:
    """Told apart by type alone."""
    assert generate_request("", {}).WhichOneof("prompt") == "text"
    assert generate_request((), {}).WhichOneof("prompt") == "tokens"
    assert list(generate_request(range(3), {}).tokens.ids) == [0, 1, 2]
    chat = generate_request([ChatMessage("user", "a"), {"role": "tool", "content": "b"}], {}).chat
    assert [(message.role, message.content) for message in chat.messages] == [
        ("user", "a"),
        ("tool", "b"),
    ]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_a_conversation_in_the_shape_of_openai() -> None:
    """A history that was made for another client must be sent as it is, tool calls and all."""
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [CALL],
            "reasoning_content": "r",
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    sent = generate_request(
        conversation,
        {
            "tools": tools,
            "chat_template_kwargs": {"enable_thinking": False},
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ).chat
    user, assistant, tool = sent.messages
    assert (user.content, [part.text for part in user.parts]) == ("", ["a", "b"])
    (call,) = assistant.tool_calls
    assert (call.id, call.name, call.arguments) == ("1", "f", '{"x": 1}')
    assert assistant.reasoning_content == "r"
    assert (tool.tool_call_id, tool.name, tool.content) == ("1", "f", "2")
    assert [json.loads(each) for each in sent.tools] == tools
    assert json.loads(sent.chat_template_kwargs) == {"enable_thinking": False}
    assert sent.continue_final_message
    assert sent.HasField("add_generation_prompt")


def test_typed_messages_are_those_mappings() -> None:
    """ChatMessage and ToolCall say the same as OpenAI's mappings."""
    typed = [
        ChatMessage("user", ["a", {"type": "text", "text": "b"}], name="n"),
        ChatMessage(
            "assistant", tool_calls=[ToolCall("1", "f", '{"x": 1}')], reasoning_content="r"
        ),
        ChatMessage("tool", "2", tool_call_id="1"),
    ]
    mappings = [
        {"role": "user", "name": "n", "content": ["a", "b"]},
        {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert generate_request(typed, {}).chat == generate_request(mappings, {}).chat


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user"}, "needs role, and content or tool_calls"),
        ({"role": "user", "content": 5}, "a string or a list of text parts"),
        ({"role": "u", "content": "c", "x": ""}, "'x' is unknown; allowed: role, content, name"),
        ({"role": 5, "content": "c"}, "role must be a string"),
        ({"role": "u", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'.*only"),
        ({"role": "u", "tool_calls": [{"id": "1"}]}, "its tool call {'id': '1'} is neither"),
        ({"role": "u", "tool_calls": [{"function": {"arguments": ""}}]}, "whose name is None"),
        (5, "5; allowed: a ChatMessage, or a mapping"),
    ],
)
def test_malformed_chat_messages_are_named(message: Any, named: str) -> None:
    """A message in another API's format must not lose its content silently."""
    with pytest.raises(TypeError, match=f"^chat message 1 (is|has) .*{named}"):
        generate_request([{"role": "user", "content": "a"}, message], {})


@pytest.mark.parametrize("prompt", ["text", [1, 2]])
def test_options_of_chat_need_a_chat(prompt: Prompt) -> None:
    """Tools that are dropped without a word would be missed later, in the answer."""
    with pytest.raises(ValueError, match=r"tools is given with a prompt of (text|tokens); allowed"):
        generate_request(prompt, {"tools": []})
    with pytest.raises(TypeError, match="tools is 'f'; allowed: a list"):
        generate_request([ChatMessage("user", "x")], {"tools": "f"})  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match="chat_template_kwargs is 5; allowed: a mapping"):
        generate_request([ChatMessage("user", "x")], {"chat_template_kwargs": 5})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("caf\udce9", {}, "text is 'caf\\udce9': character 3 is half a surrogate pair"),
        ([ChatMessage("user", "\ud83d")], {}, "content is '\\ud83d': character 0 is half a"),
        ("x", {"stop": ["\ud83d"]}, "stop is ['\\ud83d']: character 0 is half a surrogate pair"),
        ("x", {"regex": "\ud83d"}, "regex is '\\ud83d': character 0 is half a surrogate pair"),
        ("x", {"max_tokens": 2**31}, "max_tokens is 2147483648; allowed: an integer from -21474"),
        ("x", {"seed": -(10**30)}, "allowed: an integer from"),
    ],
)
def test_a_value_that_no_message_can_carry_is_named(
    prompt: Prompt, options: SamplingOptions, sentence: str
) -> None:
    """protobuf says neither which argument it is about nor what would be allowed."""
    with pytest.raises(ValueError, match=re.escape(sentence)):
        generate_request(prompt, options)


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda chairlift: chairlift.abort(["a"]), "request_ids is"),
        (lambda chairlift: chairlift.get_request(5), "request_id is 5"),
        (lambda chairlift: chairlift.detokenize([2**40]), r"token_ids is \[1099511627776\]"),
        (lambda chairlift: chairlift.detokenize("ab"), "token_ids is 'ab'"),
        (lambda chairlift: chairlift.list_requests(limit=2**40), "limit is 1099511627776; allowed"),
    ],
)
async def test_an_argument_that_no_message_holds_is_named(ask: Any, named: str) -> None:
    """protobuf says "bad argument type for built-in operation", and not of what."""
    with Chairlift("localhost:1") as chairlift, pytest.raises((TypeError, ValueError), match=named):
        ask(chairlift)
    async with AsyncChairlift("localhost:1") as chairlift:
        with pytest.raises((TypeError, ValueError), match=named):
            await ask(chairlift)
