"""Lines of OpenAI's batch files as requests: what is understood, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from client.batch.openai_requests import BadRequest, BatchRequest, batch_request

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object"}


def chat(**body: Any) -> BatchRequest:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    return batch_request({**line, "body": {"model": "m", "messages": MESSAGES, **body}})


def text(**body: Any) -> BatchRequest:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    return batch_request({**line, "body": {"model": "m", "prompt": "Once", **body}})


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 3}, None),
        ({"presence_penalty": 1, "frequency_penalty": -1}, None),
        ({"stop": "x"}, None),
        ({"stop": ["x", "y"]}, None),
        ({"stop": None, "user": "u", "stream": False, "metadata": {}}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False}, {}),
        ({"logit_bias": {"5": -1.5}}, {"logit_bias": {5: -1.5}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            {"json_schema": SCHEMA},
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, {}),
        ({"top_k": 3, "min_tokens": 2, "regex": "a", "speculate": 4}, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ],
)
def test_fields_of_a_chat(body: dict[str, Any], options: dict[str, Any] | None) -> None:
    """Each field that OpenAI's clients send, as ours; None: under the same name."""
    assert chat(**body).options == (body if options is None else options)
    assert chat(**body).prompt == MESSAGES


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {"max_tokens": 16}),
        ({"max_tokens": 5, "logprobs": 3}, {"max_tokens": 5, "logprobs": 3}),
        ({"max_tokens": 5, "best_of": 1, "echo": False, "suffix": None}, {"max_tokens": 5}),
    ],
)
def test_fields_of_a_completion(body: dict[str, Any], options: dict[str, Any]) -> None:
    """OpenAI's default of 16 tokens too: a batch made for it must not run for hours."""
    assert text(**body).options == options


@pytest.mark.parametrize("prompt", ["Once", ["Once"], [1, 2], [[1, 2]]])
def test_prompts(prompt: Any) -> None:
    """Text or tokens, also as the only one of a list."""
    assert text(prompt=prompt).prompt in ("Once", [1, 2])


def test_priority_and_salt() -> None:
    """They are no sampling options, and reach the call all the same."""
    request = chat(priority=2, cache_salt="s")
    assert (request.priority, request.cache_salt, request.options) == (2, "s", {})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"temprature": 1}, "temprature is no known field of a body; allowed: .*temperature"),
        ({"stream": True}, "stream is True; allowed: false"),
        ({"tool_choice": "required"}, "tool_choice is 'required'; allowed: 'auto', 'none'"),
        ({"top_logprobs": 2}, "top_logprobs is 2; allowed: with logprobs true"),
        ({"logprobs": 3}, "logprobs is 3; allowed: true, false"),
        ({"logit_bias": {"a": 1}}, "logit_bias is {'a': 1}; allowed: an object of token ids"),
        ({"logit_bias": 5}, "logit_bias is 5; allowed: an object of token ids"),
        ({"response_format": {"type": "xml"}}, "'xml'}; allowed: an object whose type is 'text'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is missing"),
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"max_tokens": 1 << 40}, "max_tokens is 1099511627776; allowed: an integer"),
        ({"messages": []}, r"messages is \[\]; allowed: a list of at least one message"),
        ({"messages": "Hi"}, "messages is 'Hi'; allowed: a list"),
        ({"prompt": "Hi"}, "prompt is no known field of a body"),
        ({"regex": "a", "json_object": True}, "regex and json_object are both given"),
        ({"tools": "f"}, "tools is 'f'; allowed: a list"),
        ({"priority": 1 << 40}, "priority is 1099511627776; allowed: an integer"),
    ],
)
def test_what_is_refused_names_itself(body: dict[str, Any], sentence: str) -> None:
    """A field that is dropped makes an answer that only looks right."""
    with pytest.raises(BadRequest, match=sentence):
        chat(**body)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "GET"}, "method is 'GET'; allowed: 'POST'"),
        (
            {"url": "/v1/embeddings"},
            "url is '/v1/embeddings'; allowed: '/v1/chat/completions', '/v",
        ),
        ({"url": None}, "url is None"),
        ({"body": []}, r"body is \[\]; allowed: an object"),
        ({"extra": 1}, "extra is no known field of a line"),
    ],
)
def test_wrong_lines_name_what_is_wrong(change: dict[str, Any], sentence: str) -> None:
    """As above, around the body."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    with pytest.raises(BadRequest, match=sentence):
        batch_request({**line, **change})


@pytest.mark.parametrize("prompt", [["a", "b"], 5, [], None, [1, "a"], {"text": "x"}])
def test_several_prompts_are_several_lines(prompt: Any) -> None:
    """A request has one prompt; which of the answers would be whose?"""
    if prompt == []:
        assert text(prompt=prompt).prompt == []  # the server refuses it, and says why
        return
    with pytest.raises(BadRequest, match="allowed: one text, or one list of token ids"):
        text(prompt=prompt)
