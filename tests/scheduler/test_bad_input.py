"""One table of bad input: each is refused with the field, the value and what is allowed."""

from __future__ import annotations

import pytest

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.validation import validate
from tests.support.asked import MODEL, chat_request, request, sampling

BAD_INPUT: list[tuple[str, pb.GenerateRequest, list[str]]] = [
    ("no prompt", pb.GenerateRequest(), ["prompt is None", "one of text, tokens, chat"]),
    ("empty text", pb.GenerateRequest(text=""), ["text is ''", "at least one character"]),
    ("no tokens", pb.GenerateRequest(tokens=pb.TokenIds()), ["prompt is []", "one token"]),
    (
        "token too big",
        pb.GenerateRequest(tokens=pb.TokenIds(ids=[0, 300])),
        ["tokens.ids[1] is 300", "0 to 299"],
    ),
    ("negative token", pb.GenerateRequest(tokens=pb.TokenIds(ids=[-1])), ["tokens.ids[0] is -1"]),
    ("no messages", chat_request(), ["chat.messages is []", "at least one message"]),
    (
        "odd role",
        chat_request(("user", "a"), ("user|>b<|system", "b")),
        ["chat.messages[1].role is 'user|>b<|system'", "up to 64 letters, digits"],
    ),
    ("template refuses", chat_request(("tool", "a")), ["chat.messages is 'tool'", "no tools here"]),
    ("long prompt", request(text="x" * 128), ["prompt", "128", "at most 127", "max_model_len"]),
    (
        "over the context",
        sampling(max_tokens=124),
        [
            "sampling.max_tokens is 124",
            "at most 123",
            "prompt (5 tokens)",
            "is 129; max_model_len is 128",
        ],
    ),
    (
        "max_tokens 0",
        sampling(max_tokens=0),
        ["sampling.max_tokens is 0", "at least 1, or 0 with prompt_logprobs"],
    ),
    (
        "max_tokens 0, n",
        sampling(max_tokens=0, prompt_logprobs=0, n=2),
        ["sampling.n is 2", "unset with max_tokens 0"],
    ),
    (
        "max_tokens 0, regex",
        sampling(max_tokens=0, prompt_logprobs=0, regex="a"),
        ["sampling.regex is 'a'", "unset with max_tokens 0"],
    ),
    (
        "long scored prompt",
        request(text="x" * 129, sampling={"max_tokens": 0, "prompt_logprobs": 0}),
        ["prompt", "129", "at most 128", "max_model_len"],
    ),
    ("max_tokens -1", sampling(max_tokens=-1), ["sampling.max_tokens is -1", "at least 1"]),
    ("temperature < 0", sampling(temperature=-0.5), ["sampling.temperature is -0.5", "0 (greedy)"]),
    ("temperature NaN", sampling(temperature="NaN"), ["sampling.temperature is nan"]),
    ("temperature inf", sampling(temperature="Infinity"), ["sampling.temperature is inf"]),
    ("temperature below", sampling(temperature=9.9e-7), ["sampling.temperature is 9.9e-07"]),
    ("temperature tiny", sampling(temperature=1e-9), ["sampling.temperature", "at least 1e-06"]),
    ("top_p 0", sampling(top_p=0), ["sampling.top_p is 0.0", "above 0, up to 1"]),
    ("top_p > 1", sampling(top_p=1.5), ["sampling.top_p is 1.5", "above 0, up to 1"]),
    ("top_p NaN", sampling(top_p="NaN"), ["sampling.top_p is nan"]),
    ("top_k < 0", sampling(top_k=-1), ["sampling.top_k is -1", "at least 0"]),
    ("min_p > 1", sampling(min_p=1.5), ["sampling.min_p is 1.5", "0 to 1"]),
    ("min_p < 0", sampling(min_p=-0.5), ["sampling.min_p is -0.5", "0 to 1"]),
    ("seed < 0", sampling(seed=-1), ["sampling.seed is -1", "0 to 9223372036854775807"]),
    ("n 0", sampling(n=0), ["sampling.n is 0", "1 to 8 (max_requests_per_batch)"]),
    ("n 9", sampling(n=9), ["sampling.n is 9", "1 to 8 (max_requests_per_batch)"]),
    ("beam_width 0", sampling(beam_width=0), ["sampling.beam_width is 0", "1 to 8 (max_requests"]),
    ("beam_width 9", sampling(beam_width=9), ["sampling.beam_width is 9", "1 to 8 (max_requests"]),
    ("n > beams", sampling(beam_width=2, n=3), ["sampling.n is 3", "1 to 2 (beam_width)"]),
    (
        "beams speculate",
        sampling(beam_width=2, speculate=3),
        ["sampling.speculate is 3", "0, with beam_width 2"],
    ),
    (
        "beams without tokens",
        sampling(beam_width=2, max_tokens=0, prompt_logprobs=1),
        ["sampling.beam_width is 2", "unset with max_tokens 0"],
    ),
    ("length_penalty NaN", sampling(length_penalty="NaN"), ["sampling.length_penalty is nan"]),
    ("min_tokens -1", sampling(min_tokens=-1), ["sampling.min_tokens is -1", "0 to max_tokens"]),
    (
        "min_tokens > max_tokens",
        sampling(min_tokens=7, max_tokens=6),
        ["sampling.min_tokens is 7", "at most 6 (max_tokens)"],
    ),
    (
        "min_tokens > context",
        sampling(min_tokens=124),
        ["sampling.min_tokens is 124", "at most 123 (what fits beside a prompt of 5)"],
    ),
    ("logprobs -1", sampling(logprobs=-1), ["sampling.logprobs is -1", "0 to 128"]),
    ("logprobs 129", sampling(logprobs=129), ["sampling.logprobs is 129", "0 to 128"]),
    (
        "prompt_logprobs 129",
        sampling(prompt_logprobs=129),
        ["sampling.prompt_logprobs is 129", "0 to 128"],
    ),
    ("speculate -1", sampling(speculate=-1), ["sampling.speculate is -1", "0 to 64"]),
    ("speculate 65", sampling(speculate=65), ["sampling.speculate is 65", "0 to 64"]),
    (
        "bias of no token",
        sampling(logit_bias={"300": 1}),
        ["logit_bias is 300", "0 to 299"],
    ),
    ("bias of -1", sampling(logit_bias={"-1": 1}), ["sampling.logit_bias is -1", "0 to 299"]),
    (
        "bias 101",
        sampling(logit_bias={"5": 101}),
        ["logit_bias[5] is 101.0", "-100 to 100"],
    ),
    (
        "bias NaN",
        sampling(logit_bias={"5": "NaN"}),
        ["logit_bias[5] is nan", "-100 to 100"],
    ),
    ("bias -inf", sampling(logit_bias={"5": "-Infinity"}), ["sampling.logit_bias[5] is -inf"]),
    ("empty word", sampling(bad_words=["a", ""]), ["sampling.bad_words[1] is ''", "1 to 128 char"]),
    (
        "long word",
        sampling(bad_words=["a" * 129]),
        ["bad_words[0]", "1 to 128 characters"],
    ),
    (
        "many words",
        sampling(bad_words=["a"] * 129),
        ["sampling.bad_words is '129 strings'", "up to 128 strings"],
    ),
    (
        "repetition_penalty 0",
        sampling(repetition_penalty=0),
        ["sampling.repetition_penalty is 0.0", "above 0"],
    ),
    (
        "presence_penalty 3",
        sampling(presence_penalty=3),
        ["sampling.presence_penalty is 3.0", "-2 to 2"],
    ),
    (
        "frequency_penalty NaN",
        sampling(frequency_penalty="NaN"),
        ["sampling.frequency_penalty is nan", "-2 to 2"],
    ),
    ("empty stop", sampling(stop=["a", ""]), ["sampling.stop[1] is ''", "1 to 1024 characters"]),
    ("long stop", sampling(stop=["a" * 1025]), ["sampling.stop[0]", "1 to 1024 characters"]),
    ("many stops", sampling(stop=["a"] * 65), ["sampling.stop is '65 strings'", "up to 64"]),
    (
        "stop token",
        sampling(stop_token_ids=[300]),
        ["sampling.stop_token_ids[0] is 300", "0 to 299"],
    ),
    (
        "many stop tokens",
        sampling(stop_token_ids=[1] * 257),
        ["sampling.stop_token_ids is '257 tokens'", "up to 256"],
    ),
    ("long salt", request(cacheSalt="x" * 257), ["cache_salt", "up to 256 characters"]),
]


@pytest.mark.parametrize(
    ("bad", "parts"), [case[1:] for case in BAD_INPUT], ids=[case[0] for case in BAD_INPUT]
)
def test_bad_input_is_named(bad: pb.GenerateRequest, parts: list[str]) -> None:
    """One bad request must hurt nobody else, and its sender must learn what to change."""
    with pytest.raises(RequestRejected) as error:
        validate(bad, "r", 0, MODEL, 8)
    for part in parts:
        assert part in str(error.value), str(error.value)
