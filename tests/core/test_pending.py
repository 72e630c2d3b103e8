"""The waiting queue against its slow twin, a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.pending import PendingQueue
from scheduler_svc.core.request import Request, Sampling


def request(ticket: int) -> Request:
    return Request(f"r{ticket}", ticket, [1], 1, 2, Sampling())


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2)), max_size=120))
def test_it_is_a_sorted_list(operations: list[tuple[int, int]]) -> None:
    """A request that returns, leaves from the middle, or waits twice, and the order breaks."""
    queue = PendingQueue()
    twin: dict[int, tuple[int, Request]] = {}
    for ticket, urgency in operations:
        if ticket in twin:
            queue.remove(twin.pop(ticket)[1])
        else:
            twin[ticket] = (urgency, request(ticket))
            queue.add(twin[ticket][1], urgency)
        in_order = [r.ticket for r in queue.in_order()]
        assert in_order == sorted(twin, key=lambda ticket: (twin[ticket][0], ticket))
        assert len(queue) == len(twin)


def test_looking_at_the_first_does_not_read_the_rest() -> None:
    """The cost of a step grows with the number of waiting requests."""
    queue = PendingQueue()
    for ticket in range(100_000):
        queue.add(request(ticket))
    assert [r.ticket for r, _ in zip(queue.in_order(), range(3), strict=False)] == [0, 1, 2]
    looked_at = queue.in_order()
    next(looked_at)
    # a generator that has yielded once holds at most the two children of the first entry
    assert looked_at.gi_frame is not None
    assert len(looked_at.gi_frame.f_locals["frontier"]) <= 2
