"""Turns a VllmEngine GenerateRequest into Chairlift's own, which is validated like any other.

Most scalars of that API are not optional: there 0 means unset, as in vLLM's servicer. A value that
Chairlift has no counterpart for is refused by name.
"""

from __future__ import annotations

from typing import Any, Final

from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRejected

# The field is unset if it has its neutral value, which protobuf cannot tell from "not given".
_NUMBERS: Final = (
    "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_tokens", "n",
)  # fmt: skip
_OPTIONAL: Final = ("temperature", "max_tokens", "seed", "logprobs", "prompt_logprobs")
_CONSTRAINTS: Final = ("json_schema", "regex", "grammar", "json_object")


def translated(request: Any) -> pb.GenerateRequest:
    """`request`: a vllm_engine_pb2.GenerateRequest. Raises RequestRejected."""
    _refuse_foreign(request)
    own = pb.GenerateRequest(request_id=request.request_id, stream=request.stream)
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        own.tokens.ids.extend(map(_token_id, request.tokenized.input_ids))
    elif kind == "text":
        own.text = request.text
    asked, params = request.sampling_params, own.sampling
    for name in _NUMBERS:
        value = getattr(asked, name)
        if value:
            setattr(params, name, _int32(name, value) if isinstance(value, int) else value)
    for name in _OPTIONAL:
        if asked.HasField(name):
            value = getattr(asked, name)
            setattr(params, name, _int32(name, value) if isinstance(value, int) else value)
    params.stop.extend(asked.stop)
    params.stop_token_ids.extend(map(_token_id, asked.stop_token_ids))
    params.logit_bias.update(asked.logit_bias)
    params.ignore_eos = asked.ignore_eos
    params.include_stop_str_in_output = asked.include_stop_str_in_output
    params.skip_special_tokens = asked.skip_special_tokens
    constraint = asked.WhichOneof("constraint")
    if constraint in _CONSTRAINTS:
        setattr(params, constraint, getattr(asked, constraint))
    elif constraint == "choice":
        params.choice.options.extend(asked.choice.choices)
    elif constraint is not None:
        raise RequestRejected(
            f"sampling_params.{constraint}",
            getattr(asked, constraint),
            "unset; use json_schema, regex, grammar, json_object or choice",
        )
    return own


def _refuse_foreign(request: Any) -> None:
    asked = request.sampling_params
    foreign = {
        "mm_inputs": request.HasField("mm_inputs"),
        "extra_mm_inputs": bool(request.extra_mm_inputs),
        "media_refs": request.HasField("media_refs"),
        "kv_transfer_params": request.HasField("kv_transfer_params"),
        "kv_transfer_params_json": request.HasField("kv_transfer_params_json"),
        "sampling_params.truncate_prompt_tokens": asked.HasField("truncate_prompt_tokens"),
    }
    for name, is_given in foreign.items():
        if is_given:
            raise RequestRejected(name, "given", "unset: Chairlift has no counterpart for it")


def _token_id(value: int) -> int:
    return min(value, (1 << 31) - 1)  # beyond every vocabulary: validation names it


def _int32(name: str, value: int) -> int:
    if value > (1 << 31) - 1:
        raise RequestRejected(f"sampling_params.{name}", value, f"at most {(1 << 31) - 1}")
    return value
