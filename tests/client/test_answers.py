"""What a response holds, as typed values."""

from __future__ import annotations

from client.answers import Completion, Timing, Transcript, Usage
from protos import inference_pb2


def test_every_field_of_an_end_is_read() -> None:
    """A count that the server reports and nobody can see."""
    response = inference_pb2.GenerateResponse(
        index=1,
        complete=inference_pb2.Complete(
            finish_reason="stop",
            stop_string="x",
            usage=inference_pb2.Usage(
                prompt_tokens=1,
                completion_tokens=2,
                cached_tokens=3,
                drafted_tokens=4,
                accepted_tokens=5,
            ),
            timing=inference_pb2.Timing(
                queued_seconds=0.25, prefill_seconds=0.5, decode_seconds=0.75, preemptions=6
            ),
            beam_score=-1.5,
        ),
    )
    transcript = Transcript()
    assert transcript.absorb(response) is None
    expected = Completion(
        index=1,
        finish_reason="stop",
        stop_token_id=None,
        stop_string="x",
        usage=Usage(1, 2, 3, 4, 5),
        timing=Timing(0.25, 0.5, 0.75, 6),
        beam_score=-1.5,
    )
    assert transcript.completions == {1: expected}
    response.complete.ClearField("beam_score")
    transcript.absorb(response)
    assert transcript.completions[1].beam_score is None
