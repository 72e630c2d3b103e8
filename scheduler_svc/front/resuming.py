"""Resumed answers: what a client has of one already, and what is left to send.

The tokens that a client names are read into the answer's text as if they had just been sampled, so
that whole characters and stop strings go on over the break. Text that had been held back may be
missing at the client: what it has not got is sent with the next delta. An answer that these tokens
end already needs no further step.
"""

from __future__ import annotations

from typing import Final

from protos import inference_pb2 as pb
from scheduler_svc.core.request import FinishReason, NewRequest
from scheduler_svc.engine.events import Finished
from scheduler_svc.errors import RequestRejected
from scheduler_svc.front.prompts import check_token_ids
from scheduler_svc.text.text import OutputText

FIELD: Final = "resume.output_token_ids"


def check_resume(
    request: pb.GenerateRequest, vocab_size: int, max_requests_per_batch: int
) -> list[int]:
    """The output tokens that the client has; none if nothing is resumed. Raises RequestRejected."""
    resume, asked = request.resume, request.sampling
    if not 0 <= resume.index < max_requests_per_batch:
        allowed = f"0 to {max_requests_per_batch - 1}, as siblings are counted"
        raise RequestRejected("resume.index", resume.index, allowed)
    if resume.text_length < 0:
        raise RequestRejected("resume.text_length", resume.text_length, "at least 0")
    tokens = list(resume.output_token_ids)
    check_token_ids(FIELD, tokens, vocab_size)
    if tokens or resume.index or resume.text_length:
        for name in ("n", "beam_width"):
            if getattr(asked, name) > 1:
                raise RequestRejected(
                    f"sampling.{name}", getattr(asked, name), "1, with resume: one call per sibling"
                )
    return tokens


def check_seed(asked: pb.SamplingParams, new: NewRequest) -> None:
    """Another seed would give an answer that nobody asked for. Raises RequestRejected."""
    if new.output_token_ids and new.sampling.temperature > 0 and not asked.HasField("seed"):
        raise RequestRejected(
            "sampling.seed", None, "with resume, the seed of the answer that is resumed (Started)"
        )


def resume_text(new: NewRequest, text: OutputText, text_length: int) -> tuple[str, Finished | None]:
    """What the client lacks of the text of the tokens that it has, and the end, if these tokens
    end the answer. Raises RequestRejected for tokens that such an answer cannot have.

    `text_length`: characters that the client has.
    """
    tokens, stop_token_ids = new.output_token_ids, new.sampling.stop_token_ids
    if len(tokens) > new.max_tokens:
        raise RequestRejected(
            FIELD, f"{len(tokens)} tokens", f"up to {new.max_tokens} (max_tokens)"
        )
    shown = ""
    stop_token_id = None
    for place, token_id in enumerate(tokens):
        is_last = place == len(tokens) - 1
        if token_id in stop_token_ids:
            if not is_last or place < new.sampling.min_tokens:
                raise RequestRejected(
                    f"{FIELD}[{place}]",
                    token_id,
                    "no stop token but as the last, behind min_tokens others",
                )
            stop_token_id = token_id
        if stop_token_id is None or text.include_stop_str_in_output:
            shown += text.push(token_id)
        if text.matched_stop is not None and not is_last:
            raise RequestRejected(
                FIELD,
                f"{len(tokens)} tokens",
                f"up to {place + 1}, as these have the stop string {text.matched_stop!r}",
            )
    is_at_limit = len(tokens) == new.max_tokens > 0
    has_ended = stop_token_id is not None or text.matched_stop is not None or is_at_limit
    if has_ended:
        shown += text.finish()
    if text_length > len(shown):
        raise RequestRejected(
            "resume.text_length",
            text_length,
            f"at most {len(shown)}, the characters of these {len(tokens)} tokens",
        )
    end = _end(new, stop_token_id, text.matched_stop) if has_ended else None
    return shown[text_length:], end


def _end(new: NewRequest, stop_token_id: int | None, stop_string: str | None) -> Finished:
    is_stop = stop_token_id is not None or stop_string is not None
    return Finished(
        new.request_id,
        new.index,
        FinishReason.STOP if is_stop else FinishReason.LENGTH,
        stop_token_id=stop_token_id if stop_string is None else None,
        stop_string=stop_string,
        prompt_tokens=len(new.prompt_token_ids),
        completion_tokens=len(new.output_token_ids),
    )
