"""Builds protobuf requests from Python arguments, for both clients.

An argument that is not given stays unset in the message, so that the server's default (the model's
generation_config) applies. The server validates values; here only types are checked, because a
protobuf field holds no other type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, cast

from client.chat_messages import Chat, ChatMessage, ChatOptions, chat_messages
from client.fields import assign, assign_field, message, quoted
from protos import inference_pb2

Prompt = str | Sequence[int] | Chat


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `generate`; protos/inference.proto gives ranges and neutral values.

    None means not given. At most one of the last five may be given: they constrain the output.
    `json_schema` is a schema as text or as a dict; `choice` lists the possible answers.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    seed: int | None
    n: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    speculate: int | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None
    json_object: bool | None
    choice: Sequence[str] | None


class GenerateOptions(SamplingOptions, ChatOptions, total=False):
    """The keyword arguments of `generate`: of sampling, and of chat prompts."""


_CONSTRAINTS: Final = ("json_schema", "regex", "grammar", "json_object", "choice")


def generate_request(
    prompt: Prompt,
    options: GenerateOptions,
    *,
    request_id: str = "",
    priority: int | None = None,
    cache_salt: str = "",
    stream: bool = True,
) -> inference_pb2.GenerateRequest:
    """The message of one `generate` call. TypeError or ValueError if an argument does not fit."""
    request = message(
        inference_pb2.GenerateRequest,
        request_id=request_id,
        cache_salt=cache_salt,
        priority=priority,
        stream=None if stream else False,
    )
    chat_options, sampling = _split(options)
    request.sampling.CopyFrom(sampling_params(sampling))
    if not isinstance(prompt, Sequence):
        raise TypeError(
            f"prompt is {quoted(prompt)}; allowed: text, token ids, or a list of chat messages"
        )
    if not isinstance(prompt, str) and _is_chat(prompt):
        request.chat.CopyFrom(chat_messages(cast(Chat, prompt), chat_options))
        return request
    _refuse(chat_options, prompt)
    if isinstance(prompt, str):
        assign_field(request, "text", prompt)
    else:
        request.tokens.SetInParent()  # an empty list is sent too: the server refuses it by name
        assign("prompt", request.tokens.ids.extend, prompt)
    return request


def check_options(options: GenerateOptions, *, priority: int | None, cache_salt: str) -> None:
    """TypeError or ValueError if an option does not fit its field, whatever the prompt is."""
    chat_options, sampling = _split(options)
    sampling_params(sampling)
    chat_messages((), chat_options)
    message(inference_pb2.GenerateRequest, priority=priority, cache_salt=cache_salt)


def tokenize_request(
    prompt: str | Chat, add_special_tokens: bool | None, options: ChatOptions
) -> inference_pb2.TokenizeRequest:
    """The message of one `tokenize` call."""
    request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        _refuse(options, prompt)
        assign_field(request, "text", prompt)
    else:
        request.chat.CopyFrom(chat_messages(prompt, options))
    return request


def sampling_params(options: SamplingOptions) -> inference_pb2.SamplingParams:
    """The message for `options`. TypeError for an unknown one, ValueError for two constraints."""
    given = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(given.keys() - SamplingOptions.__annotations__.keys())
    if unknown:
        raise TypeError(
            f"unknown sampling option {unknown[0]!r}; known: "
            f"{', '.join(SamplingOptions.__annotations__)}"
        )
    constraints = [name for name in _CONSTRAINTS if name in given]
    if len(constraints) > 1:
        raise ValueError(f"{' and '.join(constraints)} are both given; allowed: at most one")
    params = inference_pb2.SamplingParams()
    for name, value in given.items():
        _set(params, name, value)
    return params


def _is_chat(prompt: Sequence[Any]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], ChatMessage | Mapping)


def _split(options: GenerateOptions) -> tuple[ChatOptions, SamplingOptions]:
    chat = {name: value for name, value in options.items() if name in ChatOptions.__annotations__}
    others = {name: value for name, value in options.items() if name not in chat}
    return cast(ChatOptions, chat), cast(SamplingOptions, others)


def _refuse(options: ChatOptions, prompt: object) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        kind = "text" if isinstance(prompt, str) else "tokens"
        raise ValueError(
            f"{given[0]} is given with a prompt of {kind}; allowed: with chat messages"
        )


def _set(params: inference_pb2.SamplingParams, name: str, value: Any) -> None:
    if name == "json_schema" and isinstance(value, Mapping):
        params.json_schema = json.dumps(value)
    elif name == "choice":
        params.choice.SetInParent()
        assign(name, params.choice.options.extend, value)
    elif name == "stop":
        assign(name, params.stop.extend, [value] if isinstance(value, str) else value)
    elif name in ("stop_token_ids", "bad_words"):
        if isinstance(value, str):
            raise TypeError(f"{name} is {value!r}; allowed: a list")
        assign(name, getattr(params, name).extend, value)
    elif name == "logit_bias":
        assign(name, params.logit_bias.update, value)
    else:
        assign_field(params, name, value)
