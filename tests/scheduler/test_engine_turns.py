"""What the engine's thread does in one turn: nobody who asks or submits may have it for himself."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.limits import FULL_ATTENTION, Geometry, GroupGeometry
from scheduler_svc.core.state import State
from scheduler_svc.engine import views
from scheduler_svc.engine.events import Failed
from scheduler_svc.errors import QueueFull
from tests.support.engine_harness import Bench, right

ROOMY = Geometry(4, 400 + 2, 64, (GroupGeometry(FULL_ATTENTION, 1, 1),), max_model_len=64)


def test_commands_that_come_during_a_turn_wait_for_the_next() -> None:
    """Clients that ask or submit without pause stop all planning."""
    bench = Bench()
    bench.connect()
    bench.submit("a", [1, 2, 3])
    obeyed = 0

    def again() -> None:
        nonlocal obeyed
        obeyed += 1
        assert obeyed < 100, "the turn does not end"
        bench.engine._inbox.put(again)

    bench.engine._inbox.put(again)
    bench.engine._inbox.put(again)
    bench.turn()
    assert obeyed == 2
    assert bench.link.plans, "planned in between"
    bench.serve()
    assert bench.tokens("a") == right([1, 2, 3], 4)


def test_long_questions_are_answered_one_in_a_turn() -> None:
    """Four who list all requests in a loop leave a tenth of the steps."""
    bench = Bench()
    bench.connect()

    def question(state: State) -> int:
        bench.now += 0.005
        return len(state.requests)

    bench.submit("a", [1, 2, 3])
    answers = [bench.engine.ask(question) for _ in range(3)]
    flushed = bench.engine.flush_cache()
    bench.turn()
    assert [answer.done() for answer in answers] == [True, False, False]
    assert bench.link.plans, "planned before the others are answered"
    bench.turn()
    bench.turn()
    assert [answer.result(0) for answer in answers] == [1, 1, 1]
    bench.turn()
    assert flushed.result(0) == 0


def test_a_burst_that_rows_are_free_for_does_not_queue() -> None:
    """An idle server refuses a burst that it could serve at once."""
    bench = Bench(max_queue_size=4, geometry=ROOMY, num_rows=64, max_batch_tokens=256)
    bench.connect()
    for i in range(20):
        bench.submit(f"r{i}", [i, 2, 3])
    bench.turn()
    assert not [event for event in bench.events if isinstance(event, Failed)]
    assert bench.engine.status.num_running == 20
    bench.serve()


@pytest.mark.parametrize("num_turns", [0, 1])
def test_the_queue_limit_counts_those_without_a_row(num_turns: int) -> None:
    """More wait than max_queue_size says, or fewer; a family waits as one, for all its rows."""
    bench = Bench(max_queue_size=4, geometry=ROOMY, num_rows=8, max_batch_tokens=64)
    bench.connect()
    bench.submit("family", [1, 2], n=5)
    for i in range(3):
        bench.submit(f"r{i}", [i, 2, 3])
    for _ in range(num_turns):
        bench.turn()
    bench.submit("second family", [1, 2], n=2)
    for i in range(6):
        bench.submit(f"waits{i}", [i, 2, 3])
    bench.turn()
    refused = [event for event in bench.events if isinstance(event, Failed)]
    assert [event.request_id for event in refused] == ["waits3", "waits4", "waits5"]
    assert all(isinstance(event.error, QueueFull) for event in refused)
    assert "4 requests are waiting; max_queue_size is 4" in str(refused[0].error)
    bench.serve()


@pytest.mark.parametrize("wanted", ["", "PENDING", "PREFILLING", "DECODING", "FINISHED"])
@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_a_list_is_the_head_of_the_whole_list(wanted: str, limit: int) -> None:
    """A list that was cut shows others, in another order, or counts wrongly."""
    bench = Bench(geometry=ROOMY, num_rows=8, max_batch_tokens=16)
    bench.connect()
    for i in range(30):
        bench.submit(f"r{i}", [i] * 50 if i == 2 else [i, 2, 3], max_tokens=4, n=1 + i % 3)
    bench.step(2)
    state = bench.engine._state
    whole = [
        view
        for view in (views._view(state, request) for request in state.live())
        if not wanted or view.state == wanted
    ]
    assert {view.state for view in whole} or wanted == "FINISHED"
    assert views.list_requests(state, wanted, limit) == whole[:limit]
    assert views.count_requests(state, wanted) == len(whole)


@pytest.mark.parametrize("wanted", ["", "PENDING", "DECODING"])
def test_a_list_costs_what_it_shows(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chairlift status` beside 50,000 waiting requests stops the engine for half a second."""
    bench = Bench(geometry=ROOMY, num_rows=8, max_batch_tokens=64)
    bench.connect()
    for i in range(2000):
        bench.submit(f"r{i}", [1, 2, 3])
    bench.step(2)
    made = []
    view = views._view

    def counted(*arguments: Any) -> views.RequestView:
        made.append(arguments)
        return view(*arguments)

    class Watched(dict[str, Any]):
        """Counts what is read of it."""

        num_read = 0

        def values(self) -> Any:
            for value in super().values():
                Watched.num_read += 1
                yield value

    monkeypatch.setattr(views, "_view", counted)
    state = bench.engine._state
    state.requests = Watched(state.requests)
    assert len(views.list_requests(state, wanted, 5)) == 5
    assert views.count_requests(state, wanted) in (2000, 1992, 8)
    assert len(made) == 5
    assert Watched.num_read <= 5 + state.rows.num_rows
