"""The table of scalar sampling parameters: one entry each, shared by both processes.

An attribute of `SamplerParameters` is a parameter that the sampler applies to every row. Its entry
is its only registration: the check of a request's value (scheduler_svc/front/validation.py), the
model's default (scheduler_svc/text/model_defaults.py), the scheduler's column over rows
(scheduler_svc/core/rows.py), the plan's array over samples (protos/plan.py), its place in the
device's input buffer (worker/step/io_buffers.py) and its line in docs/sampling.md follow from it.
Its arithmetic belongs into worker/step/sampler.py, its test into tests/worker/test_sampler.py.

`REQUEST_FIELDS` are used by the scheduler, which turns some of them into other arrays of the plan.

Needs no numpy, so that a client may import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

MIN_TEMPERATURE: Final = 9.999999974752427e-07  # 1e-6 in float32; logits divided by less overflow
MAX_SEED: Final = (1 << 63) - 1
MAX_LOGPROBS: Final = 128
MAX_DRAFTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """An entry: a field of the API's SamplingParams."""

    dtype: str  # "float32" or "int32"; what never leaves the scheduler may be "int64"
    neutral: float | None  # has no effect; None = no value has none
    minimum: float = -math.inf
    maximum: float = math.inf
    excludes_minimum: bool = False
    allows_zero: bool = False  # below the minimum
    allowed: str  # the range in words
    config_key: str = ""  # key of generation_config.json that states a model's default; "" = none
    effect: str

    def allows(self, value: float) -> bool:
        """Whether a request may have the value; false for NaN and infinities."""
        if value == 0 and self.allows_zero:
            return True
        is_above = value > self.minimum if self.excludes_minimum else value >= self.minimum
        return math.isfinite(value) and is_above and value <= self.maximum


def _parameter(entry: SamplingField) -> Any:
    return field(default=entry.neutral, metadata={"entry": entry})


@dataclass(frozen=True, slots=True)
class SamplerParameters:
    """One row's settings of the sampler, neutral by default. Its attributes are entries."""

    temperature: float = _parameter(
        SamplingField(
            dtype="float32",
            neutral=1.0,
            minimum=MIN_TEMPERATURE,
            allows_zero=True,
            allowed="0 (greedy), or at least 1e-06",
            config_key="temperature",
            effect="divides the logits; at 0 the most probable token is chosen",
        )
    )
    top_k: int = _parameter(
        SamplingField(
            dtype="int32",
            neutral=0,
            minimum=0,
            allowed="at least 0; 0 is off",
            config_key="top_k",
            effect="keeps the k most probable tokens, ties with the last one included",
        )
    )
    top_p: float = _parameter(
        SamplingField(
            dtype="float32",
            neutral=1.0,
            minimum=0.0,
            maximum=1.0,
            excludes_minimum=True,
            allowed="above 0, up to 1",
            config_key="top_p",
            effect="keeps the fewest most probable tokens whose probabilities sum up to p",
        )
    )
    min_p: float = _parameter(
        SamplingField(
            dtype="float32",
            neutral=0.0,
            minimum=0.0,
            maximum=1.0,
            allowed="0 to 1",
            config_key="min_p",
            effect="keeps tokens with at least this share of the highest probability",
        )
    )
    repetition_penalty: float = _parameter(
        SamplingField(
            dtype="float32",
            neutral=1.0,
            minimum=0.0,
            excludes_minimum=True,
            allowed="above 0",
            config_key="repetition_penalty",
            effect="divides positive logits of tokens so far, prompt included; multiplies others",
        )
    )
    frequency_penalty: float = _parameter(
        SamplingField(
            dtype="float32",
            neutral=0.0,
            minimum=-2.0,
            maximum=2.0,
            allowed="-2 to 2",
            effect="is subtracted from a token's logit for each time it was generated",
        )
    )
    presence_penalty: float = _parameter(
        SamplingField(
            dtype="float32",
            neutral=0.0,
            minimum=-2.0,
            maximum=2.0,
            allowed="-2 to 2",
            effect="is subtracted from the logits of tokens generated so far",
        )
    )


REQUEST_FIELDS: Final[dict[str, SamplingField]] = {
    "max_tokens": SamplingField(
        dtype="int32", neutral=None, minimum=1, allows_zero=True,
        allowed="at least 1, or 0 with prompt_logprobs",
        effect="output tokens at most; by default as many as context and KV pool hold",
    ),
    "min_tokens": SamplingField(
        dtype="int32", neutral=0, minimum=0, allowed="0 to max_tokens", config_key="min_new_tokens",
        effect="output tokens before a stop token or a stop string may end the answer",
    ),
    "seed": SamplingField(
        dtype="int64", neutral=None, minimum=0, maximum=MAX_SEED, allowed=f"0 to {MAX_SEED}",
        effect="makes sampling repeatable; by default the server draws one",
    ),
    "n": SamplingField(
        dtype="int32", neutral=1, minimum=1, allowed="1 to max_requests_per_batch",
        effect="answers to the same prompt",
    ),
    "beam_width": SamplingField(
        dtype="int32", neutral=1, minimum=1, allowed="1 to max_requests_per_batch",
        effect="beams of a beam search; 1 is off",
    ),
    "length_penalty": SamplingField(
        dtype="float32", neutral=1.0, allowed="a number", config_key="length_penalty",
        effect="exponent of the length by which a beam's score is divided",
    ),
    "logprobs": SamplingField(
        dtype="int32", neutral=None, minimum=0, maximum=MAX_LOGPROBS,
        allowed=f"0 to {MAX_LOGPROBS}", effect="candidates reported per output token",
    ),
    "prompt_logprobs": SamplingField(
        dtype="int32", neutral=None, minimum=0, maximum=MAX_LOGPROBS,
        allowed=f"0 to {MAX_LOGPROBS}", effect="candidates reported per prompt token",
    ),
    "speculate": SamplingField(
        dtype="int32", neutral=0, minimum=0, maximum=MAX_DRAFTS, allowed=f"0 to {MAX_DRAFTS}",
        effect="draft tokens guessed from the request's own text and verified per step",
    ),
}  # fmt: skip

SAMPLER_FIELDS: Final[dict[str, SamplingField]] = {
    attribute.name: attribute.metadata["entry"] for attribute in fields(SamplerParameters)
}
SAMPLING_FIELDS: Final = SAMPLER_FIELDS | REQUEST_FIELDS
