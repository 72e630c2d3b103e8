"""The fields of the API that are no numbers of SamplingParams: limits, defaults, meaning.

With the table of numbers (sampling.py), the source of what README and docs/sampling.md say of
every field of SamplingParams and GenerateRequest (field_tables.py). The limits are those that
scheduler_svc/front checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_ID_CHARS: Final = 256  # of request_id and of cache_salt
MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiField:
    """A field that is no number, or none of SamplingParams."""

    default: str  # in words; "" = none
    config_key: str = ""  # keys of generation_config.json that state a model's default
    allowed: str
    effect: str


OTHER_SAMPLING_FIELDS: Final[dict[str, ApiField]] = {
    "stop": ApiField(
        default="none",
        allowed=f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
        effect="ends the answer where its text has one of these, behind min_tokens tokens; the "
        "string itself is cut off",
    ),
    "stop_token_ids": ApiField(
        default="none",
        allowed=f"up to {MAX_STOP_TOKEN_IDS} tokens of the vocabulary",
        effect="end the answer, beside the model's EOS tokens",
    ),
    "ignore_eos": ApiField(
        default="false",
        allowed="true, false",
        effect="the model's EOS tokens do not end the answer",
    ),
    "include_stop_str_in_output": ApiField(
        default="false",
        allowed="true, false",
        effect="the text has the stop string, or the stop token's text, that ended it",
    ),
    "skip_special_tokens": ApiField(
        default="true",
        allowed="true, false",
        effect="the text leaves out special tokens; token_ids have them",
    ),
    "logit_bias": ApiField(
        default="none",
        config_key="sequence_bias",
        allowed=f"up to {MAX_LOGIT_BIASES} tokens of the vocabulary, each "
        f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
        effect="is added to the tokens' logits; the model's biases apply beside, unless the token "
        "has one here",
    ),
    "bad_words": ApiField(
        default="none",
        config_key="bad_words_ids, suppress_tokens",
        allowed=f"up to {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters",
        effect="token sequences that the answer never completes: each text's within a longer one, "
        "with and without a space before it; the model's stay banned beside",
    ),
    "early_stopping": ApiField(
        default="false",
        config_key="early_stopping",
        allowed="true, false",
        effect="a beam search ends with beam_width hypotheses, not when none can improve",
    ),
    "json_schema": ApiField(
        default="none",
        allowed="a JSON schema that can be met",
        effect="the answer is JSON that the schema accepts",
    ),
    "regex": ApiField(
        default="none",
        allowed="a regular expression that can be met",
        effect="the expression matches the whole answer",
    ),
    "grammar": ApiField(
        default="none", allowed="a Lark grammar", effect="the grammar accepts the answer"
    ),
    "json_object": ApiField(
        default="false", allowed="true, false", effect="the answer is a JSON object"
    ),
    "choice": ApiField(
        default="none", allowed="at least one text", effect="the answer is one of these texts"
    ),
}

GENERATE_FIELDS: Final[dict[str, ApiField]] = {
    "request_id": ApiField(
        default="generated",
        allowed=f"up to {MAX_ID_CHARS} printable characters; not the id of a live request",
        effect="names the request in Abort, Admin and logs",
    ),
    "text": ApiField(
        default="",
        allowed="at least one character",
        effect="the prompt as it is; special tokens spelled in it are such tokens",
    ),
    "tokens": ApiField(
        default="", allowed="at least one token", effect="the prompt in tokens of the vocabulary"
    ),
    "chat": ApiField(
        default="",
        allowed="at least one message",
        effect="the prompt that the model's chat template makes of messages, tools and "
        "chat_template_kwargs; special tokens spelled in these are text",
    ),
    "sampling": ApiField(default="", allowed="see above", effect="how tokens are chosen"),
    "priority": ApiField(
        default="0",
        allowed="any; lower is sooner",
        effect="the order of requests where scheduler_type is priority",
    ),
    "cache_salt": ApiField(
        default="empty",
        allowed=f"up to {MAX_ID_CHARS} characters",
        effect="requests share cached blocks only under the same salt",
    ),
    "stream": ApiField(
        default="true",
        allowed="true, false",
        effect="if false, all of an answer comes at its end",
    ),
    "resume": ApiField(
        default="none",
        allowed="not with n or beam_width above 1; at temperatures above 0 with the seed",
        effect="continues an answer from the tokens and the text that the client has of it",
    ),
}
