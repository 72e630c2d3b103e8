"""Answers as typed values, and `Transcript`, which assembles them from a stream of responses.

Pure: reads messages, owns no connection. Both clients use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protos import inference_pb2


@dataclass(frozen=True, slots=True)
class Started:
    """The server's choices when it accepted the request."""

    request_id: str
    seed: int  # the one in effect; the same seed gives the same answer
    model: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of one token, and of the most probable candidates in its place."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most probable
    top: tuple[tuple[int, float], ...]  # (token id, logprob)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one answer. `text` may be empty: a token can be part of a
    character."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # which sibling, when n > 1
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    drafted_tokens: int = 0  # guessed and verified (`speculate`)
    accepted_tokens: int = 0  # of these, those that were right


@dataclass(frozen=True, slots=True)
class Timing:
    """The server's times of one answer, in seconds."""

    queued_seconds: float  # accepted to first scheduled
    prefill_seconds: float  # first scheduled to first token
    decode_seconds: float  # first token to last
    preemptions: int


@dataclass(frozen=True, slots=True)
class Completion:
    """How one sibling ended."""

    index: int
    finish_reason: str  # stop | length | abort
    stop_token_id: int | None  # the matched one, if finish_reason is stop
    stop_string: str | None
    usage: Usage
    timing: Timing
    beam_score: float | None = None  # of a beam search: summed logprobs / length ^ length_penalty


@dataclass(frozen=True, slots=True)
class Answer:
    """One sibling's whole answer."""

    text: str
    token_ids: tuple[int, ...]
    started: Started
    completion: Completion
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    siblings: tuple[Answer, ...] = ()  # `complete` with n > 1: the other answers, by index

    @property
    def finish_reason(self) -> str:
        return self.completion.finish_reason

    @property
    def usage(self) -> Usage:
        return self.completion.usage


@dataclass(slots=True, eq=False)
class Transcript:
    """Everything received for one request so far."""

    started: Started | None = None
    deltas: dict[int, list[Delta]] = field(default_factory=dict)  # by sibling
    completions: dict[int, Completion] = field(default_factory=dict)

    def absorb(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Adds one response; returns its Delta if it carries text or tokens."""
        kind = response.WhichOneof("event")
        if kind == "started":
            message = response.started
            self.started = Started(message.request_id, message.seed, message.model)
        elif kind == "complete":
            self.completions[response.index] = _completion(response)
        elif kind == "chunk":
            delta = _delta(response)
            self.deltas.setdefault(delta.index, []).append(delta)
            return delta
        return None

    def text(self, index: int = 0) -> str:
        """The text of one sibling so far."""
        return "".join(delta.text for delta in self.deltas.get(index, ()))

    def answers(self) -> list[Answer]:
        """The answers of all finished siblings, by index."""
        if not self.completions:
            return []
        assert self.started is not None, "a Complete came before Started"
        return [self._answer(self.started, self.completions[i]) for i in sorted(self.completions)]

    def _answer(self, started: Started, completion: Completion) -> Answer:
        deltas = self.deltas.get(completion.index, [])
        return Answer(
            text=self.text(completion.index),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            started=started,
            completion=completion,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        )


def with_siblings(answers: Sequence[Answer]) -> Answer:
    """The first answer, with the others as its `siblings`."""
    first, *others = answers
    return replace(first, siblings=tuple(others))


def _delta(response: inference_pb2.GenerateResponse) -> Delta:
    chunk = response.chunk
    return Delta(
        text=chunk.text,
        token_ids=tuple(chunk.token_ids),
        index=response.index,
        logprobs=_logprobs(chunk.logprobs),
        prompt_logprobs=_logprobs(chunk.prompt_logprobs),
    )


def _logprobs(entries: Sequence[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=tuple((candidate.token_id, candidate.logprob) for candidate in entry.top),
        )
        for entry in entries
    )


def _completion(response: inference_pb2.GenerateResponse) -> Completion:
    message = response.complete
    matched = message.WhichOneof("matched_stop")
    return Completion(
        index=response.index,
        finish_reason=message.finish_reason,
        stop_token_id=message.stop_token_id if matched == "stop_token_id" else None,
        stop_string=message.stop_string if matched == "stop_string" else None,
        usage=Usage(
            message.usage.prompt_tokens,
            message.usage.completion_tokens,
            message.usage.cached_tokens,
            message.usage.drafted_tokens,
            message.usage.accepted_tokens,
        ),
        timing=Timing(
            message.timing.queued_seconds,
            message.timing.prefill_seconds,
            message.timing.decode_seconds,
            message.timing.preemptions,
        ),
        beam_score=message.beam_score if message.HasField("beam_score") else None,
    )
