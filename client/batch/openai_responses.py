"""Answers and errors as lines of an OpenAI batch output file.

{"id": "batch_req_…", "custom_id": "1", "response": {"status_code": 200, "request_id": "…",
 "body": {"object": "chat.completion", …}}, "error": null}
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc

from client.answers import Answer, TokenLogprobs

_HTTP_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}
_NOT_TEXT: Final = "\ufffd"  # a token that is a part of a character


def answer_line(
    custom_id: str, answer: Answer, is_chat: bool, token_texts: Mapping[int, str]
) -> dict[str, Any]:
    """The line of an answer; `token_texts` has the text of every token whose logprob it reports."""
    answers = (answer, *answer.siblings)
    kind, prefix = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
    choice = _chat_choice if is_chat else _text_choice
    usage = [each.usage for each in answers]
    completion_tokens = sum(each.completion_tokens for each in usage)
    request_id = answer.started.request_id
    body = {
        "id": f"{prefix}-{request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": answer.started.model,
        "choices": [choice(each, token_texts) for each in answers],
        "usage": {
            "prompt_tokens": usage[0].prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": usage[0].prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage[0].cached_tokens},
        },
    }
    return _line(custom_id, 200, request_id, body, None)


def error_line(custom_id: str, message: str, status: grpc.StatusCode) -> dict[str, Any]:
    """The line of a request that failed. Its error is also the body, as an HTTP server's is."""
    code = _HTTP_STATUS.get(status, 500)
    kind = "invalid_request_error" if 400 <= code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status.name}}
    return _line(custom_id, code, "", body, {"code": status.name, "message": message})


def reported_tokens(answer: Answer) -> set[int]:
    """The tokens whose log probabilities an answer has."""
    entries = [entry for each in (answer, *answer.siblings) for entry in each.logprobs]
    return {entry.token_id for entry in entries} | {
        token_id for entry in entries for token_id, _ in entry.top
    }


def _line(
    custom_id: str, code: int, request_id: str, body: object, error: object
) -> dict[str, Any]:
    response = {"status_code": code, "request_id": request_id, "body": body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _chat_choice(answer: Answer, texts: Mapping[int, str]) -> dict[str, Any]:
    logprobs = None
    if answer.logprobs:
        content = [
            {
                **_token(texts[entry.token_id], entry.logprob),
                "top_logprobs": [_token(texts[token], logprob) for token, logprob in entry.top],
            }
            for entry in answer.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": answer.completion.index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    data = None if _NOT_TEXT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": data}


def _text_choice(answer: Answer, texts: Mapping[int, str]) -> dict[str, Any]:
    return {
        "index": answer.completion.index,
        "text": answer.text,
        "logprobs": _text_logprobs(answer.logprobs, texts) if answer.logprobs else None,
        "finish_reason": answer.finish_reason,
    }


def _text_logprobs(entries: Sequence[TokenLogprobs], texts: Mapping[int, str]) -> dict[str, Any]:
    tokens = [texts[entry.token_id] for entry in entries]
    offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {texts[token]: logprob for token, logprob in entry.top} for entry in entries
        ],
        "text_offset": offsets,
    }
