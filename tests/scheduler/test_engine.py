"""The engine with a worker that is slow, fails, dies and comes back; time is a number here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from protos import link_pb2
from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.request import FinishReason
from scheduler_svc.engine.events import Failed
from scheduler_svc.errors import (
    DuplicateRequest,
    QueueFull,
    RequestFailed,
    RequestRejected,
    Unavailable,
)
from tests.support.engine_harness import Bench, right

SMALLER = Geometry(4, 3 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=32)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_are_served_and_timed(depth: int) -> None:
    """The plain path: tokens, text, usage and times of several requests at once."""
    bench = Bench(depth)
    bench.connect()
    prompts = {"a": [1, 2, 3], "b": [4], "c": list(range(18))}
    for request_id, prompt in prompts.items():
        bench.submit(request_id, prompt)
    bench.serve()
    for request_id, prompt in prompts.items():
        assert bench.tokens(request_id) == right(prompt, 4)
        assert bench.text(request_id) == "".join(chr(97 + t % 26) for t in right(prompt, 4))
        end = bench.end(request_id)
        assert (end.reason, end.prompt_tokens, end.completion_tokens) == (
            FinishReason.LENGTH,
            len(prompt),
            4,
        )


def test_requests_wait_for_a_worker_that_is_not_there_yet() -> None:
    """A request that arrives while the model loads is lost or refused."""
    bench = Bench()
    bench.submit("early", [1, 2])
    bench.turn()
    assert not bench.engine.status.is_ready
    assert bench.events == []
    bench.now += 60
    bench.connect()
    bench.serve()
    assert bench.tokens("early") == right([1, 2], 4)
    end = bench.end("early")
    assert end.queued_seconds == 60
    assert [s.worker for s in bench.statuses] == ["loading", "ready"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
@pytest.mark.parametrize("speculate", [0, 4])
def test_a_stop_string_ends_the_answer_and_the_overshoot_is_dropped(
    depth: int, stop_after: int, speculate: int
) -> None:
    """Tokens behind a stop string reach the client, or the usage, or leak a row; also those of
    drafts that were right."""
    bench = Bench(depth)
    bench.engine._scheduler._propose = lambda request: right([3, 1, 4], 8)[
        request.num_output_tokens :
    ]
    bench.connect()
    prompt = [3, 1, 4]
    tokens = right(prompt, 8)
    letters = [chr(97 + t % 26) for t in tokens]
    stop = letters[stop_after - 1]
    ends_at = letters.index(stop) + 1
    bench.submit("a", prompt, 8, stop, speculate=speculate)
    bench.serve()
    for _ in range(3):
        bench.turn()
        bench.link.answer()
    assert bench.tokens("a") == tokens[:ends_at]
    assert bench.text("a") == "".join(letters[: ends_at - 1])
    end = bench.end("a")
    assert (end.reason, end.stop_string, end.stop_token_id) == (FinishReason.STOP, stop, None)
    assert end.completion_tokens == ends_at
    if stop_after == 3:  # the first two are planned before any text is known
        assert end.accepted_tokens == end.drafted_tokens == speculate
    assert bench.engine._state.memory.device.chunks.num_free == 12


def test_a_stop_token_is_named_and_not_shown() -> None:
    """The text of an EOS token reaches the client."""
    bench = Bench()
    bench.connect()
    tokens = right([5, 6], 8)
    bench.submit("a", [5, 6], 8, stop_token_ids=frozenset({tokens[2]}))
    bench.serve()
    ends_at = tokens.index(tokens[2]) + 1
    assert bench.tokens("a") == tokens[:ends_at]
    assert len(bench.text("a")) == ends_at - 1
    end = bench.end("a")
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, tokens[2])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("turns", range(6))
def test_a_worker_dies_and_the_next_one_goes_on(depth: int, turns: int) -> None:
    """A crash loses, doubles or changes a token of somebody's answer."""
    bench = Bench(depth)
    bench.connect()
    prompts = {"a": [1, 2, 3], "b": list(range(20))}
    for request_id, prompt in prompts.items():
        bench.submit(request_id, prompt, 6)
    for _ in range(turns):
        bench.turn()
        bench.link.answer()
    bench.turn()
    bench.now += 6  # silence
    bench.turn()
    assert bench.engine.status.worker == "connecting"
    assert bench.link.is_dropped
    bench.link.answer()  # a late result of the dead session, if a plan was in flight
    bench.turn()
    bench.connect()
    bench.serve()
    for request_id, prompt in prompts.items():
        assert bench.tokens(request_id) == right(prompt, 6)
        assert bench.end(request_id).reason is FinishReason.LENGTH


def test_a_new_hello_replaces_the_worker_at_once() -> None:
    """A worker that was restarted quickly is not noticed until the timeout."""
    bench = Bench()
    bench.connect()
    bench.submit("a", [1, 2, 3])
    bench.turn()
    bench.link.answer()
    bench.turn()
    bench.connect()
    assert not bench.link.is_dropped, "the new session was dropped with the old one"
    bench.serve()
    assert bench.tokens("a") == right([1, 2, 3], 4)


def test_what_does_not_fit_the_next_workers_memory_fails_by_name() -> None:
    """It would block the queue for ever."""
    bench = Bench()
    bench.connect()
    bench.submit("big", list(range(20)), 4)
    bench.submit("small", [1], 4)
    bench.turn()
    bench.link.geometry = SMALLER
    bench.connect()
    bench.serve()
    assert isinstance(bench.error("big"), RequestFailed)
    assert "the whole KV pool holds 12 tokens" in str(bench.error("big"))
    assert bench.tokens("small") == right([1], 4)


def test_a_failed_step_is_tried_again_once() -> None:
    """A passing error of the worker kills answers, or a lasting one loops for ever."""
    bench = Bench()
    bench.connect()
    bench.submit("a", [1, 2, 3])
    bench.turn()
    bench.link.fault("RuntimeError: out of luck")
    bench.serve()
    assert bench.tokens("a") == right([1, 2, 3], 4)
    assert bench.link.sent[-1].WhichOneof("message") == "resume"

    bench.submit("b", [4, 5])
    for _ in range(2):
        bench.turn()
        bench.link.fault("RuntimeError: out of luck")
    bench.turn()
    assert "b: the step that computed it failed: RuntimeError: out of luck" in str(bench.error("b"))


def test_a_model_that_is_refused_fails_everybody_with_the_reason() -> None:
    """Clients wait for ever for a model that can never be served."""
    bench = Bench()
    bench.link.hello()
    bench.submit("a", [1])
    bench.turn()
    bench.link.fault("bloom is not supported", is_fatal=True)
    bench.submit("b", [1])
    bench.turn()
    assert isinstance(bench.error("a"), Unavailable)
    assert isinstance(bench.error("b"), Unavailable)
    assert "bloom is not supported" in str(bench.error("b"))
    assert bench.engine.status.fatal_error == "bloom is not supported"
    bench.connect()  # somebody mended it
    bench.submit("c", [1])
    bench.serve()
    assert bench.tokens("c") == right([1], 4)


def test_refusals() -> None:
    """A second request with a live id, a full queue, a request that can never fit."""
    bench = Bench(max_queue_size=1, num_rows=1)
    bench.connect()
    bench.submit("a", [1])
    bench.submit("a", [2])
    bench.submit("queued", [1])
    bench.submit("too many", [1])
    bench.turn()
    assert [type(e.error) for e in bench.events if isinstance(e, Failed)] == [
        DuplicateRequest,
        QueueFull,
    ]
    bench.events.clear()
    bench.serve()
    bench.submit("long", [1] * 20, 20)
    bench.turn()
    assert isinstance(bench.error("long"), RequestRejected)
    assert "is 40; max_model_len is 32" in str(bench.error("long"))


def test_abort_ends_with_what_was_delivered() -> None:
    """An abort loses its Complete, or the row, or goes on sending."""
    bench = Bench()
    bench.connect()
    bench.submit("a", [1, 2, 3], 20)
    for _ in range(3):
        bench.turn()
        bench.link.answer()
    bench.turn()
    aborted = bench.engine.abort(["a", "nobody", "a"])
    bench.turn()
    assert set(aborted.result(0)) == {"a"}
    end = bench.end("a")
    assert (end.reason, end.completion_tokens) == (FinishReason.ABORT, 3)
    bench.link.answer()
    bench.turn()
    assert bench.engine._state.memory.device.chunks.num_free == 12
    assert bench.engine.ask(lambda state: len(state.rows.running)) is not None


def test_stopping_ends_every_stream() -> None:
    """Clients hang on a server that has gone."""
    bench = Bench()
    bench.submit("a", [1])
    bench.engine.start()
    bench.engine.stop()
    assert isinstance(bench.error("a"), Unavailable)


def test_a_worker_that_answers_wrongly_is_lost_not_the_server() -> None:
    """One confused worker takes every client down with it."""
    bench = Bench()
    bench.connect()
    bench.submit("a", [1, 2, 3])
    bench.turn()
    right_result = bench.link.worker.step(bench.link.plans.popleft())
    wrong = replace(right_result, token_ids=np.zeros(0, np.int32))
    bench.link.say_result(wrong)
    bench.turn()
    assert bench.engine.status.worker == "connecting"
    bench.link.hello()
    bench.link.say(ready=link_pb2.Ready(page_size=0))
    bench.turn()
    assert bench.engine.status.worker == "connecting"
    bench.connect()
    bench.serve()
    assert bench.tokens("a") == right([1, 2, 3], 4)


def test_a_question_that_raises_is_the_askers_problem() -> None:
    """An operator's odd question kills the server."""
    bench = Bench()
    answer = bench.engine.ask(lambda state: 1 // 0)
    bench.turn()
    with pytest.raises(ZeroDivisionError):
        answer.result(0)
