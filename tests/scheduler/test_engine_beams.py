"""Beam searches through the real engine: whole answers with scores, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.policies import STATIC
from scheduler_svc.core.request import BeamSearch, FinishReason, NewRequest, RequestState, Sampling
from scheduler_svc.core.state import State
from scheduler_svc.errors import RequestFailed, RequestRejected
from tests.support.engine_harness import GEOMETRY, Bench, assert_nothing_is_held, right
from tests.support.expected_answers import Expected
from tests.support.expected_beams import expected_beams

PROMPT = [7, 3, 9, 1, 4, 2]  # one page and a half: beams copy a partial block
BEAMS = BeamSearch(3, 2, vocab_size=50)
ROOMY = Geometry(4, 40 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=32)
TIGHT = Geometry(4, 11 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=24)
SWAPPING = Geometry(
    4, 11 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=24, num_swap_chunks=20
)


def wanted(max_tokens: int, stops: frozenset[int] = frozenset()) -> list[Expected]:
    sampling = Sampling(stop_token_ids=stops)
    return expected_beams(NewRequest("a", PROMPT, max_tokens, sampling, beams=BEAMS), 50)


def check_answers(bench: Bench, answers: list[Expected]) -> None:
    for index, answer in enumerate(answers):
        assert bench.tokens("a", index) == answer.tokens
        assert len(bench.deltas("a", index)) == 1
        end = bench.end("a", index)
        assert (end.reason, end.beam_score) == (answer.reason, answer.beam_score)
        assert end.completion_tokens == len(answer.tokens)
        assert end.prompt_tokens == len(PROMPT)
        is_stopped = answer.reason is FinishReason.STOP
        assert end.stop_token_id == (answer.tokens[-1] if is_stopped else None)


@pytest.mark.parametrize("depth", [1, 2])
def test_each_answer_comes_whole_with_its_score(depth: int) -> None:
    """A beam's tokens are streamed before it is known which beam wins."""
    stops = frozenset({wanted(8)[0].tokens[3]})
    bench = Bench(depth, geometry=ROOMY)
    bench.connect()
    bench.submit("a", PROMPT, 8, stop_token_ids=stops, beams=BEAMS)
    bench.submit("beside", [1, 2], 8)
    for _ in range(3):
        bench.step()
        assert bench.deltas("a", 0) == []
    bench.serve()
    answers = wanted(8, stops)
    assert FinishReason.STOP in {answer.reason for answer in answers}
    check_answers(bench, answers)
    assert bench.tokens("beside") == right([1, 2], 8)
    assert_nothing_is_held(bench)


def test_a_stop_string_cuts_the_answer_that_has_it() -> None:
    """It does not change the search."""
    answers = wanted(8)
    place = 4
    stop = chr(97 + answers[0].tokens[place] % 26)
    bench = Bench(geometry=ROOMY)
    bench.connect()
    bench.submit("a", PROMPT, 8, stop, beams=BEAMS)
    bench.serve()
    for index, answer in enumerate(answers):
        letters = [chr(97 + token % 26) for token in answer.tokens]
        end = bench.end("a", index)
        assert end.stop_string == (stop if stop in letters else None)
        if stop in letters:
            shown = letters[: letters.index(stop)]
            assert end.reason is FinishReason.STOP
            assert bench.tokens("a", index) == answer.tokens[: len(shown) + 1]
            assert bench.text("a", index) == "".join(shown)
        else:
            assert bench.tokens("a", index) == answer.tokens
    assert bench.end("a", 0).stop_string == stop


def is_pending(state: State) -> bool:
    return all(request.state is RequestState.PENDING for request in state.live())


def is_prefilling(state: State) -> bool:
    return bool(state.rows.awaits_fork.any()) and not state.rows.is_decoding.any()


def is_first_in_flight(state: State) -> bool:
    """The first candidates have not come back: the other members hold nothing."""
    return bool(state.in_flight) and bool(state.rows.is_decoding.any())


def is_searching(state: State) -> bool:
    return all(request.num_output_tokens >= 2 for request in state.live())


def is_waiting_again(state: State) -> bool:
    return any(r.num_output_tokens and r.state is RequestState.PENDING for r in state.live())


def is_offloaded(state: State) -> bool:
    return any(request.swapped is not None for request in state.live())


@pytest.mark.parametrize("depth", [1, 2], ids="depth{}".format)
@pytest.mark.parametrize(
    ("geometry", "is_there"),
    [
        (ROOMY, is_pending),
        (ROOMY, is_prefilling),
        (ROOMY, is_first_in_flight),
        (ROOMY, is_searching),
        (TIGHT, is_waiting_again),
        (SWAPPING, is_offloaded),
    ],
    ids=lambda value: getattr(value, "__name__", f"swap{getattr(value, 'num_swap_chunks', '')}"),
)
def test_an_abort_takes_all_beams(
    depth: int, geometry: Geometry, is_there: Callable[[State], bool]
) -> None:
    """A beam goes on for nobody, keeps blocks and rows for ever, or is sent as an answer."""
    bench = Bench(depth, geometry=geometry, max_batch_tokens=6, num_rows=6)
    if is_there is not is_pending:
        bench.connect()
    others = [] if geometry is ROOMY else ["older", "old"]
    for other in others:
        bench.submit(other, [5, 6], 20)
    bench.submit("a", list(range(20)) if is_there is is_prefilling else PROMPT, 8, beams=BEAMS)
    bench.turn()
    for _ in range(60):
        if is_there(bench.engine._state):
            break
        bench.link.answer()
        bench.turn()
    else:
        raise AssertionError(f"never {is_there.__name__}")
    aborted = bench.engine.abort(["a", *others])
    bench.turn()
    assert "a" in aborted.result(0)
    for index in range(BEAMS.num_answers):
        end = bench.end("a", index)
        assert (end.reason, end.completion_tokens, end.beam_score) == (FinishReason.ABORT, 0, None)
        assert bench.deltas("a", index) == []
    if is_there is is_pending:
        bench.connect()
    bench.submit("a", [8], 4)  # the id is free, and memory too
    bench.serve()
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_search_outlives_its_worker(depth: int, turns: int) -> None:
    """A crash starts the search again, or merges its beams into one."""
    bench = Bench(depth, geometry=ROOMY)
    bench.connect()
    bench.submit("a", PROMPT, 6, beams=BEAMS)
    bench.step(turns)
    bench.connect()  # another worker says hello
    bench.serve()
    check_answers(bench, wanted(6))


@pytest.mark.parametrize("geometry", [TIGHT, SWAPPING], ids=["reset", "swap"])
def test_a_search_that_has_to_make_room_finds_the_same(geometry: Geometry) -> None:
    """It loses a beam with its blocks."""
    bench = Bench(geometry=geometry, num_rows=6)
    bench.connect()
    bench.submit("older", [5, 6], 20)
    bench.submit("old", [5, 6], 20)
    bench.submit("a", PROMPT, 8, beams=BEAMS)
    bench.serve()
    check_answers(bench, wanted(8))
    assert bench.end("a").preemptions
    assert bench.tokens("older") == right([5, 6], 20, geometry)
    assert_nothing_is_held(bench)


def test_a_failure_takes_the_whole_search() -> None:
    """It fails once; no member goes on."""
    bench = Bench(geometry=ROOMY)
    bench.connect()
    bench.submit("a", PROMPT, 8, beams=BEAMS)
    bench.step(3)
    for _ in range(2):
        bench.turn()
        bench.link.fault("RuntimeError: out of luck")
    bench.turn()
    assert isinstance(bench.error("a"), RequestFailed)
    assert_nothing_is_held(bench)


def test_hidden_states_that_are_not_finite_fail_the_whole_search() -> None:
    """Candidates of a broken beam win."""
    bench = Bench(geometry=ROOMY)
    bench.connect()
    bench.submit("a", PROMPT, 8, beams=BEAMS)
    bench.step(3)
    bench.turn()
    result = bench.link.worker.step(bench.link.plans.popleft())
    bench.link.say_result(replace(result, is_finite=np.array([1, 0, 1], np.int32)))
    bench.turn()
    assert "not finite" in str(bench.error("a"))
    assert_nothing_is_held(bench)


def test_beams_that_never_fit_are_refused_with_both_numbers() -> None:
    """One beam fits the pool, eight do not: the search would be preempted for ever."""
    bench = Bench(num_rows=8)
    bench.connect()
    beams = BeamSearch(8, vocab_size=50)
    bench.submit("one", PROMPT, 20)
    bench.submit("a", PROMPT, 20, beams=beams)
    bench.serve()
    error = bench.error("a")
    assert isinstance(error, RequestRejected)
    assert "prompt (6 tokens) + max_tokens (20) is 26" in str(error)
    assert "the whole KV pool holds 8 tokens of each of 8 beams" in str(error)
    bench.submit("b", PROMPT, 2, beams=beams)
    bench.serve()
    assert bench.end("b").completion_tokens == 2
    assert bench.end("one").completion_tokens == 20


def test_a_smaller_worker_fails_the_search_that_it_cannot_hold() -> None:
    """At the next worker's Ready, admission runs again, with beams counted."""
    bench = Bench(geometry=ROOMY, num_rows=4)
    bench.connect()
    bench.submit("a", PROMPT, 20, beams=BEAMS)
    bench.submit("one", PROMPT, 20)
    bench.step(3)
    bench.link.geometry = GEOMETRY
    bench.connect()
    assert "of each of 3 beams" in str(bench.error("a"))
    bench.serve()
    assert bench.tokens("one") == right(PROMPT, 20)


def test_static_batches_refuse_beams_by_name() -> None:
    bench = Bench(policy=STATIC)
    bench.connect()
    bench.submit("a", PROMPT, 4, beams=BEAMS)
    bench.serve()
    assert "sampling.beam_width is 3; allowed: 1, when scheduler_type is static" in str(
        bench.error("a")
    )
