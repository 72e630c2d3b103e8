"""A line of an OpenAI batch file as the arguments of `Chairlift.complete`.

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}}

A body may also have the fields of this server's SamplingParams, under their own names. A field that
is known to neither is refused: an answer that ignored it would look like one that did not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from client.chat_messages import ChatOptions
from client.fields import quoted
from client.messages import GenerateOptions, Prompt, SamplingOptions, check_options

CHAT_URL: Final = "/v1/chat/completions"
TEXT_URL: Final = "/v1/completions"
DEFAULT_TEXT_TOKENS: Final = 16  # of /v1/completions; a chat ends by itself

# They name, count or bill requests, and change no answer. The server has one model.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "model",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# allowed only with the values that a server without the feature has
_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}


class BadRequest(ValueError):
    """The line cannot be a request; the message names the field, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What to ask the server."""

    custom_id: str
    is_chat: bool
    prompt: Prompt
    options: GenerateOptions
    priority: int | None
    cache_salt: str


def batch_request(line: Mapping[str, Any]) -> BatchRequest:
    """The request of a parsed line that has a custom_id. Raises BadRequest."""
    _known("line", line, {"custom_id", "method", "url", "body"})
    if line.get("method", "POST") != "POST":
        raise BadRequest(f"method is {quoted(line['method'])}; allowed: 'POST'")
    url = line.get("url")
    if url not in (CHAT_URL, TEXT_URL):
        raise BadRequest(f"url is {quoted(url)}; allowed: {CHAT_URL!r}, {TEXT_URL!r}")
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise BadRequest(f"body is {quoted(body)}; allowed: an object")
    fields = {name: value for name, value in body.items() if value is not None}
    is_chat = url == CHAT_URL
    read = _FIELDS | (_CHAT_FIELDS if is_chat else _TEXT_FIELDS)
    own = {"messages" if is_chat else "prompt", "priority", "cache_salt"}
    allowed = own | _WITHOUT_EFFECT | read.keys() | SamplingOptions.__annotations__.keys()
    if is_chat:
        allowed |= ChatOptions.__annotations__.keys()
    allowed |= _ONLY.keys()
    _known("body", fields, allowed)
    for name, values in _ONLY.items():
        if name in fields and fields[name] not in values:
            raise BadRequest(f"{name} is {quoted(fields[name])}; allowed: {_listed(values)}")
    options: dict[str, Any] = {} if is_chat else {"max_tokens": DEFAULT_TEXT_TOKENS}
    for name, value in fields.items():
        if name in read:
            read[name](value, fields, options)
        elif name not in own | _WITHOUT_EFFECT | _ONLY.keys():
            options[name] = value
    if fields.get("tool_choice") == "none":
        options.pop("tools", None)
    request = BatchRequest(
        custom_id=line["custom_id"],
        is_chat=is_chat,
        prompt=_messages(fields) if is_chat else _prompt(fields),
        options=cast(GenerateOptions, options),
        priority=fields.get("priority"),
        cache_salt=fields.get("cache_salt", ""),
    )
    try:
        check_options(request.options, priority=request.priority, cache_salt=request.cache_salt)
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from None
    return request


def _known(what: str, given: Mapping[str, Any], allowed: set[str]) -> None:
    unknown = sorted(given.keys() - allowed)
    if unknown:
        raise BadRequest(
            f"{unknown[0]} is no known field of a {what}; allowed: {', '.join(sorted(allowed))}"
        )


def _messages(fields: Mapping[str, Any]) -> Prompt:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages is {quoted(messages)}; allowed: a list of at least one message")
    return messages


def _prompt(fields: Mapping[str, Any]) -> Prompt:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if not isinstance(prompt, str) and not is_tokens:
        raise BadRequest(f"prompt is {quoted(prompt)}; allowed: one text, or one list of token ids")
    return cast(Prompt, prompt)


Reader = Callable[[Any, Mapping[str, Any], dict[str, Any]], None]


def _max_completion_tokens(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    options["max_tokens"] = value


def _max_tokens(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    if "max_completion_tokens" not in fields:
        options["max_tokens"] = value


def _logit_bias(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    try:
        options["logit_bias"] = {int(token): bias for token, bias in value.items()}
    except (AttributeError, ValueError):
        raise BadRequest(
            f"logit_bias is {quoted(value)}; allowed: an object of token ids and numbers"
        ) from None


def _chat_logprobs(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    if not isinstance(value, bool):
        raise BadRequest(f"logprobs is {quoted(value)}; allowed: true, false")
    if value:
        options["logprobs"] = fields.get("top_logprobs", 0)


def _top_logprobs(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    if value and fields.get("logprobs") is not True:
        raise BadRequest(f"top_logprobs is {quoted(value)}; allowed: with logprobs true")


def _text_logprobs(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    if isinstance(value, bool):
        raise BadRequest(f"logprobs is {quoted(value)}; allowed: an integer")
    options["logprobs"] = value


def _response_format(value: Any, fields: Mapping[str, Any], options: dict[str, Any]) -> None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        options["json_object"] = True
    elif kind == "json_schema":
        given = value.get("json_schema")
        schema = given.get("schema") if isinstance(given, Mapping) else None
        if not isinstance(schema, Mapping):
            raise BadRequest(f"response_format is {quoted(value)}; json_schema.schema is missing")
        options["json_schema"] = schema
    elif kind != "text":
        raise BadRequest(
            f"response_format is {quoted(value)}; allowed: an object whose type is 'text', "
            "'json_object' or 'json_schema'"
        )


_FIELDS: Final[dict[str, Reader]] = {
    "max_tokens": _max_tokens,
    "logit_bias": _logit_bias,
    "response_format": _response_format,
}
_CHAT_FIELDS: Final[dict[str, Reader]] = {
    "max_completion_tokens": _max_completion_tokens,
    "logprobs": _chat_logprobs,
    "top_logprobs": _top_logprobs,
}
_TEXT_FIELDS: Final[dict[str, Reader]] = {"logprobs": _text_logprobs}


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join("true" if v is True else "false" if v is False else repr(v) for v in values)
