"""n > 1 through the real engine: every sibling's tokens, ends, and what an abort leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.request import FinishReason, RequestState
from scheduler_svc.core.state import State
from scheduler_svc.errors import RequestFailed
from tests.support.engine_harness import GEOMETRY, Bench, assert_nothing_is_held
from tests.support.expected_answers import expected_tokens

PROMPT = [7, 3, 9, 1, 4, 2]  # one page and a half: siblings copy a partial block
TIGHT = Geometry(4, 7 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=24)
SWAPPING = Geometry(
    4, 7 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=24, num_swap_chunks=20
)


def family(prompt: list[int], max_tokens: int, n: int, temperature: float) -> list[list[int]]:
    """The right tokens of siblings with seed 11."""
    return expected_tokens(
        [prompt] * n, [max_tokens] * n, 50, [temperature] * n, [11] * n, siblings=range(n)
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt", [PROMPT, [5], list(range(20))], ids=["part", "one", "chunks"])
def test_every_sibling_streams_its_own_tokens(depth: int, prompt: list[int]) -> None:
    """Siblings read each other's KV, swap tokens or texts, or all say the same."""
    bench = Bench(depth)
    bench.connect()
    bench.submit("a", prompt, 8, temperature=1.0, seed=11, n=3)
    bench.submit("beside", [1, 2], 8)
    bench.serve()
    want = family(prompt, 8, 3, 1.0)
    assert len({tuple(tokens) for tokens in want}) == 3, "a poor test: siblings are equal"
    for index, tokens in enumerate(want):
        assert bench.tokens("a", index) == tokens
        assert bench.text("a", index) == "".join(chr(97 + token % 26) for token in tokens)
        end = bench.end("a", index)
        assert (end.reason, end.prompt_tokens, end.completion_tokens) == (
            FinishReason.LENGTH,
            len(prompt),
            8,
        )
    assert_nothing_is_held(bench)


def test_greedy_siblings_are_equal() -> None:
    """At temperature 0 there is one most probable answer; the API says so."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT, 6, seed=11, n=3)
    bench.serve()
    assert bench.tokens("a", 0) == bench.tokens("a", 1) == bench.tokens("a", 2)
    assert bench.tokens("a") == family(PROMPT, 6, 1, 0.0)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_end_for_themselves(depth: int) -> None:
    """One sibling's stop string or EOS ends the others, or its end is told to another."""
    want = family(PROMPT, 12, 3, 1.0)
    stop = chr(97 + want[1][2] % 26)
    eos = want[2][4]
    bench = Bench(depth)
    bench.connect()
    bench.submit(
        "a", PROMPT, 12, stop, frozenset({eos}), temperature=1.0, seed=11, n=3
    )  # fmt: skip
    bench.serve()
    for index, tokens in enumerate(want):
        ends = [
            place + 1
            for place, token in enumerate(tokens)
            if token == eos or chr(97 + token % 26) == stop
        ]
        tokens = tokens[: min(ends, default=12)]
        assert bench.tokens("a", index) == tokens
        end = bench.end("a", index)
        assert end.completion_tokens == len(tokens)
        if tokens[-1] == eos:
            assert (end.stop_token_id, end.stop_string) == (eos, None)
        elif ends:
            assert (end.stop_token_id, end.stop_string) == (None, stop)
        assert end.reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert len({bench.end("a", index).completion_tokens for index in range(3)}) > 1
    assert_nothing_is_held(bench)


def is_pending(state: State) -> bool:
    return all(request.state is RequestState.PENDING for request in state.live())


def is_prefilling(state: State) -> bool:
    """Part of the prompt is done; the siblings have rows and no blocks."""
    return bool(state.rows.awaits_fork.any()) and not state.rows.is_decoding.any()


def is_forked(state: State) -> bool:
    """The step that samples the first tokens has not come back."""
    rows = state.rows.in_use()
    return bool(state.rows.is_decoding[rows].all() and state.in_flight) and all(
        request.num_output_tokens == 0 for request in state.live()
    )


def is_decoding(state: State) -> bool:
    return all(request.num_output_tokens >= 2 for request in state.live())


def has_ended_one(state: State) -> bool:
    return len(state.requests["a"]) == 2


def is_waiting_again(state: State) -> bool:
    """One was preempted, with tokens, while others run."""
    states = [request.state for request in state.live() if request.num_output_tokens]
    return RequestState.PENDING in states and RequestState.DECODING in states


def is_offloaded(state: State) -> bool:
    return any(request.swapped is not None for request in state.live())


@pytest.mark.parametrize("depth", [1, 2], ids="depth{}".format)
@pytest.mark.parametrize(
    ("geometry", "is_there"),
    [
        (GEOMETRY, is_pending),
        (GEOMETRY, is_prefilling),
        (GEOMETRY, is_forked),
        (GEOMETRY, is_decoding),
        (GEOMETRY, has_ended_one),
        (TIGHT, is_waiting_again),
        (SWAPPING, is_offloaded),
    ],
    ids=lambda value: getattr(value, "__name__", f"swap{getattr(value, 'num_swap_chunks', '')}"),
)
def test_an_abort_takes_all_siblings(
    depth: int, geometry: Geometry, is_there: Callable[[State], bool]
) -> None:
    """A sibling goes on for nobody, ends twice, never ends, or keeps blocks and rows for ever."""
    prompt = list(range(18)) if is_there is is_prefilling else PROMPT
    want = family(prompt, 14, 3, 1.0)
    # a token that one of them says early, and no other
    eos = next(token for token in want[1][2:6] if token not in want[0] + want[2])
    stops = frozenset({eos} if is_there is has_ended_one else [])
    bench = Bench(depth, geometry=geometry, max_batch_tokens=6)
    if is_there is not is_pending:
        bench.connect()
    bench.submit("a", prompt, 14, stop_token_ids=stops, temperature=1.0, seed=11, n=3)
    bench.turn()
    for _ in range(60):
        if is_there(bench.engine._state):
            break
        bench.link.answer()
        bench.turn()
    else:
        raise AssertionError(f"never {is_there.__name__}")
    told = [bench.tokens("a", index) for index in range(3)]
    aborted = bench.engine.abort(["a"])
    bench.turn()
    assert aborted.result(0) == ["a"]
    reasons = [bench.end("a", index).reason for index in range(3)]
    assert reasons.count(FinishReason.STOP) == (is_there is has_ended_one)
    assert reasons.count(FinishReason.ABORT) == 3 - (is_there is has_ended_one)
    for index in range(3):
        assert bench.end("a", index).completion_tokens == len(told[index])
        assert told[index] == want[index][: len(told[index])]
    if is_there is is_pending:
        bench.connect()
    bench.submit("a", [8], 4)  # the id is free, and memory too
    bench.events.clear()
    bench.serve()
    assert bench.tokens("a") == family([8], 4, 1, 0.0)[0]
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("geometry", [TIGHT, SWAPPING], ids=["reset", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_that_do_not_fit_together_take_turns(depth: int, geometry: Geometry) -> None:
    """Three answers of which the pool holds one and a half wedge, or change."""
    bench = Bench(depth, geometry=geometry)
    bench.connect()
    bench.submit("a", PROMPT, 14, temperature=1.0, seed=11, n=3)
    bench.serve()
    for index, tokens in enumerate(family(PROMPT, 14, 3, 1.0)):
        assert bench.tokens("a", index) == tokens
    ends = [bench.end("a", index) for index in range(3)]
    assert sum(end.preemptions for end in ends) > 0
    assert_nothing_is_held(bench)


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_outlive_their_worker(depth: int, turns: int) -> None:
    """A crash merges siblings into one, or starts one of them again from the prompt."""
    bench = Bench(depth)
    bench.connect()
    bench.submit("a", list(range(18)), 6, temperature=1.0, seed=11, n=3)
    bench.step(turns)
    bench.connect()  # another worker says hello
    bench.serve()
    for index, tokens in enumerate(family(list(range(18)), 6, 3, 1.0)):
        assert bench.tokens("a", index) == tokens
        assert bench.end("a", index).reason is FinishReason.LENGTH


def test_a_failure_takes_all_siblings() -> None:
    """A request fails once, and its siblings' streams hang or end as if they were whole."""
    bench = Bench()
    bench.connect()
    bench.submit("a", PROMPT, 8, n=3)
    bench.step()
    for _ in range(2):
        bench.turn()
        bench.link.fault("RuntimeError: out of luck")
    bench.turn()
    assert isinstance(bench.error("a"), RequestFailed)
    assert "out of luck" in str(bench.error("a"))
    assert_nothing_is_held(bench)
