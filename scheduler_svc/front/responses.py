"""The messages of a Generate stream, made from the engine's events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from protos import inference_pb2 as pb
from scheduler_svc.core.request import TokenScore
from scheduler_svc.engine.events import Delta, Finished

# Log probabilities in one message. These have some 100 kB, far below the 4 MiB that clients take by
# default, and are built in a few ms, for which all other streams wait.
MAX_SCORES: Final = 8192


def responses(event: Delta | Finished) -> Iterator[pb.GenerateResponse]:
    """One message, or several for a delta with many log probabilities: those of the prompt first,
    then the tokens with theirs, the text with the last."""
    if isinstance(event, Finished):
        yield pb.GenerateResponse(index=event.index, complete=_complete(event))
        return
    for portion in _portions(event.prompt_logprobs):
        response = pb.GenerateResponse(index=event.index)
        _write_scores(response.chunk.prompt_logprobs, portion)
        yield response
    if not event.token_ids and not event.text and event.prompt_logprobs:
        return
    tokens = event.token_ids
    *portions, last = _portions(event.logprobs) or [()]
    for portion in portions:
        response = pb.GenerateResponse(index=event.index)
        response.chunk.token_ids.extend(tokens[: len(portion)])
        _write_scores(response.chunk.logprobs, portion)
        tokens = tokens[len(portion) :]
        yield response
    response = pb.GenerateResponse(index=event.index)
    response.chunk.text = event.text
    response.chunk.token_ids.extend(tokens)
    _write_scores(response.chunk.logprobs, last)
    yield response


def _portions(scores: Sequence[TokenScore]) -> list[Sequence[TokenScore]]:
    """At most MAX_SCORES log probabilities each, and at least one token."""
    portions = []
    begin = num_scores = 0
    for place, score in enumerate(scores):
        size = 1 + len(score.top)
        if num_scores + size > MAX_SCORES and place > begin:
            portions.append(scores[begin:place])
            begin, num_scores = place, 0
        num_scores += size
    if begin < len(scores):
        portions.append(scores[begin:])
    return portions


def _write_scores(field: Any, scores: Sequence[TokenScore]) -> None:
    for score in scores:
        written = field.add(token_id=score.token_id, logprob=score.logprob, rank=score.rank)
        for token_id, logprob in score.top:
            written.top.add(token_id=token_id, logprob=logprob)


def _complete(event: Finished) -> pb.Complete:
    complete = pb.Complete(
        finish_reason=event.reason,
        usage=pb.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
            drafted_tokens=event.drafted_tokens,
            accepted_tokens=event.accepted_tokens,
        ),
        timing=pb.Timing(
            queued_seconds=event.queued_seconds,
            prefill_seconds=event.prefill_seconds,
            decode_seconds=event.decode_seconds,
            preemptions=event.preemptions,
        ),
    )
    if event.beam_score is not None:
        complete.beam_score = event.beam_score
    if event.stop_token_id is not None:
        complete.stop_token_id = event.stop_token_id
    elif event.stop_string is not None:
        complete.stop_string = event.stop_string
    return complete
