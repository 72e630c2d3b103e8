"""The messages of VllmEngine.Generate, made from the engine's events.

Streamed: chunks of new tokens, then one complete per sibling, which repeats none of them. In one
piece: one complete per sibling. As in vLLM, `completion_tokens` of a chunk is the number of its
tokens, not of all so far. How many prompt tokens were cached is known with the complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from scheduler_svc.core.request import TokenScore
from scheduler_svc.engine.events import Delta, Finished


class Answers:
    """The messages of one request."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = prompt_token_ids

    def chunk(self, delta: Delta) -> Any:
        """A GenerateResponse with the tokens of a delta."""
        return vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=len(self._prompt),
                completion_tokens=len(delta.token_ids),
                output_logprobs=_output_logprobs(delta.logprobs),
                input_logprobs=self._input_logprobs(delta.prompt_logprobs),
                index=delta.index,
            )
        )

    def complete(self, end: Finished, delta: Delta | None = None) -> Any:
        """A GenerateResponse with the end of a sibling; `delta`: all of its tokens."""
        complete = vllm.GenerateComplete(
            finish_reason=end.reason,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
            spec_draft_tokens=end.drafted_tokens,
            spec_accepted_tokens=end.accepted_tokens,
            index=end.index,
        )
        if delta is not None:
            complete.output_ids.extend(delta.token_ids)
            if delta.logprobs:
                complete.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs))
            if delta.prompt_logprobs:
                complete.input_logprobs.CopyFrom(self._input_logprobs(delta.prompt_logprobs))
        if end.stop_token_id is not None:
            complete.matched_token_id = end.stop_token_id
        elif end.stop_string is not None:
            complete.matched_stop_str = end.stop_string
        return vllm.GenerateResponse(complete=complete)

    def _input_logprobs(self, scores: Sequence[TokenScore]) -> Any:
        """The prompt's; its first token has none."""
        if not scores:
            return None
        logprobs = vllm.InputLogProbs(token_ids=self._prompt)
        logprobs.token_logprobs.add()
        logprobs.top_logprobs.add()
        for score in scores:
            logprobs.token_logprobs.add(value=score.logprob)
            logprobs.top_logprobs.append(_top(score))
        return logprobs


def _output_logprobs(scores: Sequence[TokenScore]) -> Any:
    if not scores:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[score.logprob for score in scores],
        token_ids=[score.token_id for score in scores],
        top_logprobs=[_top(score) for score in scores],
    )


def _top(score: TokenScore) -> Any:
    return vllm.TopLogProbs(
        values=[logprob for _, logprob in score.top],
        token_ids=[token_id for token_id, _ in score.top],
    )
